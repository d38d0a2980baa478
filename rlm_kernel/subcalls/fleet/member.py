"""One server of a fleet: what it is sent, and whether it may be sent anything now."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.fleet.adaptive import Concurrency

if TYPE_CHECKING:
    from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

__all__ = ["Member"]

State = Literal["up", "trial", "doubted", "resting", "sick", "down"]
"""What may be sent:

    up        as much as its limit allows
    trial     one call, until one was answered: it was down or sick before
    doubted   nothing until its health was asked for, because a call failed
    resting   nothing for as long as it asked, but a trial after a while
    sick      it says that it is well and fails call after call: used where there is no better
    down      nothing; asked from time to time whether it is back
"""

SICK = 3
"""Failures without a success between them that make a server sick."""

LONGEST_COOLDOWN_S = 5.0

TRIAL_AFTER_S = 60.0
"""A server that asks to be left alone for longer gets one call by then: a number that is off
would else shut it out for as long as the kernel lives."""

SILENT_S = 5.0
"""Without a reply, after which a server with calls is asked for its health."""

DEAD = 3
"""Times that it did not answer that, after which its calls are taken off."""


class Member:
    """State of one server. Whoever changes it tells the fleet.

    Parameters
    ----------
    endpoint
        Asks the server.
    cooldown_s
        Until a server that is down is asked again for the first time; doubled after each.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        endpoint: OpenAIEndpoint,
        *,
        cooldown_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.url = endpoint.url
        # By the address alone, so that all kernels prefer the same server for the same prefix.
        self.seed = int.from_bytes(hashlib.blake2b(self.url.encode(), digest_size=8).digest())
        self.load = Concurrency(endpoint.slots, clock=clock)
        self.state: State = "up"
        self.answered = False
        """Whether it ever answered."""
        self.trouble = ""
        """How it failed last, a sentence."""
        self.due = 0.0
        """When its state is to be looked at again: of ``resting``, ``sick`` and ``down``."""
        self.trial_at = 0.0
        """When it is tried although it asked for a longer rest."""
        self.probed_at = 0.0
        self.poll_at = 0.0
        """When its queue is to be asked for."""
        self.looking = False
        """Whether its health is being asked for."""
        self._flights: dict[asyncio.Task[Any], float] = {}
        """Tasks of the calls that it is at, in the order in which they were sent; and when."""
        self._taken_off: set[asyncio.Task[Any]] = set()
        self._heard_at = 0.0
        self._unwell = 0
        """Times in a row that it did not say that it is well."""
        self._trying = False
        """Whether the one call of a trial is under way."""
        self._failures = 0
        self._failed_at = 0.0
        self._cooldowns = 0
        self._cooldown_s = cooldown_s
        self._clock = clock

    @property
    def room(self) -> int:
        """Calls that it may be sent at once."""
        return 1 if self.state == "trial" else self.load.limit

    @property
    def free(self) -> bool:
        """Whether it may be sent one more call, by its load."""
        if self.state == "trial":
            return not self._trying
        return self.load.free

    def begin(self) -> float:
        """A call is sent to it."""
        self._trying = True
        return self.load.begin()

    def board(self, begun: float) -> asyncio.Task[Any]:
        """The current task is at a call to it, until it says `leave`."""
        task = asyncio.current_task()
        assert task is not None
        self._flights[task] = begun
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """The call of *task* ended."""
        del self._flights[task]
        self._heard_at = self._clock()

    def took_off(self, task: asyncio.Task[Any]) -> bool:
        """Whether a cancellation of *task* was by this and is taken back herewith."""
        if task not in self._taken_off:
            return False
        self._taken_off.discard(task)
        return not task.uncancel()

    def silence(self) -> EndpointError:
        """How a call failed that was taken off."""
        self.trouble = f"the server at {self.url} went away without a word: check that it runs"
        return EndpointError(self.trouble, retryable=True)

    def is_silent(self, now: float) -> bool:
        """Whether it has calls and has ended none for a while."""
        oldest = next(iter(self._flights.values()), now)
        return now - max(oldest, self._heard_at) > SILENT_S

    @property
    def spotless(self) -> bool:
        """Whether a success changes nothing but its load."""
        return self.state == "up" and not self._failures and self.answered

    def succeeded(self) -> None:
        """It answered a call, be it that it refused what was asked."""
        self.answered = True
        self._trying = False
        self._failures = self._cooldowns = 0
        if self.state in ("trial", "sick"):
            self.state = "up"

    def abandoned(self) -> None:
        """A call ended in a way that tells nothing of it: cancelled, or not sent at all."""
        self._trying = False
        self.load.abandoned()

    def refused(self, begun: float) -> None:
        """It would not take a call for now."""
        self._trying = False
        self.load.refused(begun)

    def failed(self, begun: float, reason: str) -> None:
        """A call failed in a way that may be the server's fault.

        Of the calls that are in flight while a server goes away, all fail: that is one failure.
        """
        self.trouble = reason
        trial, self._trying = self.state == "trial", False
        if begun <= self._failed_at:
            return
        self._failed_at = self._clock()
        self._failures = SICK if trial else self._failures + 1
        if self.state in ("up", "trial"):
            self.state = "doubted"
        elif self.state == "sick":
            self._cool("sick")

    def doubt(self) -> None:
        """Ask for its health before it gets another call."""
        if self.state in ("up", "trial"):
            self.state = "doubted"

    def rest(self, seconds: float, reason: str) -> None:
        """It asked to be left alone."""
        self.trouble = reason
        if self.state in ("up", "trial", "resting"):
            self.state = "resting"
            now = self._clock()
            self.due = max(self.due, now + seconds)
            self.trial_at = now + TRIAL_AFTER_S

    def rested(self) -> None:
        """The time that it asked for is over, or long enough."""
        if self.state == "resting":
            self.state = "up" if self._clock() >= self.due else "trial"
            self._trying = False

    def probed(self, well: bool) -> None:
        """It was asked for its health, after a failure or in a long silence.

        A server may stop to listen and leave the connections that it has open: vLLM does, where
        it is told to end while it works. Those calls would wait for ever.
        """
        now = self.probed_at = self._clock()
        self._unwell = 0 if well else self._unwell + 1
        dead = self._unwell >= DEAD and self.is_silent(now)
        if well:
            self._is_well()
        elif dead or self.state not in ("up", "trial"):
            self._trying = False
            self._cool("down")
        if dead:
            self._taken_off.update(self._flights)
            for task in self._flights:
                task.cancel()

    def _is_well(self) -> None:
        self.answered = True
        if self.state in ("down", "sick"):
            self.state = "trial"
            self._trying = False
        elif self.state == "doubted":
            if self._failures >= SICK:
                self._cool("sick")
            else:
                self.state = "up"

    def _cool(self, state: State) -> None:
        self.state = state
        cooldown = self._cooldown_s * 2 ** min(self._cooldowns, 20)
        self._cooldowns += 1
        self.due = self._clock() + min(LONGEST_COOLDOWN_S, cooldown)
