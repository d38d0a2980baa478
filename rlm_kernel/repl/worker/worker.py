"""The worker's main loop: one command after the other, cells above all."""

from __future__ import annotations

import builtins
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from rlm_kernel.cells import AnswerSet, ErrorOutput, PromptInfo
from rlm_kernel.errors import PromptError, SubcallError, UsageError
from rlm_kernel.prompts import check_prompt
from rlm_kernel.repl import messages
from rlm_kernel.repl.worker import assist
from rlm_kernel.repl.worker.budget import make_budget
from rlm_kernel.repl.worker.comms import Comms, KernelStandIn
from rlm_kernel.repl.worker.interrupts import Interrupts
from rlm_kernel.repl.worker.link import Command, FrameTooLarge, Link
from rlm_kernel.repl.worker.names import AnswerBook, Names
from rlm_kernel.repl.worker.prompt import PromptHolder, from_memfd
from rlm_kernel.repl.worker.requests import Requests
from rlm_kernel.repl.worker.shell import make_shell
from rlm_kernel.repl.worker.streams import Outlet, Streams
from rlm_kernel.repl.worker.subcalls import Calls, SubRLM, make_aliases, make_subtask
from rlm_kernel.repl.worker.tools import Tools
from rlm_kernel.repl.worker.variables import Tracker

__all__ = ["Worker"]


