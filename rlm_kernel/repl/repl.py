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
from typing import Any, Self

import msgspec

from rlm_kernel.cells import Output, PromptInfo, Variable
from rlm_kernel.environ import protect as make_undumpable
from rlm_kernel.environ import scrub
from rlm_kernel.errors import PromptError, UsageError, WorkerDied
from rlm_kernel.prompts import Prompt, PromptKind, check_prompt, encoded, kind_of
from rlm_kernel.repl.callbacks import guarded
from rlm_kernel.repl.cell import Cell, Executed
from rlm_kernel.repl.handler import ReplHandler
from rlm_kernel.repl.incoming import Incoming
from rlm_kernel.repl.interrupt import interrupt_cell
from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.messages import (
    Begin,
    CallTool,
    CommDone,
    CommToWorker,
    Completeness,
    Completions,
    Execute,
    Inspection,
    Loaded,
    LoadPrompt,
    ReadPrompt,
    Ready,
    ToolReturned,
)
from rlm_kernel.repl.output import MAX_OUTPUT
from rlm_kernel.repl.prompt_file import write_memfd
from rlm_kernel.repl.questions import Questions
from rlm_kernel.repl.tree import WORKER_ARGV, Tree
from rlm_kernel.repl.widgets import WidgetMessages

__all__ = ["Repl"]


