"""Roots: what proposes cells. A chat model, a person, or a playbook.

All implement the small protocol `Root`: given the messages so far, yield the
reply as text deltas. This module is where other rooms take them from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from rlm_kernel.engine.chat_root import ChatRoot
from rlm_kernel.engine.fences import fence_for
from rlm_kernel.engine.playbook_root import PlaybookCell, PlaybookRoot
from rlm_kernel.engine.root_protocol import Message, Root, RootStream, TextStream
from rlm_kernel.errors import NoAnswer, UsageError
from rlm_kernel.prices import Price

__all__ = [
    "ChatRoot",
    "HumanRoot",
    "Message",
    "PlaybookCell",
    "PlaybookRoot",
    "Root",
    "RootStream",
]


class HumanRoot:
    """A person writes the cells.

    Parameters
    ----------
    ask
        Called with the messages so far, returns the source of the next cell. Raising
        ``EOFError`` ends the run. Without it, cells come through `submit`.
    """

    name = "human"
    sampled = False
    context_limit: int | None = None
    max_tokens: int | None = None
    price: Price | None = None

    def __init__(self, ask: Callable[[Sequence[Message]], Awaitable[str]] | None = None) -> None:
        self._ask = ask
        self._submitted: asyncio.Queue[str] = asyncio.Queue()

    def submit(self, source: str) -> None:
        """Propose *source*. Raises `UsageError` where it is empty."""
        if not source.strip():
            raise UsageError("the cell is empty; write Python, or stop the run with %rlm stop")
        self._submitted.put_nowait(source)

    def propose(
        self, messages: Sequence[Message], *, attempt: int = 1, max_tokens: int | None = None
    ) -> RootStream:
        return TextStream(self._reply(messages))

    async def close(self) -> None:
        """Forget cells that no run took."""
        self._submitted = asyncio.Queue()

    async def _reply(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        try:
            if self._ask is None:
                source = await self._submitted.get()
            else:
                source = await self._ask(messages)
        except EOFError:
            raise NoAnswer("the person ended the run without an answer") from None
        mark = fence_for(source)
        yield f"{mark}repl\n{source}\n{mark}\n"
