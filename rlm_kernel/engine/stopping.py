"""How a run is ended from outside: by a person, a deadline, or a record that cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

__all__ = ["EndingError", "StopSignal", "abandon"]

PATIENCE = 5.0
"""Seconds for a cancelled task to end. One that does not is left behind."""


class EndingError(Exception):
    """The run is to end now."""

    def __init__(self, state: Literal["stopped", "failed"], reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


class StopSignal:
    """Set once, from anywhere on the loop; everything that a run waits for is waited for here."""

    def __init__(self) -> None:
        self.ending: EndingError | None = None
        self._wake: asyncio.Future[None] | None = None

    def set(self, state: Literal["stopped", "failed"], reason: str) -> None:
        """End the run. The first reason counts."""
        if self.ending is not None:
            return
        self.ending = EndingError(state, reason)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def check(self) -> None:
        """Raise `EndingError` where the signal was set."""
        if self.ending is not None:
            raise self.ending

    async def until(self, task: asyncio.Future[Any], timeout: float | None = None) -> bool:
        """Wait for *task*, at most *timeout* seconds; whether it is done.

        Raises `EndingError` where the signal is set; *task* goes on then.
        """
        self.check()
        if self._wake is None:
            self._wake = asyncio.get_running_loop().create_future()
        await asyncio.wait({task, self._wake}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self.check()
        return task.done()


async def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel *task*, if it is not done, and see it end. What it raises is dropped."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE)
    if task.done() and not task.cancelled():
        with contextlib.suppress(asyncio.InvalidStateError):
            task.exception()
