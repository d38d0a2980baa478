"""What code in cells has asked for and not got yet: sub-calls, input, commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from rlm_kernel.errors import LinkError, RLMError, SubcallError, UsageError
from rlm_kernel.repl.callbacks import report
from rlm_kernel.repl.handler import ReplHandler
from rlm_kernel.repl.link import Link
from rlm_kernel.repl.messages import (
    BudgetLeft,
    CancelSubcalls,
    Failed,
    GetBudget,
    GetInput,
    InputReply,
    RunCommand,
    RunReply,
    SendSubcalls,
    StartRun,
    SubcallFailure,
    SubcallResult,
    SubcallResults,
    ToWorker,
)

__all__ = ["MAX_OUTSTANDING", "Requests"]

MAX_OUTSTANDING = 10_000
"""Requests of one worker without an answer; one more is refused. A batch of prompts is one
request, while code that gathers single calls sends one for each."""

_MAX_PROMPTS = 512 << 20
"""Characters of prompts under way beyond which no more is read, until some are answered."""

_CALL_SIZE = 1_000
"""What a prompt weighs beside its characters: its call, its outcome."""

_RESULTS_SIZE = 12 << 20
"""Characters of results that go into one frame; at 4 bytes each they still fit."""


class Requests:
    """The open requests of one worker, and their answers on the way back.

    Parameters
    ----------
    link
        Where answers go. It is paused while more is under way than is healthy.
    handler
        Returns who answers now.
    """

    def __init__(self, link: Link, handler: Callable[[], ReplHandler]) -> None:
        self._link = link
        self._handler = handler
        self._batches: dict[int, _Batch] = {}
        self._tasks: dict[int, tuple[int, asyncio.Task[None]]] = {}
        self._chars = 0

    # --- what comes from the worker -----------------------------------------------------------

    def subcalls(self, request: SendSubcalls) -> None:
        """A batch of sub-calls."""
        if not self._admit(request.id, "SubcallError"):
            return
        batch = _Batch(self, request)
        self._batches[request.id] = batch
        self._weigh(batch.chars)
        if not request.prompts:
            batch.deliver([])
            return
        try:
            cancel = self._handler().subcalls(request, batch.deliver, batch.fail)
        except RLMError as error:
            batch.fail(error)
        except Exception as error:
            batch.fail(_defect(error))
            report(error)
        else:
            batch.started(cancel)

    def cancel_subcalls(self, request: CancelSubcalls) -> None:
        """Nobody waits for a batch any more. It may be over by now."""
        batch = self._batches.get(request.id)
        if batch is not None:
            reason = "The sub-call was cancelled: nobody waits for it any more."
            self._cancel(batch, reason)

    def input(self, request: GetInput, *, allowed: bool) -> None:
        """``input()`` in a cell; *allowed* is whether its front end can be asked."""
        if not self._admit(request.id, "RLMError"):
            return
        if not allowed:
            reason = "input() was called, but who runs this cell cannot be asked for a line."
            self.send(Failed(id=request.id, ename="StdinNotImplemented", reason=reason))
            return
        self._start(request.id, request.cell, lambda: self._input(request))

    def budget(self, request: GetBudget) -> None:
        """``budget()`` in a cell."""
        try:
            self.send(BudgetLeft(id=request.id, budget=self._handler().budget()))
        except Exception as error:
            self.send(_failed(request.id, _defect(error)))
            report(error)

    def command(self, request: StartRun | RunCommand) -> None:
        """``%%rlm`` or ``%rlm`` in a cell."""
        if not self._admit(request.id, "RLMError"):
            return
        self._start(request.id, request.cell, lambda: self._command(request))

    def _admit(self, request_id: int, ename: Literal["SubcallError", "RLMError"]) -> bool:
        """Whether there is room for one more request; where there is none it is answered so."""
        if request_id in self._batches or request_id in self._tasks:
            raise LinkError(f"The worker asked twice under id {request_id}.")
        if len(self._batches) + len(self._tasks) < MAX_OUTSTANDING:
            return True
        reason = (
            f"More than {MAX_OUTSTANDING:,} requests of this REPL are open at once: give"
            " sub_RLM a list of prompts, which is one request, or make fewer at a time."
        )
        self.send(Failed(id=request_id, ename=ename, reason=reason))
        return False

    # --- answers ------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Send an answer, or the reason why it cannot be sent."""
        try:
            self._link.send(message)
        except UsageError as error:
            assert isinstance(message, (InputReply, RunReply, BudgetLeft))
            self._link.send(_failed(message.id, error))

    def _start(self, request_id: int, cell: int, work: Callable[[], Awaitable[ToWorker]]) -> None:
        task = asyncio.ensure_future(self._answer(request_id, work))
        self._tasks[request_id] = (cell, task)
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def _answer(self, request_id: int, work: Callable[[], Awaitable[ToWorker]]) -> None:
        try:
            self.send(await work())
        except RLMError as error:
            self.send(_failed(request_id, error))
        except Exception as error:
            # The cell must not wait for ever for an answer that a defect of ours ate.
            self.send(_failed(request_id, _defect(error)))
            report(error)

    async def _input(self, request: GetInput) -> ToWorker:
        text = await self._handler().get_input(request.cell, request.prompt, request.password)
        return InputReply(id=request.id, text=text)

    async def _command(self, request: StartRun | RunCommand) -> ToWorker:
        handler = self._handler()
        if isinstance(request, StartRun):
            return RunReply(id=request.id, text=await handler.start_run(request))
        return RunReply(id=request.id, text=await handler.run_command(request))

    # --- ends ---------------------------------------------------------------------------------

    def waits(self, cell: int) -> set[int]:
        """Ids of the requests that *cell* waits for."""
        batches = {batch.id for batch in self._batches.values() if batch.cell == cell}
        return batches | {number for number, (owner, _) in self._tasks.items() if owner == cell}

    def interrupt(self, waits: set[int]) -> None:
        """Cancel the requests *waits*. Threads that still wait for them get a failure."""
        for batch in [b for b in self._batches.values() if b.id in waits]:
            self._cancel(batch, "The sub-call was cancelled: its cell was interrupted.")
        for request_id, (_, task) in list(self._tasks.items()):
            if request_id in waits:
                task.cancel()
                reason = "The request was cancelled: its cell was interrupted."
                self._link.send(Failed(id=request_id, ename="RLMError", reason=reason))

    def _cancel(self, batch: _Batch, reason: str) -> None:
        """Whatever of *batch* comes up to this moment counts; `Failed` says that it was all."""
        batch.cancel()
        self._link.send(Failed(id=batch.id, ename="SubcallError", reason=reason))

    def cell_over(self, cell: int) -> None:
        """*cell* ended, perhaps by itself while it waited: nobody waits for its input any more."""
        for owner, task in list(self._tasks.values()):
            if owner == cell:
                task.cancel()

    def close(self) -> None:
        """Cancel everything: the worker is gone."""
        for batch in list(self._batches.values()):
            batch.cancel()
        for _, task in list(self._tasks.values()):
            task.cancel()

    def _weigh(self, chars: int) -> None:
        self._chars += chars
        if self._chars > _MAX_PROMPTS:
            self._link.pause("prompts")
        else:
            self._link.resume("prompts")

    def _forget(self, batch: _Batch) -> None:
        if self._batches.pop(batch.id, None) is not None:
            self._weigh(-batch.chars)


