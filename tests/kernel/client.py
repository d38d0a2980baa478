"""A client of a real kernel process: what a front end would see of each cell."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

Message = dict[str, Any]
TIMEOUT_S = 60.0


@dataclass
class Cell:
    """All messages that belong to one execute request."""

    reply: Message
    messages: list[Message] = field(default_factory=list)

    def of(self, kind: str) -> list[Message]:
        """Contents of the messages of type *kind*, in order."""
        return [m["content"] for m in self.messages if m["msg_type"] == kind]

    def text(self, name: str = "stdout") -> str:
        """What was written to the stream *name*."""
        return "".join(c["text"] for c in self.of("stream") if c["name"] == name)

    @property
    def result(self) -> str:
        """``text/plain`` of the trailing expression."""
        return "".join(c["data"]["text/plain"] for c in self.of("execute_result"))

    @property
    def status(self) -> str:
        return str(self.reply["content"]["status"])

    @property
    def ename(self) -> str:
        return str(self.reply["content"].get("ename", ""))

    @property
    def evalue(self) -> str:
        return str(self.reply["content"].get("evalue", ""))


class Kernel:
    """A running kernel and its client. A context manager; leaves no process."""

    def __init__(self, env: dict[str, str] | None = None, cwd: str | None = None) -> None:
        self.manager = KernelManager(kernel_name="rlm")
        self.manager._kernel_spec = KernelSpec(
            argv=[sys.executable, "-P", "-m", "rlm_kernel", "-f", "{connection_file}"],
            display_name="RLM (Python)",
            language="python",
            interrupt_mode="message",
        )
        environ = {**os.environ, **(env or {})}
        self.manager.start_kernel(env=environ, cwd=cwd)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def send(self, code: str, cell_id: str = "", **kwargs: Any) -> str:
        """Send an execute request, with *cell_id* as JupyterLab does it; returns its id."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
            **kwargs,
        }
        metadata = {"cellId": cell_id} if cell_id else {}
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def collect(self, request: str, timeout: float = TIMEOUT_S) -> Cell:
        """Wait until *request* is done. Messages of other requests are dropped."""
        messages: list[Message] = []
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != request:
                continue
            messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        return Cell(self.reply(request, timeout), messages)

    def reply(self, request: str, timeout: float = TIMEOUT_S) -> Message:
        """The shell reply to *request*."""
        while True:
            reply: Message = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == request:
                return reply

    def run(self, code: str, timeout: float = TIMEOUT_S, **kwargs: Any) -> Cell:
        """Run a cell to its end."""
        return self.collect(self.send(code, **kwargs), timeout)

    def until(self, request: str, kind: str, timeout: float = TIMEOUT_S) -> Message:
        """The first iopub message of type *kind* that belongs to *request*."""
        deadline = time.monotonic() + timeout
        while True:
            message: Message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["msg_type"] == kind and message["parent_header"].get("msg_id") == request:
                return message

    def until_text(self, request: str, text: str, timeout: float = TIMEOUT_S) -> None:
        """Wait until *request* has shown *text* in an output."""
        deadline = time.monotonic() + timeout
        while True:
            message: Message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            own = message["parent_header"].get("msg_id") == request
            if own and message["msg_type"] != "execute_input" and text in str(message["content"]):
                return

    def interrupt(self) -> None:
        """Interrupt as front ends do it, and wait for the reply: what is sent next comes later."""
        request = self.client.session.msg("interrupt_request", {})
        self.client.control_channel.send(request)
        while True:
            reply = self.client.get_control_msg(timeout=TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                return

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
