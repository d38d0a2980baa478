"""Several servers of one model as one endpoint.

A call goes to the server that works on the fewest, unless one that has seen
the beginning of its prompt before, and so may have it in its prefix cache, is
not much busier. Calls that a server failed at move to another at once; which
servers may be sent anything, and how much, is learnt from the calls alone. A
healthy fleet has no tasks and no locks: one task, the keeper, lives while
there are calls, wakes once a second, and asks for health and queues.

A fleet of one is of use as well: its calls wait for the server to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlm_kernel.cells import SubcallParams
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.endpoint import EndpointError, Exchange, Reply, ToolSpec
from rlm_kernel.subcalls.fleet.journey import Journey, is_busy
from rlm_kernel.subcalls.fleet.keeper import Keeper, Rediscover
from rlm_kernel.subcalls.fleet.member import Member
from rlm_kernel.subcalls.server.connection import UnreachableError

if TYPE_CHECKING:
    from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

__all__ = ["Fleet"]

PATIENCE_S = 30.0
COOLDOWN_S = 0.5
PREFIX = 1000
"""Characters of instruction and prompt that prefer a server."""

_64_BITS = (1 << 64) - 1

DIGESTS = 1000
"""Beginnings of prompts that are kept."""


class Fleet:
    """The servers of one model, as an `Endpoint`.

    Its errors are final: what sending again can do was done.

    Parameters
    ----------
    spec
        Names the fleet, without a key.
    model
        Asked where the call names none.
    members
        One endpoint for each server; they are closed with the fleet.
    rediscover
        Asked for the servers that there are when all are down.
    patience_s
        How long calls wait for a server to come back when all are down.
    cooldown_s
        Until a server that is down is asked again for the first time, and before a call is sent
        to the same server again.
    """

    def __init__(
        self,
        spec: str,
        model: str,
        members: Sequence[OpenAIEndpoint],
        *,
        rediscover: Rediscover | None = None,
        patience_s: float = PATIENCE_S,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self.spec = spec
        self.model = model
        self.slots: int | None = None
        self.on_room: Callable[[], None] | None = None
        self._cooldown_s = cooldown_s
        self._members = [Member(endpoint, cooldown_s=cooldown_s) for endpoint in members]
        self._pool: list[Member] = []
        """Members that may be sent calls, as their load permits."""
        self._waiters: deque[_Waiter] = deque()
        self._calls = 0
        self._digests: dict[str, int] = {}
        self._keeper = Keeper(
            self._members,
            busy=lambda: self._calls > 0,
            settle=self._settle,
            give_up=self._give_up,
            rediscover=rediscover,
            patience_s=patience_s,
            cooldown_s=cooldown_s,
        )
        self._arrange()

    @property
    def urls(self) -> list[str]:
        """Of its servers."""
        return [member.url for member in self._members]

    def price(self, model: str) -> Price | None:
        """See `Endpoint.price`."""
        return self._members[0].endpoint.price(model) if self._members else None

    async def context_limit(self) -> int | None:
        """See `Endpoint.context_limit`: the least that one of the servers takes."""
        limits = await asyncio.gather(*(m.endpoint.context_limit() for m in self._members))
        return min((limit for limit in limits if limit is not None), default=None)

    async def complete(
        self,
        prompt: str,
        params: SubcallParams,
        *,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """See `Endpoint.complete`."""
        self._calls += 1
        self._keeper.start()
        journey = Journey(self._cooldown_s)
        try:
            return await self._complete(prompt, params, tools, exchanges, journey)
        except asyncio.CancelledError as error:
            raise error from journey.cut_short(self._shown(journey.at))
        finally:
            self._calls -= 1

    async def close(self) -> None:
        """See `Endpoint.close`."""
        await self._keeper.close()
        for member in self._members:
            await member.endpoint.close()

    async def _complete(
        self,
        prompt: str,
        params: SubcallParams,
        tools: Sequence[ToolSpec],
        exchanges: Sequence[Exchange],
        journey: Journey,
    ) -> Reply:
        digest = self._digest(prompt, params) if len(self._members) > 1 else 0
        member = None if self._waiters else self._pick(digest)
        while True:
            if member is None:
                member, begun = await self._turn(digest, journey)
            else:
                begun = member.begin()
            task = member.board(begun)
            journey.board(member)
            try:
                reply = await member.endpoint.complete(
                    prompt, params, tools=tools, exchanges=exchanges
                )
            except EndpointError as error:
                failure = error
            except BaseException as error:
                # A call that the keeper took off a dead server goes on, unless others want its
                # end, too.
                if not isinstance(error, asyncio.CancelledError) or not member.took_off(task):
                    member.abandoned()
                    self._settle()
                    raise
                failure = member.silence()
            else:
                self._done(member, begun)
                return self._marked(reply, member, journey)
            finally:
                member.leave(task)
            pause = self._failed(member, begun, failure, journey)
            if pause:
                await asyncio.sleep(pause)
            member = None if self._waiters else self._pick(digest, journey.avoid)

    # --- which server ---------------------------------------------------------------------------

    def _digest(self, prompt: str, params: SubcallParams) -> int:
        """Of the beginning of a call, which calls of one batch have in common."""
        start = f"{params.model or ''}\n{(params.system or '')[:PREFIX]}\n{prompt[:PREFIX]}"
        start = start[:PREFIX]
        digest = self._digests.get(start)
        if digest is None:
            if len(self._digests) >= DIGESTS:
                self._digests.clear()
            hashed = hashlib.blake2b(start.encode("utf-8", "surrogatepass"), digest_size=8)
            digest = self._digests[start] = int.from_bytes(hashed.digest())
        return digest

    def _pick(self, digest: int, avoid: set[Member] | None = None) -> Member | None:
        """The server for a call; ``None`` where none has room.

        The preferred one is found by rendezvous hashing (Thaler and Ravishankar, 1998): servers
        that come and go change the preference of few prefixes.
        """
        pool = self._pool
        if avoid:
            pool = [member for member in pool if member not in avoid] or pool
        least: Member | None = None
        preferred: Member | None = None
        best = -1
        for member in pool:
            if not member.free:
                continue
            if least is None or member.load.active < least.load.active:
                least = member
            weight = _weight(digest ^ member.seed)
            if weight > best:
                best, preferred = weight, member
        if least is None or preferred is None:
            return None
        margin = max(2, preferred.load.limit // 8)
        return preferred if preferred.load.active <= least.load.active + margin else least

    async def _turn(self, digest: int, journey: Journey) -> tuple[Member, float]:
        """Wait for room on a server; it is taken with the return."""
        waiter = _Waiter(digest, journey)
        self._waiters.append(waiter)
        self._serve()
        self._keeper.nudge()
        try:
            return await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                # Cancelled in the very moment in which it got its turn.
                member, _ = waiter.turn.result()
                member.abandoned()
                self._settle()
            else:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
            raise

    def _serve(self) -> None:
        """Give those that wait the room that there is, in order of arrival."""
        waiters = self._waiters
        while waiters:
            waiter = waiters[0]
            if not waiter.turn.done():
                member = self._pick(waiter.digest, waiter.journey.avoid)
                if member is None:
                    return
                waiter.turn.set_result((member, member.begin()))
            waiters.popleft()

    # --- what became of a request ---------------------------------------------------------------

    def _done(self, member: Member, begun: float) -> None:
        limit = member.load.limit
        member.load.done(begun)
        if not member.spotless or member.load.limit != limit:
            member.succeeded()
            self._arrange()
        if self._waiters:
            self._serve()

    def _settle(self) -> None:
        """Room has become free on a member, or its state may have changed."""
        self._arrange()
        self._serve()

    def _marked(self, reply: Reply, member: Member, journey: Journey) -> Reply:
        server = self._shown(member)
        return journey.reply(reply, server) if server or journey.attempts else reply

    def _shown(self, member: Member | None) -> str:
        """The URL of *member*, where there are others."""
        return member.url if member is not None and len(self._members) > 1 else ""

    def _failed(
        self, member: Member, begun: float, error: EndpointError, journey: Journey
    ) -> float:
        """Seconds until the call is sent again. Raises where it is not."""
        journey.add(member, error)
        busy = is_busy(error)
        moves = error.retryable or (isinstance(error, UnreachableError) and len(self._members) > 1)
        if busy:
            self._refused(member, begun, error)
        else:
            member.abandoned()
            if not moves:
                if error.status:
                    member.succeeded()
            else:
                member.failed(begun, error.reason)
        self._settle()
        if member.state == "doubted":
            self._keeper.look(member)
        if not moves:
            raise self._final(journey, member, error)
        if journey.over:
            raise self._final(journey, member, error, f" ({journey.attempts} attempts)")
        if any(other not in journey.avoid for other in self._pool):
            return 0.0
        journey.avoid.clear()
        return journey.pause() if error.retry_after is None else 0.0

    def _refused(self, member: Member, begun: float, error: EndpointError) -> None:
        member.refused(begun)
        if error.retry_after:
            member.rest(error.retry_after, error.reason)
        elif error.status == 503:
            member.trouble = error.reason
            member.doubt()

    def _final(
        self, journey: Journey, member: Member, error: EndpointError, why: str = ""
    ) -> EndpointError:
        return journey.error(error.reason + why, server=self._shown(member), last=error)

    def _arrange(self) -> None:
        """Work out who may be sent calls, and tell the scheduler where that is more."""
        pool = [m for m in self._members if m.state in ("up", "trial")]
        self._pool = pool or [m for m in self._members if m.state == "sick"]
        # With none to send to, calls still have to come in to be told so.
        slots = sum(member.room for member in self._pool or self._members) or 1
        grew = self.slots is not None and slots > self.slots
        self.slots = slots
        if grew and self.on_room is not None:
            self.on_room()

    # --- when there is none -------------------------------------------------------------------

    def _give_up(self) -> None:
        """Fail the calls that wait."""
        waiters, self._waiters = self._waiters, deque()
        reason = self._none_left(time.monotonic())
        server = self.urls[-1] if len(self._members) > 1 else ""
        for waiter in waiters:
            if not waiter.turn.done():
                waiter.turn.set_exception(waiter.journey.error(reason, server=server))

    def _none_left(self, now: float) -> str:
        told = [_told(member, now) for member in self._members]
        if not told:
            return f"no server of {self.model!r} is known: start one"
        if len(told) == 1:
            return f"{told[0]}: try again when it takes calls"
        return (
            f"none of the {len(told)} servers of {self.model!r} takes calls: "
            f"{', '.join(told)}; try again when one does"
        )


class _Waiter:
    """A call without a server."""

    __slots__ = ("digest", "journey", "turn")

    def __init__(self, digest: int, journey: Journey) -> None:
        self.digest = digest
        self.journey = journey
        self.turn: asyncio.Future[tuple[Member, float]] = asyncio.get_running_loop().create_future()


def _weight(bits: int) -> int:
    """64 bits, of which each depends on all 64 of *bits*. (Python's hash of a pair does not do:
    of two pairs with one half in common mostly the same is larger.)"""
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93 & _64_BITS
    bits = (bits ^ bits >> 32) * 0xD6E8FEB86659FD93 & _64_BITS
    return bits ^ bits >> 32


def _told(member: Member, now: float) -> str:
    """What is wrong with a server, without advice."""
    said = member.trouble or f"the server at {member.url} does not answer"
    if member.state == "resting":
        return f"{_without_advice(said)} and asks to wait {member.due - now:,.0f} s"
    return _without_advice(said)


def _without_advice(sentence: str) -> str:
    return sentence.rpartition(": ")[0] or sentence
