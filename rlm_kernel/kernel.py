"""The Jupyter kernel: the Jupyter protocol on one side, a session with its REPL on the other.

Everything that evaluates code is in the worker process; this process only
relays. ``do_execute`` awaits the worker, so the event loop is never blocked:
comm messages, interrupts and the views work while a cell runs.
"""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

import zmq.asyncio
from ipykernel._version import kernel_protocol_version
from ipykernel.kernelbase import Kernel

import rlm_kernel
from rlm_kernel.cells import CellResult, Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.driver.protocol import TARGET
from rlm_kernel.errors import RLMError
from rlm_kernel.repl import Executed
from rlm_kernel.repl.messages import CommDone, CommFromWorker, CommToWorker
from rlm_kernel.session.cell_view import CellView
from rlm_kernel.session.notebook import NotebookSession

__all__ = ["RLMKernel"]

Message = dict[str, Any]

_PARENTS_KEPT = 200
"""Cells whose late output (of background tasks) still finds its request."""

_concurrent: ContextVar[bool] = ContextVar("concurrent", default=False)
"""Whether the message that is being handled came while a cell ran."""


class RLMKernel(Kernel):
    """A Python kernel whose REPL lives in a process of its own."""

    implementation = "rlm"
    implementation_version = rlm_kernel.__version__
    banner = f"RLM (Python) {rlm_kernel.__version__}: %prompt FILE loads P, %%rlm starts a run"
    help_links = ()
    execution_count: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._count = 1
        self._history: list[str] = []
        self._parents: OrderedDict[int, Message] = OrderedDict()
        self._views: dict[int, CellView] = {}
        """Of the cells that are not over."""
        self._request: Message = {}
        self._idents: list[bytes] = []
        self._comms: dict[str, str] = {}
        self._driver_comms: set[str] = set()
        self._session_ready: asyncio.Future[NotebookSession] | None = None
        self._ending = False
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.shell_handlers[kind] = getattr(self, kind)

    # --- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; the worker is on its way since before this process read its modules."""
        super().start()
        loop = self.io_loop.asyncio_loop
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        self._session_ready = loop.create_task(self._open_session())

    async def _open_session(self) -> NotebookSession:
        # Not waiting for the worker: where it does not come up, the first cell says why.
        return NotebookSession(self.parent.repl, front_end=self)

    async def _session(self) -> NotebookSession:
        assert self._session_ready is not None
        return await asyncio.shield(self._session_ready)

    def pre_handler_hook(self) -> None:
        """Leave SIGINT alone: it interrupts the worker, never this process."""

    def post_handler_hook(self) -> None:
        """See `pre_handler_hook`."""

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the runs and the REPL; no process is left."""
        loop = self.io_loop.asyncio_loop
        # This runs on the control thread; the session belongs to the main loop.
        closing = asyncio.run_coroutine_threadsafe(self._close(), loop)
        await asyncio.wrap_future(closing)
        return {"status": "ok", "restart": restart}

    async def _close(self) -> None:
        if not self._ending:
            self._ending = True
            try:
                await (await self._session()).close()
            except Exception:  # the kernel ends in any case, and with it all that is below
                self.log.exception("the session could not be closed")

    async def interrupt_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Interrupt the running cell. Comes on the control thread, also while a cell runs."""
        self.io_loop.add_callback(self._interrupt)
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    def _interrupt(self) -> None:
        if self._session_ready is not None and self._session_ready.done():
            self._session_ready.result().interrupt()

    # --- execution ------------------------------------------------------------------------

    @property
    def kernel_info(self) -> dict[str, Any]:
        """What a front end is told of this kernel; the key ``rlm`` says that it is one."""
        # Not the base class's: that imports the debugger to see whether there is one.
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": self.help_links,
            "supported_features": [],
            "rlm": {"version": rlm_kernel.__version__, "driver": TARGET},
        }

    @property
    def language_info(self) -> dict[str, Any]:
        """Python, as the worker's."""
        import platform

        return {
            "name": "python",
            "version": platform.python_version(),
            "mimetype": "text/x-python",
            "codemirror_mode": {"name": "ipython", "version": 3},
            "pygments_lexer": "ipython3",
            "nbconvert_exporter": "python",
            "file_extension": ".py",
        }

    @property  # type: ignore[no-redef]
    def execution_count(self) -> int:
        """Number of the cell that runs or comes next; counted by the worker."""
        return self._count

    @execution_count.setter
    def execution_count(self, value: int) -> None:
        # The base class counts requests; the number in the prompt is the worker's.
        pass

    async def execute_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Run a cell; keeps what its output and its ``input()`` must be addressed to."""
        self._request, self._idents = parent, ident
        await super().execute_request(stream, ident, parent)

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Message | None = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Run a cell in the worker and answer with how it went."""
        request = self._request
        view = CellView(lambda output: self._publish(output, request))
        if store_history and not silent:
            self._history.append(code)
        try:
            session = await self._session()
            executed = await session.execute_request(
                code,
                silent=silent,
                store_history=store_history,
                user_expressions=user_expressions or {},
                allow_stdin=allow_stdin,
                header=request["header"],
                cell_id=cell_id or "",
                on_start=lambda cell: self._cell_begins(session, cell, request, view),
                publish=view.output,
            )
        except Exception as error:  # without a reply the front end would wait for ever
            executed = self._not_executed(error, request)
        finally:
            self._cell_over(view)
        return self._reply(executed, store_history and not silent)

    def _not_executed(self, error: Exception, request: Message) -> Executed:
        if not isinstance(error, RLMError):
            self.log.error("a cell could not be executed", exc_info=error)
        shown = ErrorOutput(type(error).__name__, str(error), [f"{type(error).__name__}: {error}"])
        self._publish(shown, request)
        result = CellResult(ok=False, execution_count=self._count, error=shown)
        return Executed(cell=0, result=result)

    def _reply(self, executed: Executed, counts: bool) -> dict[str, Any]:
        result = executed.result
        if counts:
            self._count = result.execution_count + 1
        reply: dict[str, Any] = {
            "status": "ok" if result.ok else "error",
            "execution_count": result.execution_count,
            "user_expressions": executed.user_expressions,
            "payload": executed.payload,
        }
        if not result.ok:
            error = result.error or ErrorOutput("Error", "the cell failed", [])
            reply |= {
                "ename": error.ename,
                "evalue": error.evalue,
                "traceback": error.traceback,
            }
        return reply

    def _cell_begins(
        self, session: NotebookSession, cell: int, request: Message, view: CellView
    ) -> None:
        self._remember(cell, request)
        self._views[cell] = view
        # Who sends no cell ids, such as a console, prints an update below what it updates.
        if (request.get("metadata") or {}).get("cellId"):
            session.progress.watch(cell, view)

    def _cell_over(self, view: CellView) -> None:
        """Leave no progress behind: after the idle that follows, a page takes no updates."""
        assert self._session_ready is not None
        for cell in [cell for cell, own in self._views.items() if own is view]:
            del self._views[cell]
            self._session_ready.result().progress.unwatch(cell)

    def _remember(self, cell: int, request: Message) -> None:
        self._parents[cell] = request
        while len(self._parents) > _PARENTS_KEPT:
            self._parents.popitem(last=False)

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Completions of the worker's namespace; none while a cell runs."""
        repl = (await self._session()).repl
        found = await repl.complete(code, cursor_pos)
        return {
            "status": "ok",
            "matches": found.matches,
            "cursor_start": found.cursor_start,
            "cursor_end": found.cursor_end,
            "metadata": found.metadata,
        }

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """Documentation of the object under the cursor."""
        repl = (await self._session()).repl
        found = await repl.inspect(code, cursor_pos, detail_level)
        return {"status": "ok", "found": found.found, "data": found.data, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Whether *code* is ready to run."""
        repl = (await self._session()).repl
        found = await repl.is_complete(code)
        reply: dict[str, Any] = {"status": found.status}
        if found.status == "incomplete":
            reply["indent"] = found.indent
        return reply

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        n: int | None = None,
        pattern: str | None = None,
        unique: bool = False,
    ) -> dict[str, Any]:
        """Cells of this session, as ``(session, line, source)``."""
        from fnmatch import fnmatch

        lines = [(0, number, code) for number, code in enumerate(self._history, 1)]
        if hist_access_type == "range":
            lines = lines[max((start or 1) - 1, 0) : None if stop is None else stop - 1]
        elif hist_access_type == "search":
            lines = [line for line in lines if fnmatch(line[2], pattern or "*")]
        if unique:
            lines = list({line[2]: line for line in lines}.values())
        if n is not None and hist_access_type != "range":
            lines = lines[-n:] if n else []
        if output:
            return {
                "status": "ok",
                "history": [(at, line, (code, None)) for at, line, code in lines],
            }
        return {"status": "ok", "history": lines}

    # --- what the session asks of the front end --------------------------------------------

    def _publish(self, output: Output, request: Message) -> None:
        kind, content = _as_message(output)
        self.session.send(self.iopub_socket, kind, content, parent=request, ident=self._topic(kind))

    def output(self, cell: int, output: Output) -> None:
        """Show *output* in the cell that the worker knows as *cell*."""
        if cell in self._views:
            self._views[cell].output(output)
        else:
            self._publish(output, self._parents.get(cell, self._request))

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        """Ask the person at the front end. ``None`` where they send end of file."""
        request = self._parents.get(cell, self._request)
        socket = self.stdin_socket
        while await socket_ready(socket, 0):  # answers to questions that were given up
            socket.recv_multipart(zmq.NOBLOCK)
        if cell in self._views:
            self._views[cell].touched()
        content = {"prompt": prompt, "password": password}
        self.session.send(socket, "input_request", content, request, ident=self._idents)
        while True:
            await socket_ready(socket, None)
            _, reply = self.session.recv(socket, zmq.NOBLOCK)
            if reply is not None:
                value = str(reply["content"].get("value", ""))
                return None if value == "\x04" else value

    # --- comms ----------------------------------------------------------------------------

    def comm(self, message: CommFromWorker) -> None:
        """Pass a widget's message on to the front end."""
        content: Message = {"comm_id": message.comm_id, "data": message.data or {}}
        if message.kind == "comm_open":
            self._comms[message.comm_id] = message.target_name
            content["target_name"] = message.target_name
            content["target_module"] = message.target_module
        elif message.kind == "comm_close":
            self._comms.pop(message.comm_id, None)
        self._send_comm(
            message.kind,
            content,
            self._parents.get(message.cell, self._request),
            message.metadata,
            message.buffers,
        )

    def _send_comm(
        self,
        kind: str,
        content: Message,
        parent: Message | None = None,
        metadata: Message | None = None,
        buffers: list[bytes] | None = None,
    ) -> None:
        self.session.send(
            self.iopub_socket,
            kind,
            content,
            parent=parent,
            ident=f"comm-{content['comm_id']}".encode(),
            metadata=metadata or {},
            buffers=buffers or None,
        )

    async def comm_open(self, stream: Any, ident: Any, message: Message) -> None:
        """A front end opens a comm: the driver's is ours, all others are the worker's."""
        content = message["content"]
        comm_id, target = content["comm_id"], content.get("target_name", "")
        self._comms[comm_id] = target
        if target != TARGET:
            await self._to_worker(message)
            return
        self._driver_comms.add(comm_id)

        def send(data: Message) -> None:
            self._send_comm("comm_msg", {"comm_id": comm_id, "data": data}, message)

        (await self._session()).hub.connect(comm_id, send, content.get("data") or {})

    async def comm_msg(self, stream: Any, ident: Any, message: Message) -> None:
        """A message of a front end on an open comm."""
        content = message["content"]
        if content["comm_id"] in self._driver_comms:
            hub = (await self._session()).hub
            hub.message(content["comm_id"], content.get("data") or {})
        else:
            await self._to_worker(message)

    async def comm_close(self, stream: Any, ident: Any, message: Message) -> None:
        """A front end closed a comm."""
        comm_id = message["content"]["comm_id"]
        self._comms.pop(comm_id, None)
        if comm_id in self._driver_comms:
            self._driver_comms.discard(comm_id)
            (await self._session()).hub.disconnect(comm_id)
        else:
            await self._to_worker(message)

    async def dispatch_shell(
        self, msg: Any, /, subshell_id: str | None = None, *, concurrent: bool = False
    ) -> None:
        """Handle a message; *concurrent* is one for a comm while a cell runs."""
        _concurrent.set(concurrent)
        await super().dispatch_shell(msg, subshell_id=subshell_id, concurrent=concurrent)

    async def _to_worker(self, message: Message) -> None:
        """Hand *message* to its widget. Its idle comes when that is through with it.

        Front ends hold back a widget's next changes until then. The base class gives no
        status to a message that comes while a cell runs, and it must not be kept waiting:
        until its handler returns, the cell's messages would be taken for this one's.
        """
        handled = await self._start_comm(message)
        if not _concurrent.get():
            await asyncio.wait([handled])
            return
        self._publish_status("busy", "shell", message)
        handled.add_done_callback(lambda _: self._publish_status("idle", "shell", message))

    async def _start_comm(self, message: Message) -> asyncio.Future[CommDone]:
        content = message["content"]
        handled = (await self._session()).repl.comm(
            CommToWorker(
                kind=message["header"]["msg_type"],
                comm_id=content["comm_id"],
                data=content.get("data"),
                target_name=content.get("target_name", ""),
                metadata=message.get("metadata") or {},
                buffers=[bytes(part) for part in message.get("buffers") or []],
                parent=_plain_header(message["header"]),
            ),
            on_start=lambda number: self._remember(number, message),
        )
        handled.add_done_callback(self._forget_comm)
        return handled

    def _forget_comm(self, handled: asyncio.Future[CommDone]) -> None:
        """Leave the room in ``_parents`` to cells."""
        if not handled.exception():
            self._parents.pop(handled.result().id, None)

    async def comm_info_request(self, stream: Any, ident: Any, parent: Message) -> None:
        """Which comms are open."""
        target = parent["content"].get("target_name")
        comms = {
            comm_id: {"target_name": name}
            for comm_id, name in self._comms.items()
            if target is None or name == target
        }
        content = {"status": "ok", "comms": comms}
        self.session.send(stream, "comm_info_reply", content, parent, ident)


async def socket_ready(socket: zmq.Socket[bytes], timeout_ms: int | None) -> bool:
    """Wait until *socket* can be read; ``None`` waits without limit."""
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    return bool(await poller.poll(-1 if timeout_ms is None else timeout_ms))


def _as_message(output: Output) -> tuple[str, Message]:
    """Jupyter message type and content of *output*."""
    match output:
        case Stream(name, text):
            return "stream", {"name": name, "text": text}
        case Display(data, metadata, display_id, update):
            transient = {} if display_id is None else {"display_id": display_id}
            shown: Message = {"data": data, "metadata": metadata, "transient": transient}
            return ("update_display_data" if update else "display_data"), shown
        case Result(count, data, metadata):
            value: Message = {"execution_count": count, "data": data, "metadata": metadata}
            return "execute_result", value
        case ErrorOutput(ename, evalue, traceback):
            return "error", {"ename": ename, "evalue": evalue, "traceback": traceback}
        case Clear(wait):
            return "clear_output", {"wait": wait}


def _plain_header(header: Message) -> Message:
    """*header* with its date as text: it crosses the link as msgpack."""
    return {name: value if isinstance(value, str) else str(value) for name, value in header.items()}