class _Batch:
    """One `SendSubcalls` until every index has its result."""

    def __init__(self, requests: Requests, request: SendSubcalls) -> None:
        self.id = request.id
        self.cell = request.cell
        self.chars = sum(map(len, request.prompts)) + _CALL_SIZE * len(request.prompts)
        self._requests = requests
        self._missing = set(range(len(request.prompts)))
        self._cancel: Callable[[], None] | None = None
        self._over = False

    def started(self, cancel: Callable[[], None]) -> None:
        """The handler took it; it may be over already."""
        if not self._over:
            self._cancel = cancel

    def deliver(self, results: list[SubcallResult]) -> None:
        """Send what came for indices that had nothing yet."""
        if self._over:
            return
        fresh = [result for result in results if self._take(result.index)]
        if not self._missing:
            self._end()
        for part in _parts(fresh) if fresh else [fresh]:
            self._send(part)

    def _take(self, index: int) -> bool:
        if index not in self._missing:
            return False
        self._missing.discard(index)
        return True

    def _send(self, results: list[SubcallResult]) -> None:
        link = self._requests._link
        try:
            link.send(SubcallResults(id=self.id, results=results))
        except UsageError as error:
            failure = SubcallFailure(reason=str(error))
            failed = [SubcallResult(index=result.index, error=failure) for result in results]
            link.send(SubcallResults(id=self.id, results=failed))

    def fail(self, error: RLMError) -> None:
        """Refuse the whole batch."""
        if not self._over:
            self._end()
            self._requests._link.send(_failed(self.id, error))

    def cancel(self) -> None:
        """Stop what is under way; nothing more is delivered."""
        if self._over:
            return
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()  # which may deliver what has just come
        self._end()

    def _end(self) -> None:
        self._over = True
        self._cancel = None
        self._requests._forget(self)


def _parts(results: list[SubcallResult]) -> list[list[SubcallResult]]:
    """Split *results* so that each part fits in a frame, where any single one does."""
    parts: list[list[SubcallResult]] = [[]]
    size = 0
    for result in results:
        length = len(result.text) + (len(result.error.reason) if result.error else 0)
        if parts[-1] and size + length > _RESULTS_SIZE:
            parts.append([])
            size = 0
        parts[-1].append(result)
        size += length
    return parts


def _defect(error: Exception) -> RLMError:
    return RLMError(f"The kernel failed to answer, by a defect of its own: {error!r}.")


def _failed(request_id: int, error: RLMError) -> Failed:
    return Failed(id=request_id, ename=_name(error), reason=str(error))


def _name(error: RLMError) -> Literal["UsageError", "SubcallError", "RLMError"]:
    match error:
        case UsageError():
            return "UsageError"
        case SubcallError():
            return "SubcallError"
    return "RLMError"
