"""Output that does not go to the cell: what a tool of a sub-model writes stays below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Captured", "captured", "capturing"]

_MOST = 1_000_000
"""Characters that are kept."""


class Captured:
    """Text that was written."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = _MOST

    def write(self, text: str) -> None:
        """Keep *text*, as much of it as there is room for."""
        self._parts.append(text[: self._left])
        self._left -= len(self._parts[-1])

    @property
    def text(self) -> str:
        """All of it, in order."""
        return "".join(self._parts)


# Of the thread or task that runs the tool: others go on writing to their cell.
_captured: ContextVar[Captured | None] = ContextVar("captured", default=None)


def captured() -> Captured | None:
    """Where what this thread or task writes goes; ``None`` is to the cell."""
    return _captured.get()


@contextmanager
def capturing() -> Iterator[Captured]:
    """While inside, what this thread or task writes is kept."""
    kept = Captured()
    before = _captured.set(kept)
    try:
        yield kept
    finally:
        _captured.reset(before)
