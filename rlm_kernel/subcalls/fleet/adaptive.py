"""How many requests a server is worth sending at once, learnt from how it answers.

No server tells. With too few requests in flight it idles; with more than it
works on at once the others only queue in it, where they cannot be taken back
or overtaken by another run's. So the limit climbs while the server completes
more per second, and comes down where fewer in flight complete as many.

What it completes per second is taken by Little's law, requests in flight over
their mean latency: unlike counting completions in a span of time this is
exact also where equal requests end together, in bursts. The climb is by
trials, each one compared with the level below it, as in hill climbing; the
answer to refusals is TCP's (RFC 5681): a multiplicative cut, once for all
requests that were in flight then, and a fast return to near the old level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["MOST", "START", "Concurrency"]

START = 32
"""Requests in flight where nothing is known of the server."""

MOST = 1024

KEPT = 0.96
"""Of the best completions per second, what a lower limit must bring."""

_STEPS = ((2.0, 1.12), (1.5, 1.08), (1.25, 1.06), (1.12, 1.05))
"""Of trials: by how much the limit is higher, and the completions per second must be. From one
that failed it goes on to the next, after the last to the first."""

_CUT = 0.7
_LONGEST_HOLD = 16
"""Windows between two trials at most."""


class Concurrency:
    """The limit of requests in flight on one server, and their count.

    Call `begin` when a request is sent, and one of `done`, `refused` and `abandoned` with what
    it returned when it ended. The limit is never less than 1.

    Parameters
    ----------
    start
        Limit to begin with: the server's slots, where they are known.
    most
        The limit never exceeds it.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        start: int | None = None,
        *,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = max(1, min(most, start or START))
        self.active = 0
        self._most = most
        self._clock = clock
        self._touched = False
        """Whether anything but a hint has set the limit."""
        self._hinted = 0
        self._base = self.limit
        """The limit that holds unless a trial shows a better one."""
        self._rate: float | None = None
        """Completions per second there."""
        self._best = 0.0
        self._step = 0
        self._up = True
        self._hold = 0
        """Windows until the next trial."""
        self._next_hold = 1
        self._climb_to = 0
        """Until it is reached the limit doubles without being measured: nearly that much went
        well before. 0 where that is over."""
        self._since_cut = 0
        """Completions of what was sent after the last cut."""
        self._climbed = 0
        """Those before the limit was last changed."""
        self._last_cut = -math.inf
        self._ceiling = math.inf
        """Where the server refused; it rises slowly."""
        self._tells = False
        """Whether the server tells of its queue. That is then what brings the limit down, and
        what makes it harmless to go up for little."""
        self._crowded = False
        """Whether requests were waiting on the server when it was last asked."""
        self._window = _Window(self.limit)

    @property
    def free(self) -> bool:
        return self.active < self.limit

    def begin(self) -> float:
        """A request is sent."""
        self.active += 1
        return self._clock()

    def done(self, begun: float) -> None:
        """The server completed it."""
        in_flight = self.active
        self.active -= 1
        if begun > self._last_cut:
            self._since_cut += 1
        if self.limit < self._climb_to:
            self._climb()
            return
        window = self._window
        window.add(self._clock() - begun, in_flight)
        if window.count >= 8 and window.enough(self.limit):
            self._decide(window)

    def abandoned(self) -> None:
        """It ended in a way that tells nothing: cancelled, or failed."""
        self.active -= 1

    def refused(self, begun: float) -> None:
        """The server would not take it: too many requests.

        Of those that were in flight when the limit was last cut, none cuts it again.
        """
        self.active -= 1
        if begun <= self._last_cut:
            return
        if self.limit > self._base:
            self._ceiling = self.limit
            self._last_cut = self._clock()
            self._return()
            return
        if self._since_cut or not self._climb_to:
            self._ceiling = self.limit
            self._climb_to = max(1, int(self.limit * _CUT))
        self._since_cut = 0
        self._cut(int(self.limit * _CUT))

    def hint(self, slots: int) -> None:
        """What the server says it works on at once. Ignored where more has been learnt."""
        if self._touched or slots < 1 or slots == self._hinted:
            return
        self._hinted = slots
        # A few more, so that a slot never waits for the next request to arrive.
        self._go_to(min(self._most, slots + max(1, slots // 8)))
        self._touched = False

    def queue(self, running: int, waiting: int) -> None:
        """What the server says of its queue. Seen twice in a row, a queue cuts the limit to what
        runs and a few more; once, it may be requests that have just arrived."""
        self._tells = True
        spare = max(2, running // 8)
        crowded = waiting > spare
        if crowded and self._crowded:
            least = min(running + spare, self.limit)
            lower = max(least, int(self.limit * 0.75))
            if lower < self.limit:
                self._climb_to = 0
                self._cut(lower)
        self._crowded = crowded

    # --- levels -----------------------------------------------------------------------------------

    def _cut(self, limit: int) -> None:
        self._last_cut = self._clock()
        self._best, self._step, self._up = 0.0, 1, True
        self._hold = self._next_hold = 2
        self._go_to(max(1, limit))

    def _climb(self) -> None:
        if self._since_cut - self._climbed < self.limit:
            return
        limit = min(self._climb_to, 2 * self.limit)
        if limit == self._climb_to:
            self._climb_to = 0
        self._go_to(limit)

    def _go_to(self, limit: int) -> None:
        """Make *limit* the level that holds; its rate is to be measured."""
        self._touched = True
        self._base, self._rate = limit, None
        self._set(limit)

    def _set(self, limit: int) -> None:
        # What is in flight was sent at the old level, and its latencies are of that.
        self._window = _Window(max(limit, self.active))
        self._climbed = self._since_cut
        self.limit = limit

    # --- trials -----------------------------------------------------------------------------------

    def _decide(self, window: _Window) -> None:
        if not window.full(self.limit):
            # Nobody wanted more: it says nothing about more.
            self._window = _Window(0)
            return
        self._touched = True
        if self.limit == self._base:
            self._measured(window.rate)
        elif self._better(window.rate):
            self._base, self._rate = self.limit, window.rate
            self._best = max(self._best, window.rate)
            self._hold, self._next_hold, self._step = 0, 1, max(0, self._step - 1)
            self._try()
        else:
            self._return()

    def _measured(self, rate: float) -> None:
        """Another window at the level that holds."""
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        # It fades, or is forgotten: requests may have become longer, or others may ask the server.
        self._best = max(self._rate, 0.97 * self._best)
        if self._rate < 0.75 * self._best:
            self._best, self._hold, self._next_hold = self._rate, 0, 1
        self._ceiling *= 1.02
        self._hold -= 1
        if self._hold > 0:
            self._window = _Window(0)
        else:
            self._try()

    def _better(self, rate: float) -> bool:
        assert self._rate is not None
        if self.limit < self._base:
            return rate >= KEPT * max(self._best, self._rate)
        gain = _STEPS[self._step][1] - 1
        return rate >= self._rate * (1 + (gain / 3 if self._tells else gain))

    def _try(self) -> None:
        limit = self.limit
        if self._up:
            bound = min(self._most, (limit + self._ceiling) / 2)
            limit = int(max(limit + 1, min(bound, limit * _STEPS[self._step][0])))
            limit = min(self._most, limit)
        else:
            limit = max(1, min(limit - 1, int(limit / 1.25)))
        if limit == self.limit:
            self._up = not self._up
            self._window = _Window(0)
        else:
            self._set(limit)

    def _return(self) -> None:
        """The trial brought nothing: back, and next time the other way, later."""
        if self._up:
            self._step = (self._step + 1) % len(_STEPS)
        self._up = self._tells or not self._up
        self._hold = self._next_hold
        self._next_hold = min(_LONGEST_HOLD, 2 * self._next_hold)
        self._set(self._base)


class _Window:
    """Completions at one limit, after the first *skip* that still belong to the one before."""

    __slots__ = ("_in_flight", "_skip", "_squares", "_total", "count")

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.count = 0
        self._in_flight = 0
        self._total = 0.0
        self._squares = 0.0

    def add(self, latency: float, in_flight: int) -> None:
        if self._skip:
            self._skip -= 1
            return
        self.count += 1
        self._in_flight += in_flight
        self._total += latency
        self._squares += latency * latency

    def enough(self, limit: int) -> bool:
        """Whether the mean latency is known to 4 % (one standard error), or as well as it will
        be."""
        count = self.count
        if count < 2 * limit:
            return False
        mean = self._total / count
        variance = self._squares / count - mean * mean
        return variance <= (0.04 * mean) ** 2 * count or count >= max(8 * limit, 24)

    def full(self, limit: int) -> bool:
        """Whether as many were in flight as might be."""
        return self._in_flight >= 0.9 * limit * self.count

    @property
    def rate(self) -> float:
        """Completions per second."""
        return self._in_flight / max(self._total, 1e-9)
