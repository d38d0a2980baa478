"""The session behind a notebook: what a person does to a run, and where its cells appear.

A run that ``%%rlm`` starts goes on in the background where a driver is
connected: its cells come up in the notebook and are executed by the front
end. Without a driver it goes on in the output of the cell that started it,
which ends when the run ends or waits for a decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlm_kernel.cells import CellResult, Display, ErrorOutput, Output, Stream
from rlm_kernel.driver.handover import Claim, Verdict
from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.inline import InlineView
from rlm_kernel.engine.decisions import Decision, automatic
from rlm_kernel.engine.events import RunEnded, RunPaused, Stored, TurnStarted
from rlm_kernel.engine.roots import HumanRoot, Message
from rlm_kernel.engine.run import Run
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.record import Record, record_path_for
from rlm_kernel.repl import Executed, Repl
from rlm_kernel.repl.messages import RunCommand, StartRun
from rlm_kernel.session.commands import HARMLESS, answer_command
from rlm_kernel.session.eventlog import EventLog
from rlm_kernel.session.human import HumanExecutor
from rlm_kernel.session.models import Models
from rlm_kernel.session.request import Request
from rlm_kernel.session.session import DirectExecutor, FrontEnd, Session
from rlm_kernel.session.settings import Settings, kept, with_options
from rlm_kernel.subcalls.scheduling.scheduler import Scheduler

__all__ = ["NotebookSession", "notebook_path"]

Publish = Callable[[Output], None]

log = logging.getLogger(__name__)

_END_PATIENCE_S = 5.0


def notebook_path(environ: Mapping[str, str]) -> Path | None:
    """The notebook that this kernel belongs to, where the one who started it has said so."""
    if given := environ.get("RLM_NOTEBOOK"):
        return Path(given)
    name = Path(environ.get("JPY_SESSION_NAME", ""))
    # The server gives a path in its own tree; the kernel's folder is the notebook's.
    return Path.cwd() / name.name if name.suffix == ".ipynb" else None


class NotebookSession(Session):
    """A `Session` with a person at a front end.

    Parameters
    ----------
    repl
        Started or starting.
    front_end
        The kernel.
    environ
        Where RLM_ROOT, RLM_SUB, RLM_NOTEBOOK and keys are looked up.
    """

    def __init__(
        self, repl: Repl, front_end: FrontEnd, environ: Mapping[str, str] = os.environ
    ) -> None:
        notebook = notebook_path(environ)
        path = None if notebook is None else record_path_for(notebook)
        self._beside = path is not None
        log = EventLog(lambda: Record.open(path))
        super().__init__(
            repl,
            log=log,
            models=Models(environ),
            scheduler=Scheduler(emit=log.emit, commit=log.settle, replies=log),
            front_end=front_end,
        )
        self.settings = Settings(root=environ.get("RLM_ROOT", ""), sub=environ.get("RLM_SUB", ""))
        loop = asyncio.get_running_loop()
        self.hub = Hub(loop.time, loop.call_later, busy=lambda: self.repl.busy)
        self.count = 0
        """Number of the last cell."""
        self._own_cell = _PersonCell()
        self._requested: Request | None = None
        self._steered = False
        self._preparing: asyncio.Task[None] | None = None
        self._going: _Going | None = None
        self._history: Sequence[Message] = ()
        self._publish: Publish = _unseen
        self._released = asyncio.Event()
        self._advanced = asyncio.Event()
        self.log.subscribe(self._on_event)

    # --- cells ----------------------------------------------------------------------------

    async def execute_request(
        self,
        code: str,
        *,
        silent: bool,
        store_history: bool,
        user_expressions: dict[str, str],
        allow_stdin: bool,
        header: dict[str, Any],
        cell_id: str,
        on_start: Callable[[int], None],
        publish: Publish,
    ) -> Executed:
        """Run a cell of the front end's: a person's, or one that the root proposed."""
        self._reap()
        claim = None if silent else self.hub.claim(cell_id, code)
        verdict = "none" if claim is None else await claim.verdict()
        if claim is not None and verdict != "none":
            return await self._execute_claim(claim, verdict, header, on_start, publish)
        self.models.name(code)
        if code.strip() in _LEAVE and not silent:
            return self._leave(publish)
        going = self._going
        if going is not None and going.human is not None and not silent and not _is_command(code):
            return await self._execute_as_root(going, code, header, on_start, publish)
        person = self._own_cell = _PersonCell(code)

        def started(cell: int) -> None:
            person.cell = cell
            self.person_cell_begins()
            on_start(cell)

        try:
            executed = await self.repl.execute(
                code,
                silent=silent,
                store_history=store_history,
                user_expressions=user_expressions,
                allow_stdin=allow_stdin,
                parent=header,
                on_output=publish,
                on_start=started,
            )
        finally:
            self._own_cell = _PersonCell()
        self.count = executed.result.execution_count
        self.ledger.waited += executed.result.waited_s
        return await self._after_cell(executed, cell_id, publish)

    def _leave(self, publish: Publish) -> Executed:
        """A console ends; a notebook, which does not know this payload, says how it is ended."""
        text = "exit() leaves a console; a notebook ends its kernel in the Kernel menu.\n"
        publish(Stream("stdout", text))
        result = CellResult(ok=True, execution_count=self.count + 1)
        payload = [{"source": "ask_exit", "keepkernel": False}]
        return Executed(cell=0, result=result, payload=payload)

    async def _execute_claim(
        self,
        claim: Claim,
        verdict: Verdict,
        header: dict[str, Any],
        on_start: Callable[[int], None],
        publish: Publish,
    ) -> Executed:
        if verdict == "show":
            for output in claim.result.outputs:
                publish(output)
            return Executed(cell=0, result=claim.result)
        if verdict == "skip":
            nothing = Executed(cell=0, result=CellResult(ok=True, execution_count=self.count))
            return _failed(
                nothing, UsageError("the run was stopped; this cell was not run"), publish
            )
        try:
            executed = await self.execute_turn(
                claim.turn,
                claim.source,
                self._history,
                header=header,
                on_start=on_start,
                on_output=publish,
            )
        except BaseException as error:
            claim.failed(error)
            raise
        claim.done(executed.result)
        return executed

    async def _execute_as_root(
        self,
        going: _Going,
        code: str,
        header: dict[str, Any],
        on_start: Callable[[int], None],
        publish: Publish,
    ) -> Executed:
        """A cell of a person who is the root: it is the proposal and the execution of a turn."""
        assert going.human is not None
        self._publish = publish
        self._advanced.clear()
        executed = await going.human.turn(
            code,
            going.task,
            lambda turn, history: self.execute_turn(
                turn, code, history, header=header, on_start=on_start, on_output=publish
            ),
        )
        # The end of the run, by this cell or by a limit, is shown below this cell.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._advanced.wait(), _END_PATIENCE_S)
        if self.run is None or self.run.state in ("answered", "stopped", "failed"):
            await asyncio.wait([going.task], timeout=_END_PATIENCE_S)
        return self._ended(executed, publish) if going.task.done() else executed

    async def _after_cell(self, executed: Executed, cell_id: str, publish: Publish) -> Executed:
        """Start the run that the cell asked for; stay with one that it started or steered."""
        request, self._requested = self._requested, None
        steered, self._steered = self._steered, False
        if request is not None:
            try:
                await self._start_interruptibly(request, cell_id, publish)
            except RLMError as error:
                return _failed(executed, error, publish)
        going = self._going
        if going is None or going.driven or going.human is not None:
            return executed
        if request is None and not steered:
            return executed
        if not going.task.done() and not self._waits():
            self._publish = publish
            self._released.clear()
            await self._released.wait()
            if self._waits() and not going.live:
                self._show_proposal(publish)
        return self._ended(executed, publish) if going.task.done() else executed

    def _show_proposal(self, publish: Publish) -> None:
        """Where displays are not updated, the proposal that waits is not to be seen otherwise."""
        proposal = None if self.run is None else self.run.proposal
        if proposal is not None:
            said = f"{proposal.prose}\n\n" if proposal.prose else ""
            text = f"turn {proposal.turn} waits for your decision:\n\n{said}{proposal.source}\n"
            publish(Stream("stdout", text))

    def _waits(self) -> bool:
        return self.run is not None and self.run.proposal is not None

    def _ended(self, executed: Executed, publish: Publish) -> Executed:
        going, self._going = self._going, None
        assert going is not None
        try:
            ended = going.task.result()
        except RLMError as error:
            return _failed(executed, error, publish)
        if ended.state == "failed":
            return _failed(executed, RLMError(f"the run failed: {ended.reason}"), publish)
        return executed

    def _reap(self) -> None:
        """Forget a run that ended while no cell stayed with it: its view or its driver told."""
        if self._going is not None and self._going.task.done():
            task, self._going = self._going.task, None
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                log.warning("a run ended with an error: %s", error)

    # --- runs -----------------------------------------------------------------------------

    async def start_run(self, request: StartRun) -> str:
        """``%%rlm``: check what was asked; the run starts when the cell has ended."""
        self._own_cell.check(request.cell, "%%rlm")
        self._reap()
        if self._going is not None:
            raise UsageError("a run is already going on; %rlm stop ends it, %rlm status shows it")
        self.log.retry()
        query = request.query.strip()
        if not query:
            raise UsageError("%%rlm needs a query: write it below the %%rlm line")
        settings = with_options(kept(self.settings), request.options)
        self.models.check_root(settings.root)
        if settings.sub:
            self.models.sub_spec(settings)
        if self.prompt is None:
            raise UsageError("no prompt is loaded; load one with %prompt FILE")
        self._requested = Request(query=query, settings=settings)
        if settings.root == "human":
            return "You are the root: each cell that you run is a turn, until one sets Final."
        if not self.hub.has_driver:
            return ""  # what is shown of the run begins with it
        return f"root {settings.root} · sub-calls {self.models.sub_name(settings) or 'none'}"

    async def _start_interruptibly(self, request: Request, cell_id: str, publish: Publish) -> None:
        task = self._preparing = asyncio.ensure_future(self._start(request, cell_id, publish))
        try:
            await asyncio.wait([task])
        finally:
            self._preparing = None
            task.cancel()
        if task.cancelled():
            raise RLMError("the run was interrupted before it began")
        task.result()

    async def _start(self, request: Request, cell_id: str, publish: Publish) -> None:
        root = await self.models.root(request.settings.root, request.query)
        human = HumanExecutor(root) if isinstance(root, HumanRoot) else None
        driven = self.hub.has_driver and human is None
        executor = human or (HubExecutor(self) if driven else DirectExecutor(self))
        # A person's own execution of a cell is their decision about it.
        policy = automatic if human is not None else None
        run = await self.prepare(request, root=root, executor=executor, policy=policy)
        self._publish = publish
        if human is None:
            driven = self.hub.attach(run, run.started, self._record_name(), cell_id)
        # A console sends no cell ids, and prints an update as a new output.
        live = bool(cell_id)
        task = asyncio.get_running_loop().create_task(self.finish(run))
        self._going = _Going(task, human, driven, live)
        if driven:
            task.add_done_callback(lambda _: self._reap())
        else:
            view = InlineView(self._display, request.query, live=live, turns=human is None)
            unsubscribe = self.log.subscribe(view.on_event)
            task.add_done_callback(lambda _: unsubscribe())

    def _record_name(self) -> str:
        """The record as the notebook names it, so that both can be moved together."""
        return Path(self.log.path).name if self._beside else self.log.path

    def _display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, update: bool
    ) -> None:
        self._publish(Display(data, metadata, display_id, update))

    def _on_event(self, stored: Stored) -> None:
        self.hub.on_event(stored)
        if self.run is not None and stored.run_id != self.run.run_id:
            return
        # After the listeners that show the event, and after the run has taken notice.
        soon = asyncio.get_running_loop().call_soon
        if isinstance(stored.event, RunPaused | RunEnded):
            soon(self._released.set)
        if isinstance(stored.event, TurnStarted | RunEnded):
            soon(self._advanced.set)

    async def run_command(self, request: RunCommand) -> str:
        """``%rlm COMMAND``."""
        if request.command not in HARMLESS:
            self._own_cell.check(request.cell, request.command)
        said = answer_command(self, request.command, request.args)
        self._steered = request.command not in HARMLESS
        return said

    def set_history(self, history: Sequence[Message]) -> None:
        """Messages that the next cell of a run adds to ``history``."""
        self._history = history

    def interrupt(self) -> None:
        """Interrupt the running cell; a run pauses, and the cell that shows it ends.

        A person who is the root interrupts their own cell, and goes on with the next.
        """
        if self._preparing is not None:
            self._preparing.cancel()
        if self.run is not None and (self._going is None or self._going.human is None):
            self.run.pause()
        super().interrupt()
        self._released.set()

    def decide(self, decision: Decision) -> Run:
        """Decide about the waiting proposal. Raises `UsageError` where there is none."""
        if self.run is None or self.run.proposal is None:
            raise UsageError("no proposal waits for a decision; %rlm status shows the run")
        self.run.decide(decision)
        return self.run

    async def close(self) -> None:
        """End the run and the worker."""
        going = self._going
        if self.run is not None:
            self.run.stop("the kernel was shut down")
        if going is not None and not going.task.done():
            await asyncio.wait([going.task], timeout=2)
            going.task.cancel()
        await super().close()


@dataclass
class _PersonCell:
    """The cell of a person's that runs at the moment; none by default.

    Code that a root left behind in the worker can send what ``%rlm`` sends. So a run is
    started and steered only by a cell of a person's, and only if the word is in its text.
    """

    code: str = ""
    cell: int = -1

    def check(self, cell: int, word: str) -> None:
        """Raise `UsageError` where *cell* is not this one, or does not say *word*."""
        if cell != self.cell or word not in self.code or "rlm" not in self.code:
            raise UsageError(
                "a run is started and steered by a person: write %rlm or %%rlm in a cell of yours"
            )


@dataclass(frozen=True)
class _Going:
    """A run that goes on, and who shows it."""

    task: asyncio.Task[RunEnded]
    human: HumanExecutor | None
    driven: bool
    """A front end inserts and executes its cells."""

    live: bool
    """The front end updates displays in place."""


class HubExecutor:
    """Lets the front end execute the cells of a run, so that they are cells of the notebook."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._direct = DirectExecutor(session)

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        """Run one cell, by the driver, or straight where it is gone."""
        self._session.set_history(history)
        return await self._session.hub.execute(
            turn, source, lambda: self._direct.execute(turn, source, history)
        )

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, or take back that it is to be run."""
        self._session.hub.withdraw()
        await self._direct.interrupt()


_LEAVE = ("exit", "quit", "exit()", "quit()")
"""Cells by which a person leaves a console."""


def _unseen(output: Output) -> None:
    """Before the first cell there is nowhere to show anything."""


def _is_command(code: str) -> bool:
    return code.lstrip().startswith(("%rlm", "%%rlm", "%prompt", "%%prompt"))


def _failed(executed: Executed, error: RLMError, publish: Publish) -> Executed:
    shown = ErrorOutput(type(error).__name__, str(error), [f"{type(error).__name__}: {error}"])
    publish(shown)
    result = msgspec.structs.replace(executed.result, ok=False, error=shown)
    return msgspec.structs.replace(executed, result=result)
