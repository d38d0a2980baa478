"""The prompt on its way down: a memfd, written in pieces.

At no time does this process hold a second copy of the prompt: it is encoded
some MiB at a time, and the event loop gets a turn after each piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from rlm_kernel.errors import PromptError

__all__ = ["Prompt", "PromptKind", "encode_prompt", "prompt_kind", "write_memfd"]

Prompt = str | list[str] | dict[str, str]
PromptKind = Literal["str", "list", "dict"]

_PIECE = 2 << 20
"""Characters encoded at once, some 2 ms."""

_JSON = msgspec.json.Encoder()


def prompt_kind(prompt: object) -> PromptKind:
    """Return the kind of *prompt*.

    Raises
    ------
    PromptError
        It is no prompt, or an empty one.
    """
    if not isinstance(prompt, (str, list, dict)):
        raise PromptError(
            f"A prompt is a str, or a list or dict of str, not {type(prompt).__name__}:"
            " convert it first."
        )
    if not prompt:
        raise PromptError("The prompt is empty: there is nothing to ask about.")
    if isinstance(prompt, str):
        return "str"
    if isinstance(prompt, list):
        _check_items(prompt, "list")
        return "list"
    _check_items(prompt.keys(), "dict's keys")
    _check_items(prompt.values(), "dict")
    return "dict"


def _check_items(items: Iterable[object], where: str) -> None:
    for item in items:
        if not isinstance(item, str):
            raise PromptError(
                f"The {where} that was given as prompt holds {type(item).__name__}, and only str"
                " can be loaded: convert the items first."
            )


def encode_prompt(prompt: Prompt) -> Iterator[bytes]:
    """Yield *prompt* as UTF-8 (surrogates passed) if it is a str, else as JSON."""
    if isinstance(prompt, str):
        for start in range(0, len(prompt), _PIECE):
            yield prompt[start : start + _PIECE].encode("utf-8", "surrogatepass")
    else:
        yield from _joined(_json_pieces(prompt))


def _json_pieces(prompt: list[str] | dict[str, str]) -> Iterator[bytes]:
    if isinstance(prompt, list):
        yield b"["
        for i, item in enumerate(prompt):
            yield (b"," if i else b"") + _json(item)
        yield b"]"
    else:
        yield b"{"
        for i, (key, item) in enumerate(prompt.items()):
            yield (b"," if i else b"") + _json(key) + b":" + _json(item)
        yield b"}"


def _json(text: str) -> bytes:
    try:
        return _JSON.encode(text)
    except UnicodeEncodeError:
        return json.dumps(text).encode()  # escapes lone surrogates, as UTF-8 cannot hold them


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= _PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)


async def write_memfd(chunks: Iterable[bytes]) -> int:
    """Write *chunks* to a new memfd, seal it and return its descriptor, which the caller owns.

    Raises
    ------
    PromptError
        There is no memory for it, or no chunk has a byte.
    """
    fd = os.memfd_create("rlm-prompt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            size = await _write_all(fd, chunks)
        except OSError as error:
            raise PromptError(
                f"The prompt cannot be held in memory ({error.strerror}): use a smaller one."
            ) from error
        if size == 0:
            raise PromptError("The prompt is empty: there is nothing to ask about.")
        # The worker maps it, and would die of SIGBUS were it cut meanwhile.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        undo.pop_all()
    return fd


async def _write_all(fd: int, chunks: Iterable[bytes]) -> int:
    size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        size += len(view)
        while view:
            view = view[os.write(fd, view) :]
        await asyncio.sleep(0)
    return size
