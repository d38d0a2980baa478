"""One REPL with what it needs: models, scheduler, record, and the run that works in it.

This is the only room that knows all others. The kernel, the library
(`rlm_kernel.RLM`) and every child run have a `Session`; what differs between
them is who is asked for input and who looks at the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

from rlm_kernel.budget_view import BudgetView
from rlm_kernel.cells import CellResult, ErrorOutput, Output, PromptInfo
from rlm_kernel.engine.budget import Budget, Ledger
from rlm_kernel.engine.decisions import Policy, ask, automatic
from rlm_kernel.engine.dialects import dialect_named
from rlm_kernel.engine.events import RunEnded, WorkerLost
from rlm_kernel.engine.roots import Message, Root
from rlm_kernel.engine.run import Executor, Run
from rlm_kernel.errors import RecordError, RLMError, SubcallError, UsageError
from rlm_kernel.repl import Executed, Repl
from rlm_kernel.repl.messages import (
    CommFromWorker,
    JudgeSubcalls,
    RunCommand,
    SendSubcalls,
    StartRun,
    SubcallResult,
)
from rlm_kernel.session.budget import view_of
from rlm_kernel.session.eventlog import EventLog
from rlm_kernel.session.models import Models
from rlm_kernel.session.progress import Progress
from rlm_kernel.session.request import Request
from rlm_kernel.session.settings import Settings
from rlm_kernel.session.subcalls import judge_subcalls, send_subcalls
from rlm_kernel.session.tools import specs_of, toolbox_of
from rlm_kernel.session.verdicts import Verdicts
from rlm_kernel.session.whole_prompt import is_whole
from rlm_kernel.subcalls.endpoint import ToolSpec
from rlm_kernel.subcalls.scheduling.batch import ChildOutcome
from rlm_kernel.subcalls.scheduling.scheduler import Scheduler
from rlm_kernel.subcalls.scheduling.tools import Toolbox

__all__ = ["FrontEnd", "Session", "new_id"]


class _Given(TypedDict, total=False):
    """Tools as `Repl.begin` takes them."""

    tools: Sequence[str]
    pickled: bytes


def new_id() -> str:
    """12 hex digits."""
    return secrets.token_hex(6)


class FrontEnd(Protocol):
    """Who looks at the REPL: a kernel's front end, or nobody."""

    def output(self, cell: int, output: Output) -> None:
        """Show output that came after its cell had ended."""

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        """Ask the person; ``None`` is end of file."""

    def comm(self, message: CommFromWorker) -> None:
        """Pass on a widget's message."""


class NoFrontEnd:
    """Stands where nobody looks at the REPL."""

    def output(self, cell: int, output: Output) -> None:
        """Dropped: there is no cell to show it in."""

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        """Refused."""
        raise UsageError("input() needs a person, and nobody watches this run; remove the call")

    def comm(self, message: CommFromWorker) -> None:
        """Dropped: there is no front end."""


