"""Whether a text is the whole of a prompt again: a child run of it would not come nearer to an end.

The kernel holds no prompt; it compares with the one in the record, as far as they are alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable

from rlm_kernel.cells import PromptInfo
from rlm_kernel.record import Record

__all__ = ["is_whole"]

_NEAR = 0.9
"""Of a prompt's characters, those that are more than the space at its ends."""

_ESCAPED = 6
"""Characters that one of a list's may become in JSON."""

_SPACE = " \t\n\r\x0b\x0c"
_JOINS = ("", " ", "\n", "\n\n")


async def is_whole(text: str, prompt: PromptInfo, record: Record) -> bool:
    """Whether *text* is all of *prompt*, but for space at its ends.

    Of a list or dict that is its JSON, its ``str()``, and its items joined by nothing, a space,
    or one or two line ends.

    Raises
    ------
    RecordError
        The prompt cannot be read.
    """
    if len(text) < _NEAR * prompt.chars:
        return False
    if prompt.kind != "str":
        return await _is_whole_of_items(text, prompt, record)
    if len(text) == prompt.chars and await asyncio.to_thread(_sha256, text) == prompt.sha256:
        return True
    core = text.strip(_SPACE)
    if not _NEAR * prompt.chars <= len(core) <= prompt.chars:
        return False
    return await _is_core(
        core.encode("utf-8", "surrogatepass"), record.prompt_chunks(prompt.sha256)
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


async def _is_core(core: bytes, chunks: Iterable[bytes]) -> bool:
    """Whether *chunks* are *core* with space around it."""
    at = 0
    view = memoryview(core)
    for chunk in chunks:
        piece = chunk if at else chunk.lstrip()
        shared = min(len(piece), len(core) - at)
        if view[at : at + shared] != piece[:shared] or piece[shared:].strip():
            return False
        at += shared
        await asyncio.sleep(0)  # a prompt may have a gigabyte
    return at == len(core)


async def _is_whole_of_items(text: str, prompt: PromptInfo, record: Record) -> bool:
    if len(text) > _ESCAPED * prompt.chars + 16 * prompt.items + 16:
        return False
    pieces = []
    for chunk in record.prompt_chunks(prompt.sha256):
        pieces.append(chunk)
        await asyncio.sleep(0)
    return await asyncio.to_thread(_is_form_of, text.strip(_SPACE), b"".join(pieces))


def _is_form_of(text: str, encoded: bytes) -> bool:
    value = json.loads(encoded.decode("utf-8", "surrogatepass"))
    items = list(value.values()) if isinstance(value, dict) else value
    if any(text == join.join(items).strip(_SPACE) for join in _JOINS) or text == str(value):
        return True
    if text[:1] not in ("[", "{"):
        return False
    try:
        return bool(json.loads(text) == value)
    except (ValueError, RecursionError):
        return False
