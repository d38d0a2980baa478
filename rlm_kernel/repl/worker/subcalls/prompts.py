"""Prompts of a cell: checked, and cut into messages that fit the link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlm_kernel.repl.messages import MAX_PROMPTS

__all__ = ["checked_prompts", "exact", "in_parts", "too_many"]

_FRAME = 32 << 20
"""Bytes of prompts per message, half of what a frame may have."""


def checked_prompts(prompt: object) -> list[str]:
    """The prompts that a person or a root gave, as a list of str proper.

    Raises
    ------
    TypeError
        It is no str and no list of str.
    ValueError
        It has more than `MAX_PROMPTS` items.
    """
    if isinstance(prompt, str):
        return [exact(prompt)]
    if isinstance(prompt, (dict, bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise TypeError(
            f"a prompt must be a str or a list of str, not {type(prompt).__name__}; "
            f"{_remedy(prompt)}"
        )
    if len(prompt) > MAX_PROMPTS:
        raise too_many(f"a list of {len(prompt):,} prompts")
    for place, item in enumerate(prompt):
        if not isinstance(item, str):
            raise TypeError(
                f"prompt {place} of the list is of type {type(item).__name__}; all must be str"
            )
    return [exact(item) for item in prompt]


def _remedy(prompt: object) -> str:
    if isinstance(prompt, (bytes, bytearray)):
        return "use decode() on it"
    if isinstance(prompt, Iterable) and not isinstance(prompt, dict):
        return "use list() on it, or sub_RLM.map"
    return "use str() or json.dumps() on it"


def too_many(what: str) -> ValueError:
    """The error for *what*, which is more than one call takes."""
    return ValueError(
        f"{what} is too long for one call, which takes {MAX_PROMPTS:,}; "
        "put more text into each prompt, or pass slices of the list"
    )


def exact(text: str) -> str:
    """*text* as a str proper: parsers of HTML and others give subclasses, which nothing encodes."""
    return text if type(text) is str else str.__str__(text)


def in_parts(prompts: list[str]) -> Iterator[list[str]]:
    """*prompts* in runs that fit into a frame each.

    A run is sent when the one before it is answered, and is a batch of its own in the record.
    """
    part: list[str] = []
    size = 0
    for prompt in prompts:
        length = len(prompt) if prompt.isascii() else 4 * len(prompt)
        if part and size + length > _FRAME:
            yield part
            part, size = [], 0
        part.append(prompt)
        size += length + 8
    if part:
        yield part
