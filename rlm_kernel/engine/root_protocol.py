"""The protocol between a run and its root."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol, Self

import msgspec

from rlm_kernel.engine.budget import Usage
from rlm_kernel.prices import Price

__all__ = ["Message", "Root", "RootStream", "TextStream"]


class Message(msgspec.Struct, frozen=True):
    """One message between run and root."""

    role: Literal["system", "user", "assistant"]
    content: str


class RootStream(Protocol):
    """A reply as it comes: an async iterator of text deltas.

    `usage` and `finish` hold once the iterator ended or was closed. Closing
    ends the request below; it is done while no ``__anext__`` is under way.
    """

    @property
    def usage(self) -> Usage: ...
    @property
    def finish(self) -> str:
        """Why the reply ended, such as ``stop`` or ``length``; empty where nobody said."""

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> str: ...
    async def aclose(self) -> None: ...


class Root(Protocol):
    """What proposes cells."""

    @property
    def name(self) -> str:
        """Its spec, without a key."""

    @property
    def sampled(self) -> bool:
        """False where a person or a playbook writes: that costs no tokens."""

    @property
    def context_limit(self) -> int | None:
        """Tokens of messages and reply together; ``None`` where there is no limit, or none
        is known (yet: a server may tell with its first reply)."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a reply at most, where the root keeps to a number."""

    @property
    def price(self) -> Price | None:
        """What its tokens cost, where that is known."""

    def propose(
        self, messages: Sequence[Message], *, attempt: int = 1, max_tokens: int | None = None
    ) -> RootStream:
        """Ask for the next reply. *attempt* above 1 repeats a turn.

        *max_tokens* is what the budget has for this reply, thoughts included; the reply ends
        there with finish ``length``.

        Iterating raises `RootError` where the root cannot be asked or its reply breaks off,
        and `NoAnswer` where it has no more to propose.
        """

    async def close(self) -> None:
        """Give back connections. A closed root may be asked again."""


class TextStream:
    """A `RootStream` of text that costs nothing."""

    def __init__(self, pieces: AsyncGenerator[str, None]) -> None:
        self._pieces = pieces
        self.usage = Usage()
        self.finish = ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            self.finish = "stop"
            raise

    async def aclose(self) -> None:
        await self._pieces.aclose()