class Worker:
    """The REPL of one process.

    Parameters
    ----------
    link
        To the kernel.
    interrupts
        Not yet installed.
    """

    def __init__(self, link: Link, interrupts: Interrupts) -> None:
        self.link = link
        self.interrupts = interrupts
        self.outlet = Outlet(link)
        self.streams = Streams(self.outlet)
        self.requests = Requests(link, self.outlet, self.streams)
        self.shell = make_shell(self.outlet, self.streams, interrupts)
        self.shell.loop_runner = self._run_coroutine
        self.shell.worker = self
        self.comms = Comms(link, self.outlet)
        self.comms.install()
        self.shell.kernel = self.kernel = KernelStandIn(self.shell, self.comms)
        self._loop: Any = None
        self._turn = 0
        self._install_names()
        self._patch_input()
        self._lazy_magics()
        os.register_at_fork(after_in_child=self._after_fork)
        interrupts.install()
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Execute: self._execute,
            messages.Begin: self._begin,
            messages.ReadPrompt: self._read_prompt,
            messages.Complete: self._complete,
            messages.Inspect: self._inspect,
            messages.IsComplete: self._is_complete,
            messages.Variables: self._variables,
            messages.CommToWorker: self._comm,
            messages.CallTool: self.tools.refuse,
            messages.Ping: self._ping,
        }

    def _install_names(self) -> None:
        namespace = self.shell.user_ns
        self.prompt = PromptHolder()
        self.book = AnswerBook(namespace)
        calls = Calls(self.requests)
        self.sub = sub = SubRLM(calls)
        offered = {
            "sub_RLM": sub,
            **make_aliases(sub),
            "subtask": make_subtask(calls),
            "SubcallError": SubcallError,
            "FINAL": self.book.FINAL,
            "FINAL_VAR": self.book.FINAL_VAR,
            "SUBMIT": self.book.SUBMIT,
            "SHOW_VARS": self._show_vars,
            "budget": make_budget(self.requests.budget),
        }
        self.names = Names(namespace, self.prompt, self.book, offered)
        self.names.install()
        self.tools = Tools(namespace, self.names.reserved, self.link, self.streams.flush)
        self.link.on_tool = self.tools.run
        hidden = self.names.reserved.union(self.shell.user_ns_hidden)
        self.tracker = Tracker(namespace, frozenset(hidden))

    def _patch_input(self) -> None:
        import getpass

        builtins.input = self.requests.input
        getpass.getpass = self.requests.getpass

    def _lazy_magics(self) -> None:
        magics = "rlm_kernel.repl.worker.magics:RLMMagics"
        subcall = "rlm_kernel.repl.worker.subcall_magic:SubcallMagic"
        for name, where in (("prompt", magics), ("rlm", magics), ("sub_RLM", subcall)):
            for kind in ("line", "cell"):
                self.shell.magics_manager.register_lazy(name, where, kind)

    # --- main loop ----------------------------------------------------------------------------

    def serve(self) -> None:
        """Say hello and work until the kernel closes the link."""
        self.link.send(messages.Hello(pid=os.getpid(), python=sys.version.split()[0]))
        # Not before: a library's warning at the start would go up the link ahead of the hello.
        self.streams.install()
        while True:
            if self._loop is not None and not self.link.commands:
                self._loop.idle()
            self._handle(self.link.next_command())

    def _handle(self, command: Command) -> None:
        if isinstance(command.message, messages.LoadPrompt):
            self._load_prompt(command)
        else:
            self._handlers[type(command.message)](command.message)

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        """Around whatever may run code of the user's: interrupts are on."""
        self.interrupts.begin_cell()
        try:
            yield
        finally:
            self.interrupts.end_cell()
            self.interrupts.reinstall()

    def _run_coroutine(self, coroutine: Any) -> Any:
        if self._loop is None:
            from rlm_kernel.repl.worker.loop import CellLoop

            self._loop = CellLoop(self.link, self.interrupts, self._comms_while_awaiting)
        return self._loop.run(coroutine)

    # --- cells --------------------------------------------------------------------------------

    def _execute(self, request: messages.Execute) -> None:
        started = time.perf_counter()
        self._turn = request.turn
        self.outlet.begin(request.id, request.max_output)
        self.requests.begin_cell(allow_stdin=request.allow_stdin)
        self.kernel.set_parent(request.parent)
        self.names.begin_cell(turn=bool(request.turn), history=request.history)
        with self.tools.hidden() if request.turn else nullcontext():
            ok, error, expressions, answer = self._run(request)
        self._tidy()
        restored = self._after_names()
        done = messages.Done(
            id=request.id,
            ok=ok,
            execution_count=self._count(request),
            error=error,
            variables=self.tracker.changes(),
            restored=restored,
            answer=answer,
            user_expressions=expressions,
            payload=self.shell.take_payload(),
            dropped_chars=self.outlet.dropped,
            seconds=time.perf_counter() - started,
            waited_s=self.requests.waited,
        )
        self._send_done(done)

    def _run(
        self, request: messages.Execute
    ) -> tuple[bool, ErrorOutput | None, dict[str, Any], AnswerSet | None]:
        shell = self.shell
        expressions: dict[str, Any] = {}
        answer = None
        try:
            with self._user_code():
                result = shell.run_cell(
                    request.code, store_history=request.store_history, silent=request.silent
                )
                ok = result is not None and result.success and not shell.display_failed
                if ok and request.user_expressions:
                    expressions = shell.evaluate(request.user_expressions)
                answer = self.book.end_cell(self._say)
        except BaseException as raised:
            # Out of IPython's own machinery: an interrupt at its end, or a broken hook.
            ok = False
            shell.showtraceback((type(raised), raised, raised.__traceback__))
        if ok:
            return True, None, expressions, answer
        return False, shell.last_error or ErrorOutput("Error", "", []), expressions, answer

    def _say(self, text: str) -> None:
        self.streams.err.write(text + "\n")

    def _tidy(self) -> None:
        """Undo what would break the next cell."""
        self.streams.restore()
        with suppress(Exception):
            self.streams.flush()
        self._stop_script_loop()

    def _stop_script_loop(self) -> None:
        """`%%bash` leaves a thread behind, but a worker that is idle has none of its own."""
        if "IPython.core.magics.script" not in sys.modules:
            return  # looking for it in the registry would load it
        script = self.shell.magics_manager.registry.get("ScriptMagics")
        if getattr(script, "event_loop", None) is not None:
            script.stop_event_loop()

    def _after_names(self) -> list[str]:
        if self._turn:
            return self.names.restore()
        value = self.names.rebound_prompt()
        if value is not self.prompt.value:
            with suppress(PromptError):  # such a `P` is the person's own; `Begin` says so
                self.set_prompt(value, "")
        self.names.replace_missing()
        return []

    def set_prompt(self, value: object, source: str) -> PromptInfo:
        """Make *value* the prompt and tell the kernel.

        Raises
        ------
        PromptError
            It is none, or a run is under way: its root must not exchange what it works on.
        """
        if self._turn:
            raise PromptError("P cannot be replaced in a run; use another name")
        self.prompt.set(check_prompt(value), source)
        self.names.install_prompt()
        info = self.prompt.info()
        self.link.send(messages.SetPrompt(cell=self.outlet.cell, prompt=info))
        return info

    def _count(self, request: messages.Execute) -> int:
        stored = request.store_history and not request.silent and request.code.strip()
        return int(self.shell.execution_count) - (1 if stored else 0)

    def _send_done(self, done: messages.Done) -> None:
        import msgspec

        try:
            self.link.send(done)
        except (FrameTooLarge, TypeError) as error:
            if done.answer or done.user_expressions or done.payload:
                self._say(f"The answer of this cell could not be handed over: {error}.")
                self.streams.flush()
            done = msgspec.structs.replace(done, answer=None, user_expressions={}, payload=[])
            try:
                self.link.send(done)
            except FrameTooLarge:  # as many variables as that
                self.link.send(msgspec.structs.replace(done, variables=[]))

    # --- other commands -----------------------------------------------------------------------

    def _begin(self, request: messages.Begin) -> None:
        value = self.names.rebound_prompt()
        error = ""
        info = None
        try:
            if value is not self.prompt.value:
                self.set_prompt(value, "")
            if self.prompt.loaded:
                info = self.prompt.info()
        except PromptError as problem:
            error = f"P cannot be used: {problem}"
        self.names.begin_run(request.history)
        tools, problem_of_tools = self._begin_tools(request)
        self.tracker.changes()
        ready = messages.Ready(
            id=request.id, prompt=info, error=error or problem_of_tools, tools=tools
        )
        self.link.send(ready)

    def _begin_tools(self, request: messages.Begin) -> tuple[list[messages.Tool], str]:
        """The tools of the run that begins, or why it has none."""
        try:
            with self._user_code():  # their files and modules are read
                return self.tools.begin_run(request.tools, request.pickled), ""
        except UsageError as error:
            return [], str(error)
        except BaseException as raised:
            return [], f"the tools cannot be loaded, because of {type(raised).__name__}"

    def _load_prompt(self, command: Command) -> None:
        request = command.message
        assert isinstance(request, messages.LoadPrompt)
        try:
            if command.fd is None:
                raise PromptError("the prompt's memory did not come with it; load it again")
            self.prompt.set(from_memfd(command.fd, request), request.source)
            info = self.prompt.info()
        except (PromptError, MemoryError) as error:
            reason = str(error) or "there is not enough memory for this prompt"
            self.link.send(messages.Loaded(id=request.id, prompt=None, error=reason))
            return
        self.names.install_prompt()
        self.link.send(messages.Loaded(id=request.id, prompt=info))

    def _read_prompt(self, request: messages.ReadPrompt) -> None:
        for piece in self.prompt.pieces():
            self.link.send(messages.PromptChunk(id=request.id, data=piece))
        self.link.send(messages.PromptChunk(id=request.id, data=b"", last=True))

    def _complete(self, request: messages.Complete) -> None:
        at = request.cursor_pos
        reply = messages.Completions(id=request.id, matches=[], cursor_start=at, cursor_end=at)
        with self._assisting():
            reply = assist.complete(self.shell, request)
        self.link.send(reply)

    def _inspect(self, request: messages.Inspect) -> None:
        reply = messages.Inspection(id=request.id, found=False)
        with self._assisting():
            reply = assist.inspect(self.shell, request)
        self.link.send(reply)

    def _is_complete(self, request: messages.IsComplete) -> None:
        reply = messages.Completeness(id=request.id, status="unknown")
        with self._assisting():
            reply = assist.is_complete(self.shell, request)
        self.link.send(reply)

    @contextmanager
    def _assisting(self) -> Iterator[None]:
        """Help with typing runs properties and ``__dir__`` of the user's, and must not fail."""
        with suppress(Exception, KeyboardInterrupt), self._user_code():
            yield

    def _variables(self, request: messages.Variables) -> None:
        self.link.send(messages.VariableList(id=request.id, variables=self.tracker.all()))

    def _ping(self, request: messages.Ping) -> None:
        self.link.send(messages.Pong(id=request.id))

    def _show_vars(self) -> dict[str, str]:
        """The variables of the REPL: name, and type with size."""
        shown = {}
        for variable in self.tracker.all():
            size = "" if variable.size is None else f" ({variable.size:,})"
            shown[variable.name] = variable.type + size
        return shown

    # --- comms --------------------------------------------------------------------------------

    def _comm(self, message: messages.CommToWorker) -> None:
        """Between cells, with interrupts on."""
        with self._showing_for(message):
            try:
                with self._user_code():
                    self.comms.receive(message)
            except BaseException as raised:
                self.shell.showtraceback((type(raised), raised, raised.__traceback__))
            finally:
                self.streams.restore()

    @contextmanager
    def _showing_for(self, message: messages.CommToWorker) -> Iterator[None]:
        """What is shown meanwhile belongs to *message* and to no cell; at the end say so.

        Widgets that capture output, as `Output` and ``interact`` do, name the request whose
        output is theirs: it has to come under the request that they see, and before its end.
        """
        outlet = self.outlet
        self.streams.flush()
        cell, left, dropped = outlet.cell, outlet.left, outlet.dropped
        parent = self.kernel.get_parent()
        outlet.begin(message.id, 10_000_000)
        self.kernel.set_parent(message.parent)
        try:
            yield
        finally:
            self.streams.flush()
            outlet.cell, outlet.left, outlet.dropped = cell, left, dropped
            self.kernel.set_parent(parent)
            if message.id:
                self.link.send(messages.CommDone(id=message.id))

    def _comms_while_awaiting(self) -> None:
        """In the event loop of a cell that awaits: widgets answer meanwhile."""
        later: list[Command] = []
        while self.link.commands:
            command = self.link.commands.popleft()
            if isinstance(command.message, messages.CommToWorker):
                self._comm_in_cell(command.message)
            else:
                later.append(command)
        self.link.commands.extendleft(reversed(later))

    def _comm_in_cell(self, message: messages.CommToWorker) -> None:
        with self._showing_for(message):
            try:
                self.comms.receive(message)
            except Exception as raised:
                self.shell.showtraceback((type(raised), raised, raised.__traceback__))

    # --- forks --------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """In a process that user code forked: it has no link, and its output goes to the pipes."""
        self.link.forget()
        self.interrupts.forget_parent()
        for name, fd in (("stdout", 1), ("stderr", 2)):
            with suppress(OSError):
                stream = os.fdopen(fd, "w", buffering=1, closefd=False, errors="backslashreplace")
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
