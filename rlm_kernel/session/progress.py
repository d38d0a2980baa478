"""How far the sub-calls of a cell are, for whoever looks at it; never for the root.

Counting is all that is done for a call. What is shown is worked out by a
timer, a few times a second, whatever the number of calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rlm_kernel.driver.outbox import CallLater, Handle
from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.subcalls.scheduling.batch import Outcome

__all__ = ["INTERVAL_S", "BatchProgress", "Progress", "Shows"]

INTERVAL_S = 0.125
"""Seconds between two looks at the counts."""

APPEARS_S = 0.5
"""Seconds that several calls have to end before they are shown."""

ALONE_APPEARS_S = 2.0
"""The same for a single call."""

LINGERS_S = 1.0
"""Seconds without a call under way until nothing is shown any more: a loop that makes one batch
after the other is one piece of work."""

_RATE_OVER_S = 10.0


class Shows(Protocol):
    """A cell in whose output progress can be shown."""

    def show(self, tally: Tally) -> None:
        """Show *tally* in place of what is shown; a complete one only if something is."""

    def rest(self) -> None:
        """No call is under way for now: what is shown may go as soon as it is in the way."""

    def hide(self) -> None:
        """Show nothing any more. May be called where nothing is shown."""


class Progress:
    """The batches under way of one REPL, summed up for each cell that somebody looks at.

    Parameters
    ----------
    loop_time, call_later
        Clock and timer in seconds; those of the running event loop where not given.
    """

    def __init__(
        self,
        loop_time: Callable[[], float] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        self._loop_time = loop_time
        self._call_later = call_later
        self._cells: dict[int, _CellProgress] = {}

    def watch(self, cell: int, view: Shows) -> None:
        """Somebody looks at *cell*, which begins."""
        loop_time = self._loop_time or asyncio.get_running_loop().time
        call_later = self._call_later or asyncio.get_running_loop().call_later
        self._cells[cell] = _CellProgress(view, loop_time, call_later)

    def unwatch(self, cell: int) -> None:
        """*cell* is over, and nothing is shown in it any more. Does nothing for other cells."""
        counts = self._cells.pop(cell, None)
        if counts is not None:
            counts.close()

    def begin(self, cell: int, calls: int) -> BatchProgress:
        """*cell* asks for *calls* sub-calls."""
        counts = self._cells.get(cell)
        if counts is None or calls < 1:
            return BatchProgress(None, 0)
        counts.add(calls)
        return BatchProgress(counts, calls)


class BatchProgress:
    """One batch under way. Ends once: when its last call has its outcome, or by `end`."""

    __slots__ = ("_counts", "_left")

    def __init__(self, counts: _CellProgress | None, calls: int) -> None:
        self._counts = counts
        self._left = calls

    def done(self, outcomes: Sequence[Outcome]) -> None:
        """These calls ended."""
        if self._counts is None:
            return
        failed = sum(outcome.error is not None for outcome in outcomes)
        cached = sum(outcome.cached for outcome in outcomes)
        self._left -= len(outcomes)
        self._counts.ended(len(outcomes), failed=failed, cached=cached)
        if self._left <= 0:
            self._counts = None

    def end(self) -> None:
        """Nothing more comes: it is complete, was cancelled or refused."""
        counts, self._counts = self._counts, None
        if counts is not None:
            counts.take_back(self._left)


class _CellProgress:
    """The counts of one cell, from its first batch until none is under way for a while."""

    def __init__(self, view: Shows, loop_time: Callable[[], float], call_later: CallLater) -> None:
        self._view = view
        self._time = loop_time
        self._call_later = call_later
        self._timer: Handle | None = None
        self._closed = False
        self._shown = False
        self._reset()

    def _reset(self) -> None:
        self._calls = self._done = self._failed = self._cached = 0
        self._began = self._rests_since = self._time()
        self._past: deque[tuple[float, int]] = deque([(self._began, 0)])
        """When how many had ended, over the time that the rate is taken from."""

    def add(self, calls: int) -> None:
        """*calls* more are asked for."""
        if self._timer is None and not self._closed:
            self._reset()
            self._arm()
        self._calls += calls

    def ended(self, calls: int, *, failed: int, cached: int) -> None:
        """*calls* ended, of which some failed or came from the cache."""
        self._done += calls
        self._failed += failed
        self._cached += cached
        self._look_for_rest()

    def take_back(self, calls: int) -> None:
        """*calls* will not end: they were not made, or were cancelled."""
        self._calls -= calls
        self._look_for_rest()

    def close(self) -> None:
        """The cell is over."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._view.hide()

    def _look_for_rest(self) -> None:
        if self._rests and not self._closed:
            self._rests_since = self._time()
            self._view.rest()

    @property
    def _rests(self) -> bool:
        return self._done >= self._calls

    def _arm(self) -> None:
        self._timer = self._call_later(INTERVAL_S, self._look)

    def _look(self) -> None:
        now = self._time()
        if self._rests and now - self._rests_since >= LINGERS_S:
            self._timer = None
            self._shown = False
            self._view.hide()
            return
        self._arm()
        self._shown = self._shown or self._is_due(now)
        if self._shown:
            self._view.show(self._tally(now))

    def _is_due(self, now: float) -> bool:
        wait = APPEARS_S if self._calls > 1 else ALONE_APPEARS_S
        return not self._rests and now - self._began >= wait

    def _tally(self, now: float) -> Tally:
        self._past.append((now, self._done))
        while len(self._past) > 2 and now - self._past[0][0] > _RATE_OVER_S:
            self._past.popleft()
        since, before = self._past[0]
        seconds = now - since
        return Tally(
            calls=self._calls,
            done=self._done,
            failed=self._failed,
            cached=self._cached,
            seconds=round(now - self._began, 1),
            rate=round((self._done - before) / seconds, 3) if seconds > 0 else 0.0,
        )
