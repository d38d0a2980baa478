"""Questions to a REPL that help a person type. A worker that is busy is not waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from rlm_kernel.cells import Variable
from rlm_kernel.errors import UsageError, WorkerDied
from rlm_kernel.repl.incoming import Incoming
from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.messages import (
    Complete,
    Completeness,
    Completions,
    Inspect,
    Inspection,
    IsComplete,
    ToWorker,
    VariableList,
    Variables,
)
from rlm_kernel.repl.output import Unshowable, plain

__all__ = ["Questions"]

_QUERY_S = 10.0
"""Seconds that an answer may take before an empty one is given."""

T = TypeVar("T")


class Questions:
    """What `Repl` answers of its worker.

    Parameters
    ----------
    incoming
        Knows whether a cell runs.
    ids
        Of the messages to the worker.
    ready
        Waits for a worker.
    """

    def __init__(
        self, incoming: Incoming, ids: Iterator[int], ready: Callable[[], Awaitable[Worker]]
    ) -> None:
        self._incoming = incoming
        self._ids = ids
        self._ready = ready

    async def complete(self, code: str, cursor_pos: int) -> Completions:
        """See `Repl.complete`."""
        nothing = Completions(id=0, matches=[], cursor_start=cursor_pos, cursor_end=cursor_pos)
        message = Complete(id=next(self._ids), code=code, cursor_pos=cursor_pos)
        answer = await self._ask(message.id, message, nothing)
        with contextlib.suppress(Unshowable):
            return msgspec.structs.replace(answer, metadata=plain(answer.metadata))
        return nothing

    async def inspect(self, code: str, cursor_pos: int, detail_level: int) -> Inspection:
        """See `Repl.inspect`."""
        message = Inspect(
            id=next(self._ids), code=code, cursor_pos=cursor_pos, detail_level=detail_level
        )
        nothing = Inspection(id=0, found=False)
        answer = await self._ask(message.id, message, nothing)
        with contextlib.suppress(Unshowable):
            return msgspec.structs.replace(answer, data=plain(answer.data))
        return nothing

    async def is_complete(self, code: str) -> Completeness:
        """See `Repl.is_complete`."""
        message = IsComplete(id=next(self._ids), code=code)
        return await self._ask(message.id, message, Completeness(id=0, status="unknown"))

    async def variables(self) -> list[Variable]:
        """See `Repl.variables`."""
        known = VariableList(id=0, variables=self._incoming.inventory.variables())
        message = Variables(id=next(self._ids))
        return (await self._ask(message.id, message, known)).variables

    async def _ask(self, message_id: int, message: ToWorker, otherwise: T) -> T:
        """Return the worker's answer, or *otherwise* where it is busy, slow or gone."""
        if self._incoming.cell is not None:
            return otherwise
        try:
            worker = await self._ready()
            async with asyncio.timeout(_QUERY_S):
                return await worker.request(message_id, message, type(otherwise))
        except (WorkerDied, UsageError, TimeoutError):
            return otherwise
