"""When a call has taken long enough."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlm_kernel.subcalls.scheduling.batch import Call

__all__ = ["Deadlines"]


class Deadlines:
    """Cancels the calls of one batch that are past their deadline.

    They share one timer: a timer for each call, which is nearly always taken back, would cost as
    much as what it watches. What a call is allowed does not shrink within a batch, so the first
    to be watched is the first to be due.

    Parameters
    ----------
    under_way
        The calls that are at work; looked at when the timer fires.
    """

    def __init__(self, under_way: set[Call]) -> None:
        self._under_way = under_way
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, deadline: float) -> None:
        """A call began that is to end by *deadline* (monotonic seconds)."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(deadline - time.monotonic(), self._fire)

    def stop(self) -> None:
        """Nothing is watched any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        now = time.monotonic()
        later: list[float] = []
        for call in self._under_way:
            if call.deadline is None or call.timed_out:
                continue
            if call.deadline > now:
                later.append(call.deadline)
            elif call.task is not None:
                call.timed_out = True
                call.task.cancel()
        if later:
            self.watch(min(later))
