"""The headless host: drives one run in a real kernel process and writes its notebook.

It is a front end without pixels. It speaks the comm ``rlm.driver`` as the
JupyterLab extension does, inserts the cells that the root writes, executes
them through ordinary execute requests and stores their outputs.

One task reads each channel of the kernel; one works through the notebook and
is the only one that sends execute requests, so cells never overlap. Whatever
ends first (the work, the kernel, a person's patience) ends the run, and what
was there is saved; of a request that cannot be met, nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlm_kernel.driver.document import Document
from rlm_kernel.driver.execution import Execution
from rlm_kernel.driver.kernel_process import KernelDied, KernelProcess
from rlm_kernel.driver.protocol import (
    TARGET,
    Accepted,
    CloseCell,
    Conflict,
    Delta,
    Final,
    FromFrontEnd,
    Need,
    Open,
    OpenCell,
    Operation,
    Refused,
    RunCell,
    Snapshot,
    State,
    Stop,
    Update,
    source_sha,
)
from rlm_kernel.driver.request import Listener, Outcome, RunRequest, Silent
from rlm_kernel.environ import protect
from rlm_kernel.errors import RecordError, RLMError, UsageError

__all__ = ["Host"]

_CLIENT = "headless"
_SILENCE_S = 5.0
"""Without an update, after which the host asks whether it has missed one."""

_STOP_GRACE_S = 3.0
"""Seconds that a cell has to end by itself once its run is over."""

_INTERRUPTS = 3


class Host:
    """Runs one `RunRequest`. Use an instance once.

    Parameters
    ----------
    request
        What to run.
    document
        The notebook to write; nothing must be in it yet.
    listener
        Is told of everything that the kernel says.
    kernel_argv
        Command of the kernel, with ``{connection_file}``; ours where not given.
    environ
        Added to the environment of the kernel.
    start_timeout
        Seconds that the kernel has to start.
    answer_timeout
        Seconds that it then has to answer on the comm, and that a run has to begin.
    """

    def __init__(
        self,
        request: RunRequest,
        document: Document,
        *,
        listener: Listener | None = None,
        kernel_argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        answer_timeout: float = 60.0,
    ) -> None:
        self.request = request
        self.document = document
        self.listener: Listener = listener or Silent()
        self._argv = kernel_argv
        self._environ = dict(environ or {})
        self._start_timeout = start_timeout
        self._answer_timeout = answer_timeout
        self._kernel: KernelProcess | None = None
        self._comm_id = uuid.uuid4().hex
        self._executions: dict[str, Execution] = {}
        self._expected_seq: int | None = None
        self._todo: asyncio.Queue[RunCell | Final] = asyncio.Queue()
        self._opened = asyncio.Event()
        self._begun = asyncio.Event()
        self._run_id = ""
        self._interrupts = 0
        self._over = asyncio.Event()
        """The run has ended or is about to: none of its cells has to run any longer."""

        self._ended = False
        self._given_up = asyncio.Event()
        self._started = time.monotonic()
        self._unsaved = ""

    # --- from outside -------------------------------------------------------------------------

    def interrupt(self) -> None:
        """A person pressed Ctrl-C: first the run is asked to stop, then everything is ended."""
        self._interrupts += 1
        if self._interrupts == 1 and self._run_id:
            self._send(Stop())
            self._over.set()
            self.listener.note("stopping the run; press Ctrl-C again to end it at once")
        else:
            self._given_up.set()

    async def run(self) -> Outcome:
        """Start the kernel, run, save; the kernel is gone when this returns or raises.

        The calling process is undumpable from then on (`rlm_kernel.environ.protect`): the keys
        that the kernel gets from its environment are in it as well.

        Raises
        ------
        UsageError
            The prompt cannot be loaded or the run cannot be started as asked.
        KernelDied
            The kernel process ended in the middle.
        RLMError
            Anything else that kept the run from its end.
        """
        protect()
        final: Final | None = None
        try:
            final = await self._unless_given_up(self._run_in_kernel())
        except UsageError:
            if self._run_id:
                self._save()
            raise  # before the run there is nothing to keep: no notebook is made for it
        except BaseException:
            self._save()
            raise
        self._save()
        return Outcome(
            final=final,
            interrupted=self._interrupts > 0,
            seconds=time.monotonic() - self._started,
            notebook=self.document.path,
            unsaved=self._unsaved,
        )

    # --- life of the run ----------------------------------------------------------------------

    async def _unless_given_up(self, work: Coroutine[Any, Any, Final]) -> Final | None:
        """Result of *work*, or ``None`` if a person ended it first."""
        running = asyncio.create_task(work)
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait({running, given_up}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            await _end(running, given_up)

    async def _run_in_kernel(self) -> Final:
        environ = dict(self._environ)
        if self.document.path is not None:
            environ["RLM_NOTEBOOK"] = str(self.document.path.absolute())
        # Named here, by who started the program, and not by a cell alone: these get the key.
        environ |= {
            name: self.request.options[option]
            for name, option in (("RLM_ROOT", "root"), ("RLM_SUB", "sub"))
            if option in self.request.options
        }
        async with KernelProcess.open(
            argv=self._argv, environ=environ, timeout=self._start_timeout
        ) as kernel:
            self._kernel = kernel
            self.document.set_language(kernel.info.get("language_info", {}))
            return await self._race(kernel)

    async def _race(self, kernel: KernelProcess) -> Final:
        """The work, unless the kernel dies or a channel breaks before."""
        work = asyncio.create_task(self._work())
        died = asyncio.create_task(kernel.died())
        readers = [
            asyncio.create_task(self._read(kernel.client.get_iopub_msg, self._on_iopub)),
            asyncio.create_task(self._read(kernel.client.get_shell_msg, self._on_shell)),
            asyncio.create_task(self._ask_again()),
        ]
        try:
            await asyncio.wait({work, died, *readers}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            for reader in readers:
                if reader.done():
                    reader.result()
            raise KernelDied(
                f"the kernel {await died} in the middle of the run; "
                "what it had done is in the notebook and the record"
            )
        finally:
            await _end(work, died, *readers)

    async def _work(self) -> Final:
        self._open_comm()
        await self._await(self._opened, "did not answer on the comm rlm.driver")
        for cell_id, kind, source in self.request.opening_cells():
            self.document.add(kind, source, cell_id)
            if kind == "code":
                await self._execute_opening(cell_id)
        self._save()
        await self._await(self._begun, "said nothing of the run")
        return await self._follow()

    async def _await(self, event: asyncio.Event, otherwise: str) -> None:
        try:
            async with asyncio.timeout(self._answer_timeout):
                await event.wait()
        except TimeoutError:
            raise RLMError(
                f"the kernel {otherwise} within {self._answer_timeout:g} seconds; "
                "use the kernel and the host of one version, or try when the machine is less busy"
            ) from None

    async def _execute_opening(self, cell_id: str) -> None:
        execution = await self._execute(cell_id)
        error = execution.outputs.error
        if error is not None:
            usage = error.get("ename") in ("UsageError", "PromptError")
            raise (UsageError if usage else RLMError)(_one_line(error))

    async def _follow(self) -> Final:
        """Run the cells that the kernel announces until the run has ended."""
        while True:
            op = await self._todo.get()
            if isinstance(op, Final):
                self.document.add_ending(op)
                self._note_final(op)
                return op
            await self._run_cell(op)
            self._save()

    async def _run_cell(self, op: RunCell) -> None:
        source = self.document.source(op.cell_id)
        if source is None or source_sha(source) != op.sha:
            self._send(Conflict(cell_id=op.cell_id, have=len(source or "")))
            return
        self._send(Accepted(cell_id=op.cell_id, source=source, sha=op.sha))
        started = time.monotonic()
        executing = asyncio.create_task(self._execute(op.cell_id))
        try:
            ended = await self._until_over(executing)
        finally:
            await _end(executing)
        self.document.describe_execution(
            op.cell_id,
            ok=ended and executing.result().reply.result().get("status") == "ok",
            seconds=time.monotonic() - started,
        )

    async def _until_over(self, executing: asyncio.Task[Execution]) -> bool:
        """Wait for the end of a cell. False where the run ended and its cell would not.

        The kernel interrupts the cell of a run that is stopped. Where the stop overtook the
        execute request there was nothing to interrupt yet, so it is done from here as well.
        """
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({executing, over}, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(_INTERRUPTS):
                await asyncio.wait({executing}, timeout=_STOP_GRACE_S)
                if executing.done():
                    return True
                assert self._kernel is not None
                await self._kernel.interrupt()
            while not (executing.done() or self._ended):
                await asyncio.wait({executing}, timeout=_STOP_GRACE_S)
            return executing.done()
        finally:
            await _end(over)

    def _note_final(self, op: Final) -> None:
        record, notebook = Path(op.record), self.document.path
        if notebook is not None and record.parent == notebook.absolute().parent:
            record = Path(record.name)
        self.document.note(
            state=op.state,
            response=op.response,
            reason=op.reason,
            usage=op.usage,
            record=str(record) if op.record else "",
        )

    def _save(self) -> None:
        """Save, and go on without where that fails: an answer is worth more than its notebook."""
        if not self._run_id and self.document.path and self.document.path.exists():
            return  # nothing to keep yet, and there is the notebook of an earlier run
        try:
            self.document.save()
            self._unsaved = ""
        except RecordError as error:
            if not self._unsaved:
                self.listener.note(str(error))
            self._unsaved = str(error)

    # --- to the kernel ------------------------------------------------------------------------

    def _request(
        self, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None
    ) -> str:
        assert self._kernel is not None
        client = self._kernel.client
        message = client.session.msg(kind, content, metadata=metadata)
        client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def _open_comm(self) -> None:
        data = msgspec.to_builtins(Open(client=_CLIENT, can_drive=True))
        self._request("comm_open", {"comm_id": self._comm_id, "target_name": TARGET, "data": data})

    def _send(self, message: FromFrontEnd) -> None:
        data = msgspec.to_builtins(message)
        self._request("comm_msg", {"comm_id": self._comm_id, "data": data})

    async def _execute(self, cell_id: str) -> Execution:
        """Execute a cell and wait for its reply and the end of its output."""
        content: dict[str, Any] = {
            "code": self.document.source(cell_id),
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        execution = Execution(self.document.start_outputs(cell_id), self.listener.subcalls)
        msg_id = self._request("execute_request", content, {"cellId": cell_id})
        self._executions[msg_id] = execution
        await execution.over()
        return execution

    # --- from the kernel ----------------------------------------------------------------------

    async def _read(self, get: Callable[[], Any], take: Callable[[dict[str, Any]], None]) -> None:
        while True:
            take(await get())

    async def _ask_again(self) -> None:
        """Ask for what may be missing after a silence: the loss of a last update leaves no gap."""
        while True:
            before = self._expected_seq
            await asyncio.sleep(_SILENCE_S)
            if before is not None and before == self._expected_seq:
                self._send(Need(from_seq=before))

    def _on_shell(self, message: dict[str, Any]) -> None:
        execution = self._executions.get(message["parent_header"].get("msg_id", ""))
        if execution and message["msg_type"] == "execute_reply":
            execution.on_reply(message["content"])

    def _on_iopub(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind in ("comm_msg", "comm_close") and content.get("comm_id") == self._comm_id:
            self._on_comm(kind, content)
            return
        execution = self._executions.get(message["parent_header"].get("msg_id", ""))
        if execution is not None:
            execution.on_iopub(kind, content)

    def _on_comm(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "comm_close":
            raise RLMError(
                "the kernel closed the comm rlm.driver, without which no run can be driven; "
                "check that it is the RLM kernel of this version"
            )
        try:
            update = msgspec.convert(content.get("data"), Update)
        except msgspec.ValidationError as error:
            raise RLMError(
                f"the kernel sent an update that this host does not understand ({error}); "
                "use the kernel and the host of one version"
            ) from error
        self._opened.set()
        if self._in_order(update):
            for op in update.ops:
                self._apply(self._in_words(op))

    def _in_order(self, update: Update) -> bool:
        """Whether *update* comes next. Asks for what is missing before it."""
        expected = self._expected_seq
        whole = any(isinstance(op, Snapshot) for op in update.ops)
        if expected is None or update.seq == expected or (whole and update.seq > expected):
            self._expected_seq = update.seq + 1
            return True
        if update.seq > expected:
            self._send(Need(from_seq=expected))
        return False

    def _in_words(self, op: Operation) -> Operation:
        """*op*, with the person who interrupted in the place of the client that passed it on."""
        if isinstance(op, State | Final) and op.reason == f"stopped by {_CLIENT}":
            return msgspec.structs.replace(op, reason="interrupted by a person")
        return op

    def _apply(self, op: Operation) -> None:
        match op:
            case OpenCell():
                self.document.open(op)
            case Delta():
                have = self.document.append(op)
                if have is not None:
                    self._send(Conflict(cell_id=op.cell_id, have=have))
            case CloseCell():
                self.document.close(op)
            case Snapshot():
                self._begin(op.run_id)
                self.document.restore(op)
            case State():
                self._on_state(op)
            case RunCell():
                self._todo.put_nowait(op)
            case Final():
                self._on_final(op)
            case Refused():
                self.listener.note(op.reason)
        self.listener.operation(op)

    def _on_state(self, op: State) -> None:
        if op.run_id:
            self._begin(op.run_id)
        if op.run_id == self._run_id:
            self.document.note(
                state=op.state,
                turns=op.turn,
                usage=op.usage,
                root=op.root,
                sub=op.sub,
                subcalls=op.subcalls_done + op.subcalls_failed,
            )

    def _on_final(self, op: Final) -> None:
        self._begin(op.run_id)
        if op.run_id == self._run_id:
            self._ended = True
            self._over.set()
            self._todo.put_nowait(op)

    def _begin(self, run_id: str) -> None:
        """The run has begun; child runs have other ids and come later."""
        if not self._run_id and run_id:
            self._run_id = run_id
            self.document.note(runs=[run_id], query=self.request.query)
            self._begun.set()


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel *tasks* and wait until they are over."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _one_line(error: dict[str, Any]) -> str:
    """An error output as one line."""
    text = " ".join(str(error.get("evalue", "")).split())
    return text or str(error.get("ename", "the cell failed without saying why"))
