"""A REPL in a process of its own, driven from an asyncio event loop.

The kernel process holds no user code and evaluates nothing that comes back.
A worker may end at any time and in any way; whoever waits for it then hears
why, and a new one is started at once. Cells run one at a time, in the order
of `Repl.execute`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from rlm_kernel.cells import Output, PromptInfo, Variable
from rlm_kernel.errors import LinkError, PromptError, UsageError, WorkerDied
from rlm_kernel.repl.cell import Cell, Executed, Inventory, loss_sentence
from rlm_kernel.repl.environ import scrub
from rlm_kernel.repl.handler import Nobody, ReplHandler
from rlm_kernel.repl.interrupt import interrupt_cell
from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.messages import (
    Begin,
    CancelSubcalls,
    CommFromWorker,
    CommToWorker,
    Complete,
    Completeness,
    Completions,
    Done,
    Emit,
    Execute,
    FromWorker,
    GetBudget,
    GetInput,
    Hello,
    Inspect,
    Inspection,
    IsComplete,
    Loaded,
    LoadPrompt,
    PromptChunk,
    ReadPrompt,
    Ready,
    RunCommand,
    SendSubcalls,
    SetPrompt,
    StartRun,
    ToWorker,
    VariableList,
    Variables,
)
from rlm_kernel.repl.output import MAX_OUTPUT, Collector, StreamName, plain
from rlm_kernel.repl.processes import protect as make_undumpable
from rlm_kernel.repl.prompt_file import (
    Prompt,
    PromptKind,
    encode_prompt,
    prompt_kind,
    write_memfd,
)
from rlm_kernel.repl.prompt_reader import PromptReader
from rlm_kernel.repl.requests import Requests
from rlm_kernel.repl.tree import WORKER_ARGV, Tree

__all__ = ["Repl"]

_QUERY_S = 10.0
"""Seconds that completion and its like may take before an empty answer is given."""

T = TypeVar("T")


class Repl:
    """A worker process with its supervisor, and what runs in it.

    Make one with `start`, or with `spawn` where there is no event loop yet.
    From the first ``await`` on it belongs to the running loop and is not
    thread-safe. Close it with `close`, or use it in ``async with``.
    """

    def __init__(self, tree: Tree) -> None:
        self.handler: ReplHandler = Nobody()
        self._tree = tree
        self._ids = itertools.count(1)
        self._turns = asyncio.Lock()
        self._cell: Cell | None = None
        self._late = Collector(self._forward_late, keep=False)
        self._late_cell = 0
        self._requests: Requests | None = None
        self._readers: dict[int, PromptReader] = {}
        self._inventory = Inventory()
        self._count = 0
        self._ladder: asyncio.Task[None] | None = None
        self._asked_to_end: Worker | None = None
        self._flushing = False
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- start and end ------------------------------------------------------------------------

    @classmethod
    def spawn(
        cls,
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        protect: bool = True,
        worker_argv: Sequence[str] = WORKER_ARGV,
    ) -> Self:
        """Start the processes and return at once; `ready` waits for them. Needs no event loop.

        Parameters
        ----------
        cwd
            Working folder of cells; the caller's by default.
        environ
            Environment of cells, ``os.environ`` by default. What looks like a credential is
            left out (`rlm_kernel.repl.environ`).
        launcher
            Command prefix in which the processes run, such as a sandbox.
        protect
            Make the calling process undumpable, so that cells cannot read its memory
            (`rlm_kernel.repl.processes.protect`). It stays so.
        worker_argv
            Command of the worker, with the path of its program first.

        Raises
        ------
        UsageError
            The folder or the launcher is not there.
        """
        if protect:
            make_undumpable()
        return cls(
            Tree(
                cwd=cwd or Path.cwd(),
                environ=scrub(os.environ if environ is None else environ),
                launcher=launcher,
                worker_argv=worker_argv,
            )
        )

    @classmethod
    async def start(
        cls,
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        protect: bool = True,
        worker_argv: Sequence[str] = WORKER_ARGV,
    ) -> Self:
        """`spawn` and `ready` in one. Where the worker does not come up, nothing is left."""
        repl = cls.spawn(
            cwd=cwd,
            environ=environ,
            launcher=launcher,
            protect=protect,
            worker_argv=worker_argv,
        )
        try:
            await repl.ready()
        except BaseException:
            await repl.close()
            raise
        return repl

    async def ready(self) -> None:
        """Wait until a worker is up; start one where the last one did not come up.

        Raises
        ------
        WorkerDied
            It ended before it was up, or the REPL is closed.
        """
        await self._ready()

    async def _ready(self) -> Worker:
        self._tree.attach(asyncio.get_running_loop(), self)
        return await self._tree.ready()

    async def restart(self) -> None:
        """End the worker, whatever it does, and wait for a new one."""
        self._tree.attach(asyncio.get_running_loop(), self)
        self._asked_to_end = self._tree.worker
        self._tree.worker.end("was restarted")
        await self.ready()

    async def close(self) -> None:
        """End everything. No process is left, also where this is cancelled. May be repeated."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._tree.close(goodbye=self._cell is None)
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor, or of its launcher."""
        return self._tree.supervisor.pid

    @property
    def worker_pid(self) -> int | None:
        """Process id of the live worker as its supervisor sees it; ``None`` before it is known."""
        return self._tree.worker.pid

    @property
    def busy(self) -> bool:
        """Whether a cell runs."""
        return self._cell is not None

    # --- cells --------------------------------------------------------------------------------

    async def execute(
        self,
        code: str,
        *,
        silent: bool = False,
        store_history: bool = True,
        allow_stdin: bool = False,
        user_expressions: dict[str, str] | None = None,
        parent: dict[str, Any] | None = None,
        turn: int = 0,
        history: Sequence[dict[str, str]] = (),
        on_output: Callable[[Output], None] | None = None,
        on_start: Callable[[int], None] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Executed:
        """Run a cell, after those that were asked for before.

        Never raises for what the cell did or what became of its worker: that
        is in the result. Cancelling it interrupts the cell.

        Parameters
        ----------
        silent, store_history, allow_stdin, user_expressions, parent
            As in Jupyter's ``execute_request``; *parent* is its header.
        turn, history
            See `rlm_kernel.repl.messages.Execute`.
        on_output
            Called with each output while the cell runs, text in larger pieces than it came.
        on_start
            Called with the cell's id before it is sent.
        max_output
            Characters of output that are shown and kept.
        """
        async with self._turns:
            await self._last_cell_over()
            cell = Cell(
                next(self._ids),
                self._guarded(on_output),
                limit=max_output,
                allow_stdin=allow_stdin,
                silent=silent,
            )
            try:
                worker = await self._ready()
                self._begin_cell(cell, on_start)
                worker.used = True
                worker.link.send(
                    Execute(
                        id=cell.id,
                        code=code,
                        silent=silent,
                        store_history=store_history,
                        allow_stdin=allow_stdin,
                        user_expressions=user_expressions or {},
                        parent=parent or {},
                        turn=turn,
                        history=list(history),
                        max_output=max_output,
                    )
                )
            except (WorkerDied, UsageError) as error:
                self._cell = None
                cell.fail(error, execution_count=self._count)
            try:
                return await asyncio.shield(cell.over)
            except asyncio.CancelledError:
                await self.interrupt()
                raise

    async def _last_cell_over(self) -> None:
        """Wait for a cell whose caller did not."""
        while self._cell is not None:
            await asyncio.wait([self._cell.over])

    def _begin_cell(self, cell: Cell, on_start: Callable[[int], None] | None) -> None:
        self._late.flush()
        self._cell = cell
        self._late = Collector(self._forward_late, keep=False)
        self._late_cell = cell.id
        if on_start is not None:
            on_start(cell.id)

    async def interrupt(self) -> None:
        """Make the running cell stop; where none runs, do nothing.

        Returns at once. A cell that does not stop within some 3 seconds loses its worker
        (`rlm_kernel.repl.interrupt`).
        """
        cell, worker = self._cell, self._tree.worker
        if cell is None or not worker.is_up or (self._ladder and not self._ladder.done()):
            return
        self._ladder = self._background(
            interrupt_cell(
                self._tree.supervisor, worker, cell.over, lambda: self._give_up_waits(cell)
            )
        )

    def _give_up_waits(self, cell: Cell) -> None:
        if self._requests is not None:
            self._requests.interrupt(cell.id)

    # --- the prompt and runs ------------------------------------------------------------------

    async def begin(self, run_id: str, history: Sequence[dict[str, str]] = ()) -> Ready:
        """Install the names of the REPL afresh for a run. The answer tells of ``P``.

        Raises
        ------
        WorkerDied
            The worker ended meanwhile.
        """
        async with self._turns:
            await self._last_cell_over()
            worker = await self._ready()
            message = Begin(id=next(self._ids), run_id=run_id, history=list(history))
            return await worker.request(message.id, message, Ready)

    async def load_prompt(self, prompt: Prompt, *, source: str = "") -> PromptInfo:
        """Make *prompt* the ``P`` of the REPL.

        Raises
        ------
        PromptError
            It is no prompt, is empty, or there is no memory for it.
        WorkerDied
            The worker ended meanwhile.
        """
        kind = prompt_kind(prompt)
        return await self.load_prompt_chunks(encode_prompt(prompt), kind=kind, source=source)

    async def load_prompt_chunks(
        self, chunks: Iterable[bytes], *, kind: PromptKind, source: str = ""
    ) -> PromptInfo:
        """As `load_prompt`, from UTF-8 (surrogates passed), or JSON where *kind* is not ``str``.

        The event loop gets a turn after each of *chunks*.
        """
        fd = await write_memfd(chunks)
        try:
            async with self._turns:
                await self._last_cell_over()
                worker = await self._ready()
                message = LoadPrompt(id=next(self._ids), kind=kind, source=source)
                fd, given = -1, fd
                loaded = await worker.request(message.id, message, Loaded, [given])
        finally:
            if fd >= 0:
                os.close(fd)
        if loaded.prompt is None:
            raise PromptError(loaded.error or "The worker could not load the prompt.")
        self._inventory.has_prompt = True
        return loaded.prompt

    async def read_prompt(self) -> AsyncIterator[bytes]:
        """Yield ``P`` as `load_prompt_chunks` takes it, in chunks of at most 1 MiB.

        Raises
        ------
        WorkerDied
            The worker ended before the last chunk.
        """
        worker = await self._ready()
        message = ReadPrompt(id=next(self._ids))
        reader = PromptReader(worker.link, f"read {message.id}")
        self._readers[message.id] = reader
        worker.used = True
        worker.link.send(message)
        try:
            while chunk := await reader.take():
                yield chunk
        finally:
            reader.abandon()

    # --- questions ----------------------------------------------------------------------------

    async def complete(self, code: str, cursor_pos: int) -> Completions:
        """Completions at *cursor_pos* (code points); none while a cell runs."""
        nothing = Completions(id=0, matches=[], cursor_start=cursor_pos, cursor_end=cursor_pos)
        message = Complete(id=next(self._ids), code=code, cursor_pos=cursor_pos)
        answer = await self._ask(message.id, message, nothing)
        return msgspec.structs.replace(answer, metadata=plain(answer.metadata))

    async def inspect(self, code: str, cursor_pos: int, detail_level: int = 0) -> Inspection:
        """What is known of the object at *cursor_pos*; nothing while a cell runs."""
        message = Inspect(
            id=next(self._ids), code=code, cursor_pos=cursor_pos, detail_level=detail_level
        )
        answer = await self._ask(message.id, message, Inspection(id=0, found=False))
        return msgspec.structs.replace(answer, data=plain(answer.data))

    async def is_complete(self, code: str) -> Completeness:
        """Whether *code* can run as it is; ``unknown`` while a cell runs."""
        message = IsComplete(id=next(self._ids), code=code)
        return await self._ask(message.id, message, Completeness(id=0, status="unknown"))

    async def variables(self) -> list[Variable]:
        """The variables of the REPL; while a cell runs, those of its start."""
        known = VariableList(id=0, variables=self._inventory.variables())
        message = Variables(id=next(self._ids))
        return (await self._ask(message.id, message, known)).variables

    async def _ask(self, message_id: int, message: ToWorker, otherwise: T) -> T:
        """Return the worker's answer, or *otherwise* where it is busy, slow or gone."""
        if self._cell is not None:
            return otherwise
        try:
            worker = await self._ready()
            async with asyncio.timeout(_QUERY_S):
                return await worker.request(message_id, message, type(otherwise))
        except (WorkerDied, UsageError, TimeoutError):
            return otherwise

    def comm(self, message: CommToWorker) -> None:
        """Hand a front end's message to its widget. Without a live worker there is no widget.

        Raises
        ------
        UsageError
            The message is too large for the link.
        """
        worker = self._tree.worker
        if worker.is_up:
            worker.used = True
            worker.link.send(message)

    # --- what the worker sends ----------------------------------------------------------------

    def on_worker_messages(self, worker: Worker, messages: list[FromWorker]) -> None:
        for message in messages:
            if worker.ended:
                return
            if type(message) is Emit:
                self._emit(message)
            else:
                self._take(worker, message)
        self._flush()

    def on_worker_text(self, worker: Worker, name: StreamName, text: str) -> None:
        self._sink().text(name, text)
        if not self._flushing:
            self._flushing = True
            # After what else is ready now, so that a burst goes on as one.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._sink().flush()

    def _sink(self) -> Collector:
        return self._late if self._cell is None else self._cell.collector

    def _emit(self, message: Emit) -> None:
        if self._cell is not None and message.id == self._cell.id:
            self._cell.collector.add(message.output)
            return
        if message.id != self._late_cell:
            self._late.flush()
            self._late_cell = message.id
        self._late.add(message.output)
        self._late.flush()

    def _forward_late(self, output: Output) -> None:
        self._guarded(lambda output: self.handler.output(self._late_cell, output))(output)

    def _take(self, worker: Worker, message: FromWorker) -> None:
        requests = self._requests_of(worker)
        match message:
            case Done():
                self._done(worker, message)
            case SendSubcalls():
                requests.subcalls(message)
            case CancelSubcalls():
                requests.cancel_subcalls(message)
            case GetBudget():
                requests.budget(message)
            case GetInput():
                self._flush()
                cell = self._cell
                allowed = cell is not None and cell.id == message.cell and cell.allow_stdin
                requests.input(message, allowed=allowed)
            case StartRun() | RunCommand():
                requests.command(message)
            case SetPrompt():
                self._inventory.has_prompt = True
                self._guarded(self.handler.prompt_set)(message.prompt)
            case CommFromWorker():
                self._flush()
                self._guarded(self.handler.comm)(_plain_comm(message))
            case PromptChunk():
                self._take_chunk(message)
            case Hello():
                raise LinkError("The worker said hello twice.")
            case _:
                worker.settle(message.id, message)

    def _requests_of(self, worker: Worker) -> Requests:
        if self._requests is None:
            self._requests = Requests(worker.link, lambda: self.handler)
        return self._requests

    def _take_chunk(self, message: PromptChunk) -> None:
        reader = self._readers.get(message.id)
        if reader is None:
            raise LinkError(f"The worker sent a prompt {message.id} that was not asked for.")
        if message.last:
            del self._readers[message.id]
        reader.put(message.data, last=message.last)

    def _done(self, worker: Worker, message: Done) -> None:
        cell = self._cell
        if cell is None or message.id != cell.id:
            raise LinkError(f"The worker ended cell {message.id}, which does not run.")
        # What its children wrote last lies in the pipes: they are dead, or not waited for.
        worker.drain_pipes()
        self._cell = None
        self._count = message.execution_count
        self._inventory.update(message.variables)
        cell.finish(message)

    # --- what becomes of the worker -----------------------------------------------------------

    def on_worker_end(self, worker: Worker, reason: str) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        lost, self._inventory = self._inventory.names(), Inventory()
        error = loss_sentence(reason, lost)
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.fail(error)
        self._flush()
        if self._cell is not None:
            cell, self._cell = self._cell, None
            cell.fail(error, execution_count=self._count + 1, worker_lost=reason)
        self._count = 0
        if self._closing is not None:
            return
        if worker is not self._asked_to_end:
            self._guarded(self.handler.worker_lost)(reason, lost)
        if worker.used:
            self._replace_worker()

    def _replace_worker(self) -> None:
        try:
            self._tree.replace_worker()
        except UsageError as error:
            # The next to need a worker tries again, and is told.
            self._report(error)

    # --- helpers ------------------------------------------------------------------------------

    def _guarded(self, callback: Callable[..., None] | None) -> Callable[..., None]:
        """Return *callback* so that a defect in it cannot break the link's bookkeeping."""
        if callback is None:
            return _ignore

        def guarded(*args: Any) -> None:
            try:
                callback(*args)
            except Exception as error:  # reported as asyncio reports those of its own callbacks
                self._report(error)

        return guarded

    def _report(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "The REPL's owner or supervisor failed", "exception": error}
        )

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _ignore(*_: object) -> None:
    pass


def _plain_comm(message: CommFromWorker) -> CommFromWorker:
    return msgspec.structs.replace(
        message, data=plain(message.data), metadata=plain(message.metadata)
    )
