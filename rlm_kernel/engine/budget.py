"""What a tree of runs may spend, and the ledger that keeps to it.

A call *reserves* the most that it can cost before it starts and *settles*
what it did cost after it ends. A reservation counts against the run that
makes it and every run above, so that parallel children cannot overspend
together, whatever the order in which they start and end.

Seconds are wall time, money is in US dollars.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rlm_kernel.errors import BudgetExceeded, UsageError
from rlm_kernel.prices import NAME, Price

__all__ = ["MOST", "Budget", "Cost", "Ledger", "Reservation", "Usage", "named_cost", "unpriced"]

MOST = 10**12
"""Turns, tokens, calls, dollars that a limit or a server can name. Larger numbers do not fit into
every message, nor into the record."""


_LEAST_AMOUNT = 1e-6
"""A limit of seconds or money that nothing fits into."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and calls of a model, as its server counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the input tokens, those the server took from its prefix cache."""

    calls: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    """US dollars, 0 where no price is known."""

    estimated: bool = False
    """True where the server gave no count and it was derived from the text."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
            cost=self.cost + other.cost,
            estimated=self.estimated or other.estimated,
        )

    @property
    def tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    @property
    def is_countable(self) -> bool:
        """Whether its numbers are such as can be counts: a server may send any."""
        return max(self.input_tokens, self.output_tokens, self.cached_tokens) <= MOST

    def priced(self, price: Price | None) -> Usage:
        """This, at *price* where the server did not name a cost itself."""
        if self.cost or price is None:
            return self
        cost = price.of(self.input_tokens, self.output_tokens)
        return msgspec.structs.replace(self, cost=cost)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one run and all its descendants. ``None`` is no limit.

    Raises
    ------
    UsageError
        A number is of another type, not more than 0 (`max_depth`: less than 0) or too large.
    """

    max_turns: int = 30
    """Root turns of one run; each child run has the same number for itself."""

    max_tokens: int | None = None
    """Input and output tokens, of root and sub-calls."""

    max_subcalls: int | None = 10_000
    max_depth: int = 1
    """Levels of child runs below the first run: 0 allows none, 1 children but no
    grandchildren. Beyond it an ``rlm`` sub-call becomes a plain one."""

    max_concurrency: int | None = None
    """Sub-calls under way at once in the whole tree; ``None`` takes what the servers take, which
    is learnt from how they answer."""

    max_seconds: float | None = None
    """Wall time from the start of the first run."""

    max_cost: float | None = None
    """US dollars. The models need prices (`rlm_kernel.prices`) or servers that name the cost."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_depth"):
            _check_count(name, getattr(self, name), least=0 if name == "max_depth" else 1)
        for name in ("max_tokens", "max_subcalls", "max_concurrency"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least=1)
        for name in ("max_seconds", "max_cost"):
            if getattr(self, name) is not None:
                _check_amount(name, getattr(self, name))


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {_shown(value)}")
    if value < least:
        bound = f"more than {least - 1}" if least else "0 or more"
        raise UsageError(f"{name} must be {bound}, not {_shown(value)}")
    if value > MOST:
        raise UsageError(f"{name} must be at most {MOST:,}")


def _check_amount(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or value != value:
        raise UsageError(f"{name} must be a number, not {_shown(value)}")
    if value <= 0:
        raise UsageError(f"{name} must be more than 0, not {_shown(value)}")
    if value > sys.float_info.max:
        raise UsageError(f"{name} must be a finite number; leave it out for no limit")


def _rest(limit: int | None, used: int) -> int | None:
    """What is left, as a limit: at least 1. Where nothing is left, those above refuse."""
    return None if limit is None else max(limit - used, 1)


def _shown(value: object) -> str:
    # Python refuses to write whole numbers of thousands of digits.
    is_long = isinstance(value, int) and abs(value) > MOST
    return "a number that long" if is_long else repr(value)[:60]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one call can cost."""

    tokens: int = 0
    subcalls: int = 0
    cost: float = 0.0