class Session:
    """A REPL, the runs in it and the sub-calls from it.

    Parameters
    ----------
    repl
        Started or starting; the session closes it.
    log, models, scheduler
        Shared by the sessions of one tree of runs.
    front_end
        Who is asked for input and sees late output.
    owner
        True where closing this session closes *log*, *models* and *scheduler* too.
    above
        The prompts of the runs above those of this session, nearest first.
    toolbox
        The tools of the run above, for the models of its child's sub-calls too.
    """

    def __init__(
        self,
        repl: Repl,
        *,
        log: EventLog,
        models: Models,
        scheduler: Scheduler,
        front_end: FrontEnd | None = None,
        owner: bool = True,
        above: Sequence[PromptInfo] = (),
        toolbox: Toolbox | None = None,
    ) -> None:
        self.repl = repl
        self.log = log
        self.models = models
        self.scheduler = scheduler
        self.front_end: FrontEnd = front_end or NoFrontEnd()
        self.run: Run | None = None
        self.prompt: PromptInfo | None = None
        self.settings = Settings()
        self.turn = 0
        self._owner = owner
        self._person = Ledger(Budget(max_subcalls=None))
        self._ledger: Ledger | None = None
        self._left: Ledger | None = None
        """Of a run that is over, until a person's cell begins: its cells may have left threads
        behind, which are not to go on at a person's expense, who has no limits."""

        self.progress = Progress()
        self.verdicts = Verdicts()
        self._above = tuple(above)
        self._handed = toolbox
        self._pickled = b""
        self._tools: list[ToolSpec] = []
        """Of the run that is going on, where they are functions of this REPL."""
        self._restore = False
        self._stopping = False
        """The run was stopped: a turn that a front end is about to start is not to run."""
        repl.handler = self
        if owner:
            log.on_broken = self._record_broken

    @property
    def ledger(self) -> Ledger:
        """Of the run that is going on, else of the cell that was begun last."""
        return self._ledger or self._left or self._person

    def person_cell_begins(self) -> None:
        """A cell begins that no run proposed."""
        self._left = None

    # --- runs -----------------------------------------------------------------------------

    async def prepare(
        self,
        request: Request,
        *,
        root: Root | None = None,
        executor: Executor | None = None,
        policy: Policy | None = None,
        ledger: Ledger | None = None,
        run_id: str = "",
    ) -> Run:
        """A run for *request*, with everything done that comes before its first turn.

        Raises
        ------
        UsageError
            It cannot start: no prompt, no root, an unknown spec or dialect.
        RecordError
            The record cannot be written.
        """
        if self.run is not None:
            raise UsageError("a run is already going on in this REPL; %rlm stop ends it")
        settings = request.settings
        dialect = dialect_named(settings.dialect)
        run_id = run_id or new_id()
        self._pickled = request.pickled_tools
        ready = await self.repl.begin(run_id, [], **self._given_tools(settings))
        if ready.error or ready.prompt is None:
            raise UsageError(ready.error or "no prompt is loaded; load one with %prompt FILE")
        tools = specs_of(ready.tools)
        self.prompt = ready.prompt
        root = root or await self.models.root(settings.root, request.query)
        await self._record_prompt(ready.prompt)
        ledger = ledger or Ledger(settings.budget)
        sub_context = await self.models.sub_context(settings)
        self._ledger = ledger
        self.settings = settings
        self._tools = tools
        self._stopping = False
        self.run = Run(
            run_id=run_id,
            query=request.query,
            prompt=ready.prompt,
            root=root,
            dialect=dialect,
            executor=executor or DirectExecutor(self),
            ledger=ledger,
            emit=lambda event: self.log.emit(run_id, event),
            policy=policy or (ask if settings.policy == "ask" else automatic),
            root_spec=root.name,
            sub_spec=self.models.sub_name(settings),
            sub_context=sub_context,
            hide_stream=request.depth > 0,
            depth=request.depth,
            parent_run_id=request.parent_run_id,
            parent_call_id=request.parent_call_id,
        )
        return self.run

    async def finish(self, run: Run) -> RunEnded:
        """Let *run* work until its end, and give back what it held."""
        try:
            ended = await run.run()
            await self._restore_prompt()
            return ended
        finally:
            self.run = None
            self.turn = 0
            self._ledger, self._left = None, self._ledger
            self._tools, self._pickled = [], b""
            await run.root.close()
            self.log.flush()

    async def _record_prompt(self, prompt: PromptInfo) -> None:
        record = self.log.record
        if record.has_prompt(prompt.sha256):
            return
        loop = asyncio.get_running_loop()
        left = _most_bytes(prompt)
        with record.prompt_writer(prompt) as writer:
            async for chunk in self.repl.read_prompt():
                left -= len(chunk)
                if left < 0:
                    raise RLMError(
                        "the worker sent more than the prompt that it told of; load it again"
                    )
                # Compressing 1 GB takes seconds; the kernel answers meanwhile.
                await loop.run_in_executor(None, writer.write, chunk)

    def _record_broken(self, error: RecordError) -> None:
        if self.run is not None:
            self.run.fail(str(error))

    # --- cells ----------------------------------------------------------------------------

    async def execute_turn(
        self,
        turn: int,
        source: str,
        history: Sequence[Message],
        *,
        on_output: Callable[[Output], None] | None = None,
        header: dict[str, object] | None = None,
        on_start: Callable[[int], None] | None = None,
    ) -> Executed:
        """Run the cell of *turn* in the REPL, restoring ``P`` first where a worker was lost."""
        if self._stopping:
            return _not_run(turn)
        await self._restore_prompt(len(history))
        self.turn = turn
        try:
            executed = await self.repl.execute(
                source,
                turn=turn,
                history=[{"role": m.role, "content": m.content} for m in history],
                parent=header,
                on_output=on_output,
                on_start=on_start,
            )
        finally:
            self.turn = 0
        self.ledger.waited += executed.result.waited_s
        return executed

    async def _restore_prompt(self, news: int = 0) -> None:
        """Give a new worker ``P`` and the messages, but for the last *news*: those come anew."""
        if not self._restore or self.run is None or self.prompt is None:
            return
        self._restore = False
        chunks = self.log.record.prompt_chunks(self.prompt.sha256)
        await self.repl.load_prompt_chunks(chunks, kind=self.prompt.kind, source=self.prompt.source)
        told = self.run.history[: len(self.run.history) - news]
        messages = [{"role": m.role, "content": m.content} for m in told]
        await self.repl.begin(self.run.run_id, messages, **self._given_tools(self.settings))

    async def stop_turn(self) -> None:
        """The run ends: interrupt its cell, and start none that is on its way."""
        self._stopping = True
        await self.repl.interrupt()

    def interrupt(self) -> None:
        """Interrupt the running cell."""
        _keep(asyncio.ensure_future(self.repl.interrupt()))

    async def close(self) -> None:
        """End the run and the worker; no process is left."""
        if self.run is not None:
            self.run.stop("the session was closed")
        await self.repl.close()
        if self._owner:
            await self.scheduler.close()
            await self.models.close()
            self.log.close()

    # --- what the worker asks (ReplHandler) -------------------------------------------------

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        """``input()`` and ``getpass()``."""
        return await self.front_end.get_input(cell, prompt, password)

    def output(self, cell: int, output: Output) -> None:
        """Output of a background task, after its cell ended."""
        self.front_end.output(cell, output)

    def comm(self, message: CommFromWorker) -> None:
        """A widget's message."""
        self.front_end.comm(message)

    def prompt_set(self, prompt: PromptInfo) -> None:
        """A person's cell loaded ``P``. In a run the prompt is what it is, whatever is said."""
        if self.run is None:
            self.prompt = prompt

    def keeps_prompt(self) -> bool:
        """In a run the record has it."""
        return self.run is not None

    def worker_lost(self, reason: str, lost: list[str]) -> None:
        """The worker is gone; a run gets ``P`` back before its next cell."""
        self._restore = True
        self.verdicts = Verdicts()
        self.prompt = self.prompt if self.run is not None else None
        if self.run is not None:
            self.log.emit(self.run.run_id, WorkerLost(reason=reason, lost=lost))

    async def start_run(self, request: StartRun) -> str:
        """``%%rlm`` in a REPL without a person."""
        raise UsageError(
            "%%rlm starts a run from a notebook; in a run, use sub_RLM(…, depth='rlm')"
        )

    async def run_command(self, request: RunCommand) -> str:
        """``%rlm`` in a REPL without a person."""
        raise UsageError("%rlm commands are for the person at the notebook")

    def budget(self) -> BudgetView:
        """What ``budget()`` shows: used and set aside by this run, left by it and all above."""
        return view_of(self.ledger, in_run=self.run is not None)

    def subcalls(
        self,
        request: SendSubcalls,
        deliver: Callable[[list[SubcallResult]], None],
        fail: Callable[[RLMError], None],
    ) -> Callable[[], None]:
        """Call models for a cell; results go back as they come."""
        return send_subcalls(self, request, deliver, fail)

    def judge_subcalls(self, message: JudgeSubcalls) -> None:
        """The worker checked replies of a typed sub-task."""
        judge_subcalls(self, message)

    def toolbox(self, batch: int) -> Toolbox | None:
        """The tools that models may use for the sub-calls of request *batch*."""
        return self._handed or toolbox_of(self._tools, self.repl, batch)

    def _given_tools(self, settings: Settings) -> _Given:
        # A child run has those of the run above it, which are functions of another REPL.
        if not self._owner:
            return {}
        return {"tools": settings.tools, "pickled": self._pickled}

    async def is_whole_prompt(self, text: str) -> bool:
        """Whether a child run of *text* would get the whole ``P`` of a run again, and must not."""
        if self.run is None or self.settings.allow_whole_prompt:
            return False
        for prompt in self._line():
            if await is_whole(text, prompt, self.log.record):
                return True
        return False

    def _line(self) -> tuple[PromptInfo, ...]:
        """The prompts of the run that is going on and of those above it."""
        own = () if self.run is None or self.prompt is None else (self.prompt,)
        return own + self._above

    async def run_child(
        self, request: Request, prompt: str, parent: Ledger, toolbox: Toolbox | None
    ) -> ChildOutcome:
        """Let a run below that of *parent* answer *request* about *prompt*, in its own REPL."""
        repl = await Repl.start()
        child = Session(
            repl,
            log=self.log,
            models=self.models,
            scheduler=self.scheduler,
            owner=False,
            above=self._line(),
            toolbox=toolbox,
        )
        run_id = new_id()
        ledger = parent.child(parent.remaining())
        try:
            await repl.load_prompt(prompt, source=f"sub-call {request.parent_call_id}")
            run = await child.prepare(request, ledger=ledger, run_id=run_id)
            ended = await child.finish(run)
        except RLMError as error:
            return ChildOutcome(run_id=run_id, error=SubcallError(f"the child run failed: {error}"))
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(child.close())
        if ended.state == "answered":
            return ChildOutcome(run_id=run_id, text=ended.response, usage=ended.usage)
        reason = f"the child run {ended.state} without an answer: {ended.reason}"
        return ChildOutcome(run_id=run_id, error=SubcallError(reason), usage=ended.usage)


class DirectExecutor:
    """Runs the cells of a run straight in the REPL, with nobody looking."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        """Run one cell."""
        executed = await self._session.execute_turn(turn, source, history)
        return executed.result

    async def interrupt(self) -> None:
        """Interrupt the cell that runs, or is about to: the run is being stopped."""
        await self._session.stop_turn()


_tasks: set[asyncio.Future[None]] = set()


def _keep(task: asyncio.Future[None]) -> None:
    """Hold a reference until *task* is done: the loop itself keeps only a weak one."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _not_run(turn: int) -> Executed:
    error = ErrorOutput("UsageError", f"the run was stopped before turn {turn} ran", [])
    return Executed(cell=0, result=CellResult(ok=False, execution_count=0, error=error))


def _most_bytes(prompt: PromptInfo) -> int:
    """Bytes that *prompt* can have on its way: 4 for a character, 12 where JSON escapes it."""
    return 12 * prompt.chars + 64 * prompt.items + 1024
