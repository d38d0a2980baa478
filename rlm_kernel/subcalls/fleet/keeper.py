"""Looks after the servers of a fleet for as long as there are calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rlm_kernel.errors import RLMError
from rlm_kernel.subcalls.fleet.journey import LONGEST_REST_S
from rlm_kernel.subcalls.fleet.member import Member

if TYPE_CHECKING:
    from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

__all__ = ["Keeper", "Rediscover"]

Rediscover = Callable[[], Awaitable[Sequence["OpenAIEndpoint"]]]
"""Which servers there are by now."""

NEW_PATIENCE_S = 2.0
"""Where none of the servers ever answered: nothing is there that could come back."""

REDISCOVER_S = 2.0
TICK_S = 1.0
FRESH_S = 1.0
"""A server that was asked for its health so long ago need not be asked again."""

POLL_S = 1.0
"""Between two questions about a server's queue."""

VLLM_SLOTS = (128, 256)
"""Bounds of the slots that vLLM is first thought to have. What it says is for calls that fill the
context, and most do not; it tells of a queue, so that too many are soon fewer."""

MUTE_S = 60.0
"""Where it had no answer to that."""


class Keeper:
    """One task, while there are calls: asks for health and queues, and ends rests.

    Parameters
    ----------
    members
        Changed in place, where other servers are found.
    busy
        Whether there are calls.
    settle
        Called when the state of a member may have changed.
    give_up
        Called when nothing is left to wait for.
    rediscover, patience_s, cooldown_s
        See `Fleet`.
    """

    def __init__(
        self,
        members: list[Member],
        *,
        busy: Callable[[], bool],
        settle: Callable[[], None],
        give_up: Callable[[], None],
        rediscover: Rediscover | None,
        patience_s: float,
        cooldown_s: float,
    ) -> None:
        self._members = members
        self._busy = busy
        self._settle = settle
        self._give_up = give_up
        self._rediscover = rediscover
        self._rediscover_at = 0.0
        self._patience_s = patience_s
        self._cooldown_s = cooldown_s
        self._down_since: float | None = None
        """When the last member went down; ``None`` while one is not."""
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._nudge = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether nothing goes on."""
        return self._task is None and not self._tasks

    def start(self) -> None:
        """There are calls."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def nudge(self) -> None:
        """There is something to be done about them."""
        self._nudge.set()

    def look(self, member: Member) -> None:
        """Ask for the health of a server."""
        if not member.looking:
            member.looking = True
            self._spawn(self._probe(member))

    async def close(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks, *filter(None, [self._task])]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self) -> None:
        try:
            while self._busy():
                self._nudge.clear()
                now = time.monotonic()
                self._note_whether_down(now)
                for member in self._members:
                    self._tend(member, now)
                if self._down_since is not None:
                    await self._find_others(now)
                if self._hopeless(now):
                    self._give_up()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._quiet_s(now)):
                        await self._nudge.wait()
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _quiet_s(self, now: float) -> float:
        """Seconds in which nothing is to be done."""
        dues = [m.due for m in self._members]
        if self._down_since is not None:
            dues.append(self._down_since + self._patience)
        return max(0.01, min([TICK_S, *(due - now for due in dues if due > now)]))

    # --- one server ---------------------------------------------------------------------------

    def _tend(self, member: Member, now: float) -> None:
        if member.state == "resting" and now >= min(member.due, member.trial_at):
            member.rested()
            self._settle()
        elif member.state in ("down", "sick"):
            stale = self._overdue(now) and now - member.probed_at > FRESH_S
            if now >= member.due or stale:
                self.look(member)
        elif member.load.active:
            # It stays silent after it said that it is well: an answer is no reason to ask again.
            if member.is_silent(now) and now - member.probed_at >= TICK_S:
                self.look(member)
            if now >= member.poll_at:
                member.poll_at = now + POLL_S
                self._spawn(self._poll(member))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, member: Member) -> None:
        try:
            member.probed(await member.endpoint.healthy())
        finally:
            member.looking = False
        self._settle()
        self._nudge.set()

    async def _poll(self, member: Member) -> None:
        """Ask a server for its slots and its queue."""
        capacity = await member.endpoint.capacity()
        if capacity is None:
            member.poll_at = time.monotonic() + MUTE_S
            return
        if capacity.slots is not None:
            exact = member.endpoint.kind == "llamacpp"
            least, most = VLLM_SLOTS
            member.load.hint(capacity.slots if exact else min(most, max(least, capacity.slots)))
        if capacity.running is not None and capacity.waiting is not None:
            member.load.queue(capacity.running, capacity.waiting)
        self._settle()

    # --- all of them --------------------------------------------------------------------------

    def _note_whether_down(self, now: float) -> None:
        if any(member.state != "down" for member in self._members):
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now

    @property
    def _patience(self) -> float:
        known = any(member.answered for member in self._members)
        return self._patience_s if known else min(NEW_PATIENCE_S, self._patience_s)

    def _overdue(self, now: float) -> bool:
        """Whether a server to come back was waited for long enough."""
        return self._down_since is not None and now >= self._down_since + self._patience

    def _hopeless(self, now: float) -> bool:
        """Whether a call that waits does so in vain: all servers are down, and were long enough,
        or rest for longer than is waited for."""
        if any(m.state not in ("down", "resting") for m in self._members):
            return False
        rests = [m.due - now for m in self._members if m.state == "resting"]
        if rests:
            return min(rests) > LONGEST_REST_S
        fresh = all(now - m.probed_at <= FRESH_S for m in self._members)
        return self._overdue(now) and fresh

    async def _find_others(self, now: float) -> None:
        """Ask which servers there are by now. Those that are known keep their state."""
        if self._rediscover is None or now < self._rediscover_at:
            return
        self._rediscover_at = now + REDISCOVER_S
        try:
            async with asyncio.timeout(REDISCOVER_S):
                found = await self._rediscover()
        except (RLMError, TimeoutError):
            return
        if not found:
            return
        known = {member.url: member for member in self._members}
        for endpoint in found:
            if endpoint.url in known:
                await endpoint.close()
            else:
                known[endpoint.url] = Member(endpoint, cooldown_s=self._cooldown_s)
        urls = {endpoint.url for endpoint in found}
        gone = [m for m in self._members if m.url not in urls and not m.load.active]
        self._members[:] = [m for m in known.values() if m not in gone]
        self._settle()
        self._nudge.set()
        for member in gone:
            await member.endpoint.close()
