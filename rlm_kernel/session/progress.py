"""How far the sub-calls of a cell are, for whoever looks at it; never for the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlm_kernel.subcalls.batch import Outcome

__all__ = ["BatchProgress", "Progress", "Shows"]


class Shows(Protocol):
    """A front end that can show progress."""


class BatchProgress:
    """One batch under way. Ends once: when its last call has its outcome, or by `end`."""

    def done(self, outcomes: Sequence[Outcome]) -> None:
        """These calls ended."""

    def end(self) -> None:
        """Nothing more comes: it is complete, was cancelled or refused."""


class Progress:
    """The batches under way of one REPL, summed up for each cell."""

    def __init__(self, front_end: object) -> None:
        self._front_end = front_end

    def begin(self, cell: int, calls: int) -> BatchProgress:
        """*cell* asks for *calls* sub-calls."""
        return BatchProgress()
