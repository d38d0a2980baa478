"""The conversation between a run and its root: what was said, what is sent, what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from rlm_kernel.engine.budget import Cost, Ledger, Reservation, unpriced
from rlm_kernel.engine.compaction import NO_SUMMARY, Meter, compacted
from rlm_kernel.engine.dialects import Dialect
from rlm_kernel.engine.replies import Reply, StreamLog, read_reply
from rlm_kernel.engine.root_protocol import Message, Root
from rlm_kernel.engine.stopping import StopSignal, abandon
from rlm_kernel.errors import BudgetExceeded, RootError

__all__ = ["Conversation"]

REPLY_TOKENS = 8_192
"""Set aside for a reply of a root that has no bound of its own, thoughts included; under a limit
of tokens it may take no more."""

LEAST_REPLY_TOKENS = 256
SUMMARY_CHARS = 8_000

Tell = Callable[[int, str], None]
"""Told of a reply's text as it comes: its offset, and the text."""


class Conversation:
    """Messages between a run and its root, within the budget and the root's context."""

    def __init__(self, root: Root, dialect: Dialect, ledger: Ledger, signal: StopSignal) -> None:
        self.history: list[Message] = []
        """Every message, also those that compaction replaced."""

        self._root = root
        self._dialect = dialect
        self._ledger = ledger
        self._signal = signal
        self._messages: list[Message] = []
        """What the root is sent."""
        self._told = 0
        self._meter = Meter()

    def say(self, role: Literal["system", "user", "assistant"], content: str) -> None:
        """Add a message. Roles alternate after the system's."""
        message = Message(role, content)
        self.history.append(message)
        self._messages.append(message)

    def news(self) -> list[Message]:
        """Messages since the last call of this, for ``history`` in the REPL."""
        news, self._told = self.history[self._told :], len(self.history)
        return news

    async def ask(self, attempt: int, aside: Sequence[Message], tell: Tell) -> Reply:
        """Ask the root for a cell. *aside* is said to it for this attempt only.

        Raises
        ------
        RootError, NoAnswer, BudgetExceeded, EndingError
            No reply came; see `read_reply` and `Ledger.reserve`.
        """
        messages = [*self._messages, *aside]
        return await self._read(messages, self._dialect.words, tell, attempt=attempt)

    async def make_room(self) -> tuple[int, str] | None:
        """Compact the conversation where it nearly fills the root's context.

        Returns how many messages were replaced, and the summary in their place;
        ``None`` where nothing was.
        """
        limit = self._root.context_limit
        if limit is None or len(self._messages) <= 4:
            return None
        if not self._meter.is_full(self._messages, limit):
            return None
        summary = await self._summary() or NO_SUMMARY
        kept = compacted(
            self._messages, summary, self._dialect.go_on(), limit=limit, meter=self._meter
        )
        # Two of those kept are the summary and what is told after it.
        dropped = len(self._messages) - (len(kept) - 2)
        if dropped <= 0:
            return None
        self._messages = kept
        return dropped, summary

    async def _summary(self) -> str:
        """The root's own words on the turns so far; empty where it has none."""
        *before, last = self._messages
        # In one message with the last observation: some chat templates want roles to alternate.
        asked = f"{last.content}\n\n{self._dialect.summary_request()}"
        request = [*before, Message("user", asked)]
        try:
            reply = await self._read(
                request, frozenset(), lambda offset, text: None, max_chars=SUMMARY_CHARS
            )
        except RootError:
            # The likeliest reason is that the conversation is too long already.
            return ""
        return reply.prose

    async def _read(
        self,
        messages: Sequence[Message],
        words: frozenset[str],
        tell: Tell,
        *,
        attempt: int = 1,
        max_chars: int | None = None,
    ) -> Reply:
        """One reply of the root to *messages*, within the budget."""
        price = self._root.price
        reservation, room = await self._reserve(messages)
        if room is not None:
            chars = self._meter.chars(room)
            max_chars = min(chars, max_chars or chars)
        stream = self._root.propose(messages, attempt=attempt, max_tokens=room)
        try:
            reply = await read_reply(
                stream, words, signal=self._signal, log=StreamLog(tell), max_chars=max_chars
            )
        finally:
            reservation.settle(stream.usage.priced(price))
        reply = replace(reply, usage=reply.usage.priced(price))
        if (
            price is None
            and reply.usage.calls
            and not reply.usage.cost
            and self._ledger.limits_cost
        ):
            # Only its reply shows whether a server names what it costs.
            raise BudgetExceeded(unpriced(self._root.name))
        if reply.usage.input_tokens and not reply.usage.estimated:
            self._meter.learn(messages, reply.usage.input_tokens)
        return reply

    async def _reserve(self, messages: Sequence[Message]) -> tuple[Reservation, int | None]:
        """Set tokens aside for a reply, and say how many it may have where they are limited.

        It may have what is set aside and no more, so that the replies of parallel child runs
        keep to the limit together.
        """
        if not self._root.sampled:
            return self._ledger.reserve(Cost()), None
        asked, most = self._meter.tokens(messages), self._root.max_tokens or REPLY_TOKENS
        rooms = self._rooms(asked)
        if not rooms or min(rooms) >= LEAST_REPLY_TOKENS:
            # A reply seldom takes all that it may: the last ones get what is left.
            most = min([most, *rooms])
            return self._ledger.reserve(self._cost(asked, most)), most if rooms else None
        try:
            return await self._reserve_in_turn(self._cost(asked, most)), most
        except BudgetExceeded:
            most = min(most, LEAST_REPLY_TOKENS)
            return await self._reserve_in_turn(self._cost(asked, most)), most

    def _cost(self, asked: int, most: int) -> Cost:
        price = self._root.price
        money = price.of(asked, most) if price is not None else 0.0
        return Cost(tokens=asked + most, cost=money)

    async def _reserve_in_turn(self, cost: Cost) -> Reservation:
        """Wait until other runs and sub-calls have given back enough, or the run is stopped."""
        waiting = asyncio.ensure_future(self._ledger.reserve_in_turn(cost))
        try:
            await self._signal.until(waiting)
        except BaseException:
            await abandon(waiting)
            if not waiting.cancelled() and waiting.exception() is None:
                waiting.result().release()
            raise
        return waiting.result()

    def _rooms(self, asked: int) -> list[int]:
        """Tokens that the limits of tokens and of money have for a reply to *asked* tokens."""
        tokens, money, price = self._ledger.tokens_left, self._ledger.money_left, self._root.price
        rooms = [] if tokens is None else [tokens - asked]
        if money is not None and price is not None:
            affordable = price.output_tokens(money - price.of(asked, 0))
            rooms += [] if affordable is None else [affordable]
        return rooms