class Reservation:
    """Part of the budget set aside for a call under way. Settle it once, in any case."""

    __slots__ = ("_ledger", "_open", "cost")

    def __init__(self, ledger: Ledger, cost: Cost) -> None:
        self._ledger = ledger
        self._open = True
        self.cost = cost

    def settle(self, usage: Usage, *, subcalls: int | None = None) -> None:
        """Book *usage* in place of what was set aside. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        kept = self.cost.subcalls if subcalls is None else subcalls
        line = self._ledger.line()
        for ledger in line:
            ledger._release(self.cost)
            ledger._book(usage, kept)
        if line[-1]._waiting:
            line[-1]._serve_waiting()

    def release(self) -> None:
        """Give back what was set aside: the call was never sent."""
        self.settle(Usage(), subcalls=0)


def named_cost(cost: object) -> float:
    """US dollars that a server names in its usage, as OpenRouter does; 0 where it names none."""
    if isinstance(cost, bool) or not isinstance(cost, float | int):
        return 0.0
    return float(cost) if 0 <= cost <= MOST else 0.0


def unpriced(model: str) -> str:
    """Why *model* is not asked under a limit of money, as a sentence."""
    return (
        f"max_cost cannot be kept, because the price of {model} is not known: give it in the file "
        f"that {NAME} names, or leave max_cost out"
    )


class _Waiting(NamedTuple):
    """A call that waits until others have given back enough."""

    cost: Cost
    granted: asyncio.Future[Reservation]


class Ledger:
    """What one run and all its descendants have used and set aside.

    Parameters
    ----------
    budget
        The limits of this run. A child's are checked beside those of all its ancestors.
    parent
        Ledger of the run that started this one.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        parent: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.used = Usage()
        self.subcalls = 0
        self.turns = 0
        self.waited = 0.0
        """Of the seconds, those that cells of this run spent waiting for sub-calls and input."""
        self._reserved = Cost()
        self._waiting: dict[Ledger, deque[_Waiting]] = {}
        """Of the first run: calls of the whole tree that wait for others to give back."""
        self._clock = clock
        self._started = clock()

    def line(self) -> list[Ledger]:
        """This ledger and its ancestors, nearest first."""
        out: list[Ledger] = []
        ledger: Ledger | None = self
        while ledger is not None:
            out.append(ledger)
            ledger = ledger.parent
        return out

    def child(self, budget: Budget | None = None) -> Ledger:
        """A ledger for a run that a sub-call of this one starts."""
        return Ledger(budget or self.budget, parent=self, clock=self._clock)

    def remaining(self) -> Budget:
        """The limits of a run that a sub-call of this one starts: what was not used of its own.

        What is set aside may still be given back, so that it is not counted here; all limits
        above the child hold beside its own.
        """
        limits, used = self.budget, self.used
        seconds = self.seconds_left()
        return msgspec.structs.replace(
            limits,
            max_tokens=_rest(limits.max_tokens, used.tokens),
            max_subcalls=_rest(limits.max_subcalls, self.subcalls),
            max_seconds=None if seconds is None else max(seconds, _LEAST_AMOUNT),
            max_cost=None
            if limits.max_cost is None
            else max(limits.max_cost - used.cost, _LEAST_AMOUNT),
        )

    @property
    def child_allowed(self) -> bool:
        """Whether a sub-call of this run may start a child run, by all limits above it."""
        return all(self.depth < ledger.budget.max_depth for ledger in self.line())

    @property
    def limits_tokens(self) -> bool:
        """Whether a limit of tokens holds for this run."""
        return any(ledger.budget.max_tokens is not None for ledger in self.line())

    @property
    def limits_cost(self) -> bool:
        """Whether a limit of money holds for this run."""
        return any(ledger.budget.max_cost is not None for ledger in self.line())

    @property
    def tokens_left(self) -> int | None:
        """Tokens that are neither used nor set aside; ``None`` without a limit."""
        left = [
            above.budget.max_tokens - above.used.tokens - above.reserved.tokens
            for above in self.line()
            if above.budget.max_tokens is not None
        ]
        return min(left) if left else None

    @property
    def money_left(self) -> float | None:
        """US dollars that are neither used nor set aside; ``None`` without a limit."""
        left = [
            above.budget.max_cost - above.used.cost - above.reserved.cost
            for above in self.line()
            if above.budget.max_cost is not None
        ]
        return min(left) if left else None

    @property
    def reserved(self) -> Cost:
        """Set aside for calls under way."""
        return self._reserved

    def elapsed(self) -> float:
        """Seconds since this run started."""
        return self._clock() - self._started

    def seconds_left(self) -> float | None:
        """Seconds until the first limit of this run or an ancestor; ``None`` without one."""
        left = [
            ledger.budget.max_seconds - ledger.elapsed()
            for ledger in self.line()
            if ledger.budget.max_seconds is not None
        ]
        return min(left) if left else None

    def reserve(self, cost: Cost) -> Reservation:
        """Set *cost* aside in this run and all above it.

        Raises
        ------
        BudgetExceeded
            The message names the limit. Nothing is set aside then.
        """
        reason = self._reason_against(cost)
        if reason:
            raise BudgetExceeded(reason)
        for ledger in self.line():
            ledger._hold(cost)
        return Reservation(self, cost)

    async def reserve_in_turn(self, cost: Cost) -> Reservation:
        """`reserve`; where *cost* does not fit, but would beside what was used alone, after calls
        under way have given back enough.

        Nearly all use a small part of what is set aside for them. Of one run, calls are served in
        order. Who waits may hold nothing itself, or two could wait for each other.

        Raises
        ------
        BudgetExceeded
            It would not fit even then.
        """
        first = self.line()[-1]
        if self not in first._waiting or not self._may_fit(cost):
            try:
                return self.reserve(cost)
            except BudgetExceeded:
                if not self._may_fit(cost):
                    raise
        turn = _Waiting(cost, asyncio.get_running_loop().create_future())
        first._waiting.setdefault(self, deque()).append(turn)
        try:
            return await turn.granted
        except asyncio.CancelledError:
            granted = turn.granted
            if granted.done() and not granted.cancelled() and not granted.exception():
                granted.result().release()  # cancelled in the very moment in which it was granted
            else:
                first._serve_waiting()  # those behind it may need less
            raise

    def _serve_waiting(self) -> None:
        """Of the first run: something was given back. Runs are served in turn."""
        waiting, served = self._waiting, True
        while served:
            served = False
            for ledger, turns in list(waiting.items()):
                if ledger._serve(turns[0]):
                    served = True
                    turns.popleft()
                    del waiting[ledger]
                    if turns:
                        waiting[ledger] = turns

    def _serve(self, turn: _Waiting) -> bool:
        """Whether *turn* waits no longer."""
        if turn.granted.done():  # it was cancelled
            return True
        reason = self._reason_against(turn.cost)
        if not reason:
            turn.granted.set_result(self.reserve(turn.cost))
        elif self._may_fit(turn.cost):
            return False
        else:
            turn.granted.set_exception(BudgetExceeded(reason))
        return True

    def _reason_against(self, cost: Cost) -> str:
        """Why *cost* cannot be set aside now; empty where it can."""
        for ledger in self.line():
            reason = ledger._refusal(cost)
            if reason:
                return reason
        return ""

    def exceeded(self) -> str:
        """Which limit is already reached, as a sentence; empty where none is."""
        for ledger in self.line():
            reason = ledger._refusal(Cost(tokens=1))
            if reason:
                return reason
        if self.turns >= self.budget.max_turns:
            return (
                f"the run used its {self.budget.max_turns} turns; raise max_turns to let it go on"
            )
        return ""

    @property
    def spent(self) -> bool:
        """Whether not even the smallest sub-call will fit any more, whatever those under way
        give back."""
        return not self._may_fit(Cost(subcalls=1, tokens=1))

    def _may_fit(self, cost: Cost) -> bool:
        """Whether *cost* fits where those under way give back all that they may."""
        return not any(
            # Of what is set aside only the count of calls is sure to be used.
            ledger._refusal(cost, Cost(subcalls=ledger._reserved.subcalls))
            for ledger in self.line()
        )

    def _refusal(self, cost: Cost, held: Cost | None = None) -> str:
        """Why *cost* does not fit into this ledger beside *held*; empty where it does."""
        limits, used, held = self.budget, self.used, held or self._reserved
        if limits.max_seconds is not None and self.elapsed() >= limits.max_seconds:
            return (
                f"the budget of {limits.max_seconds:g} seconds is used up; "
                "raise max_seconds to go on"
            )
        if cost.tokens and limits.max_tokens is not None:
            left = limits.max_tokens - used.tokens - held.tokens
            if cost.tokens > left:
                return (
                    f"the budget of {limits.max_tokens:,} tokens has {max(left, 0):,} left and "
                    f"this call may take {cost.tokens:,}; raise max_tokens or ask for less"
                )
        if cost.subcalls and limits.max_subcalls is not None:
            free = limits.max_subcalls - self.subcalls - held.subcalls
            if cost.subcalls > free:
                return (
                    f"the budget of {limits.max_subcalls:,} sub-calls has {max(free, 0):,} left; "
                    "raise max_subcalls or make fewer, larger calls"
                )
        if limits.max_cost is not None:
            money = limits.max_cost - used.cost - held.cost
            if money <= 0 or cost.cost > money:
                return (
                    f"the budget of ${limits.max_cost:g} has ${max(money, 0):.4f} left; "
                    "raise max_cost to go on"
                )
        return ""

    def _hold(self, cost: Cost) -> None:
        held = self._reserved
        self._reserved = Cost(
            tokens=held.tokens + cost.tokens,
            subcalls=held.subcalls + cost.subcalls,
            cost=held.cost + cost.cost,
        )

    def _release(self, cost: Cost) -> None:
        held = self._reserved
        self._reserved = Cost(
            tokens=held.tokens - cost.tokens,
            subcalls=held.subcalls - cost.subcalls,
            cost=held.cost - cost.cost,
        )

    def _book(self, usage: Usage, subcalls: int) -> None:
        self.used = self.used + usage
        self.subcalls += subcalls