class Repl:
    """A worker process with its supervisor, and what runs in it.

    Make one with `start`, or with `spawn` where there is no event loop yet.
    From the first ``await`` on it belongs to the running loop and is not
    thread-safe. Close it with `close`, or use it in ``async with``.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._incoming = Incoming(tree)
        self._ids = itertools.count(1)
        self._turns = asyncio.Lock()
        self._ladder: asyncio.Task[None] | None = None
        self._starting = False
        self._early_interrupt = False
        self._closing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._widgets = WidgetMessages()
        self._questions = Questions(self._incoming, self._ids, self._ready)

    @property
    def handler(self) -> ReplHandler:
        """Who answers what cells ask for; `Nobody` at first."""
        return self._incoming.handler

    @handler.setter
    def handler(self, handler: ReplHandler) -> None:
        self._incoming.handler = handler

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
            left out (`rlm_kernel.environ`).
        launcher
            Command prefix in which the processes run, such as a sandbox.
        protect
            Make the calling process undumpable, so that cells cannot read its memory
            (`rlm_kernel.environ.protect`). It stays so.
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
        self._tree.attach(asyncio.get_running_loop(), self._incoming)
        return await self._tree.ready()

    async def restart(self) -> None:
        """End the worker, whatever it does, and wait for a new one."""
        self._tree.attach(asyncio.get_running_loop(), self._incoming)
        self._incoming.asked_to_end = self._tree.worker
        self._tree.worker.end("was restarted")
        await self.ready()

    async def close(self) -> None:
        """End everything. No process is left, also where this is cancelled. May be repeated."""
        if self._closing is None:
            self._incoming.closing = True
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._tree.close(goodbye=self._incoming.cell is None)
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
        return self._incoming.cell is not None

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
                guarded(on_output),
                limit=max_output,
                allow_stdin=allow_stdin,
                silent=silent,
            )
            self._early_interrupt = False
            self._starting = True
            try:
                await self._last_interrupt_over()
                worker = await self._ready()
                self._incoming.begin(cell)
                guarded(on_start)(cell.id)
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
                self._incoming.cell = None
                cell.fail(error, execution_count=self._incoming.count)
            finally:
                self._starting = False
            if self._early_interrupt:
                await self.interrupt()
            try:
                return await asyncio.shield(cell.over)
            except asyncio.CancelledError:
                await self.interrupt()
                raise

    async def _last_cell_over(self) -> None:
        """Wait for a cell whose caller did not."""
        while self._incoming.cell is not None:
            await asyncio.wait([self._incoming.cell.over])

    async def _last_interrupt_over(self) -> None:
        """Wait for a signal that is on its way: it is not meant for what comes next."""
        if self._ladder is not None and not self._ladder.done():
            await asyncio.wait([self._ladder])

    async def interrupt(self) -> None:
        """Make the running cell, or the widget's handler, stop; where none runs, do nothing.

        Returns at once. Code that does not stop within some 3 seconds loses its worker
        (`rlm_kernel.repl.interrupt`).
        """
        if self._starting:
            # The cell waits for its worker: it is interrupted as soon as it runs.
            self._early_interrupt = True
            return
        running, worker = self._running(), self._tree.worker
        if running is None or not worker.is_up or (self._ladder and not self._ladder.done()):
            return
        number, over = running
        self._ladder = self._background(
            interrupt_cell(
                self._tree.supervisor,
                worker,
                over,
                lambda: self._incoming.waits(number),
                self._incoming.give_up,
            )
        )

    def _running(self) -> tuple[int, asyncio.Future[Any]] | None:
        """Id and end of what the worker is at."""
        cell = self._incoming.cell
        if cell is not None:
            return cell.id, cell.over
        return self._widgets.oldest()

    # --- the prompt and runs ------------------------------------------------------------------

    async def begin(
        self,
        run_id: str,
        history: Sequence[dict[str, str]] = (),
        *,
        tools: Sequence[str] = (),
        pickled: bytes = b"",
    ) -> Ready:
        """Install the names of the REPL afresh for a run. The answer tells of ``P`` and the tools.

        Parameters
        ----------
        history, tools, pickled
            See `rlm_kernel.repl.messages.Begin`.

        Raises
        ------
        WorkerDied
            The worker ended meanwhile.
        UsageError
            The tools are too large for the link.
        """
        async with self._turns:
            await self._last_cell_over()
            worker = await self._ready()
            message = Begin(
                id=next(self._ids),
                run_id=run_id,
                history=list(history),
                tools=list(tools),
                pickled=pickled,
            )
            return await worker.request(message.id, message, Ready)

    async def call_tool(self, batch: int, name: str, arguments: str) -> ToolReturned:
        """Run a tool of the run, where the REPL waits for the sub-calls of request *batch*.

        Raises
        ------
        WorkerDied
            There is no worker, or it ended meanwhile.
        UsageError
            The arguments are too large for the link.
        """
        worker = self._tree.worker
        message = CallTool(id=next(self._ids), batch=batch, name=name, arguments=arguments)
        return await worker.request(message.id, message, ToolReturned)

    async def load_prompt(self, prompt: Prompt, *, source: str = "") -> PromptInfo:
        """Make *prompt* the ``P`` of the REPL.

        Raises
        ------
        PromptError
            It is no prompt, is empty, or there is no memory for it.
        WorkerDied
            The worker ended meanwhile.
        """
        chunks = encoded(check_prompt(prompt))
        if not prompt:
            raise PromptError("the prompt is empty; give one with text")
        return await self.load_prompt_chunks(chunks, kind=kind_of(prompt), source=source)

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
        self._incoming.inventory.has_prompt = True
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
        reader = self._incoming.read(worker, message.id)
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
        return await self._questions.complete(code, cursor_pos)

    async def inspect(self, code: str, cursor_pos: int, detail_level: int = 0) -> Inspection:
        """What is known of the object at *cursor_pos*; nothing while a cell runs."""
        return await self._questions.inspect(code, cursor_pos, detail_level)

    async def is_complete(self, code: str) -> Completeness:
        """Whether *code* can run as it is; ``unknown`` while a cell runs."""
        return await self._questions.is_complete(code)

    async def variables(self) -> list[Variable]:
        """The variables of the REPL; while a cell runs, those of its start."""
        return await self._questions.variables()

    def comm(
        self, message: CommToWorker, on_start: Callable[[int], None] | None = None
    ) -> asyncio.Future[CommDone]:
        """Hand a front end's message to its widget; the future is done once that is through.

        A cell that runs and does not await comes first. The future has `WorkerDied` where
        there is no worker, and hence no widget.

        Parameters
        ----------
        message
            Its id is given here.
        on_start
            Called with that id, which what the widget shows meanwhile has instead of a cell's.

        Raises
        ------
        UsageError
            The message is too large for the link.
        """
        worker = self._tree.worker
        if not worker.is_up:
            return self._widgets.to_nobody()
        message = msgspec.structs.replace(message, id=next(self._ids))
        self._incoming.let_widgets_send()
        handled = self._widgets.send(worker, message)
        guarded(on_start)(message.id)
        return handled

    # --- helpers ------------------------------------------------------------------------------

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
