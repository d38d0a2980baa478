"""A small synchronous kernel side for one worker process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.repl import messages
from rlm_kernel.repl.interrupt import GRACE_S
from rlm_kernel.repl.messages import FromWorker, ToWorker

DEADLINE = 30.0

Answerer = Callable[[FromWorker], ToWorker | None]


class WorkerGone(Exception):
    """The worker closed the link."""


class Cell:
    """Everything that came of one Execute."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.requests: list[FromWorker] = []
        self.done: messages.Done | None = None

    def text(self, name: str = "stdout") -> str:
        return "".join(o.text for o in self.outputs if isinstance(o, Stream) and o.name == name)

    @property
    def out(self) -> str:
        return self.text("stdout")

    @property
    def err(self) -> str:
        return self.text("stderr")

    @property
    def result(self) -> str | None:
        for output in self.outputs:
            if isinstance(output, Result):
                return str(output.data["text/plain"])
        return None

    @property
    def displays(self) -> list[Display]:
        return [o for o in self.outputs if isinstance(o, Display)]

    @property
    def errors(self) -> list[ErrorOutput]:
        return [o for o in self.outputs if isinstance(o, ErrorOutput)]

    @property
    def clears(self) -> list[Clear]:
        return [o for o in self.outputs if isinstance(o, Clear)]

    @property
    def finished(self) -> messages.Done:
        assert self.done is not None
        return self.done


class WorkerDriver:
    """Spawns a worker and speaks to it."""

    def __init__(self, cwd: str | None = None, environ: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.sock = ours
        self.out_fd, out = os.pipe()
        self.err_fd, err = os.pipe()
        environ = dict(environ or os.environ)
        environ.pop("MPLBACKEND", None)

        def place_link() -> None:
            os.setsid()
            os.dup2(theirs.fileno(), 3)

        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlm_kernel.repl.worker", "3"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(3,),
            preexec_fn=place_link,  # noqa: PLW1509 - no threads here
            cwd=cwd,
            env=environ,
        )
        theirs.close()
        os.close(out)
        os.close(err)
        self._in = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._ids = iter(range(1, 1 << 40))
        self.loose: list[FromWorker] = []
        hello = self.receive()
        assert isinstance(hello, messages.Hello)
        self.hello = hello

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for fd in (self.out_fd, self.err_fd):
            os.close(fd)

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message: ToWorker, fd: int | None = None) -> None:
        frame = self._encoder.encode(message)
        frame = len(frame).to_bytes(4, "little") + frame
        if fd is None:
            self.sock.sendall(frame)
            return
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
        sent = self.sock.sendmsg([frame], [rights])
        self.sock.sendall(frame[sent:])

    def receive(self, timeout: float = DEADLINE) -> FromWorker:
        end = time.monotonic() + timeout
        while True:
            if len(self._in) >= 4:
                size = 4 + int.from_bytes(self._in[:4], "little")
                assert size - 4 <= messages.MAX_FRAME
                if len(self._in) >= size:
                    frame = bytes(self._in[4:size])
                    del self._in[:size]
                    return self._decoder.decode(frame)
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.sock], [], [], left)[0]:
                raise TimeoutError(f"nothing from the worker for {timeout} s; {self.raw(2)!r}")
            data = self.sock.recv(1 << 20)
            if not data:
                raise WorkerGone(self.raw(2))
            self._in += data

    def wait_for(self, kind: type[Any], timeout: float = DEADLINE) -> Any:
        """The next message of *kind*; others are kept in ``loose``."""
        while True:
            message = self.receive(timeout)
            if isinstance(message, kind):
                return message
            self.loose.append(message)

    def start(self, code: str, **options: Any) -> int:
        number = self.next_id()
        self.send(messages.Execute(id=number, code=code, **options))
        return number

    def finish(
        self,
        number: int,
        *,
        answer: Answerer | None = None,
        timeout: float = DEADLINE,
        seen: Callable[[FromWorker], None] | None = None,
        nudge: Callable[[], None] | None = None,
    ) -> Cell:
        """Collect the outputs of cell *number* until it is done.

        *nudge* is called once, where the worker has been silent for as long as the kernel waits
        before it interrupts again.
        """
        cell = Cell()
        while cell.done is None:
            try:
                message = self.receive(timeout if nudge is None else GRACE_S)
            except TimeoutError:
                if nudge is None:
                    raise
                nudge()
                nudge = None
                continue
            if seen is not None:
                seen(message)
            if isinstance(message, messages.Emit):
                cell.outputs.append(message.output)
            elif isinstance(message, messages.Done) and message.id == number:
                cell.done = message
            else:
                cell.requests.append(message)
                reply = None if answer is None else answer(message)
                if reply is not None:
                    self.send(reply)
        return cell

    def run(
        self,
        code: str,
        *,
        answer: Answerer | None = None,
        timeout: float = DEADLINE,
        **options: Any,
    ) -> Cell:
        return self.finish(self.start(code, **options), answer=answer, timeout=timeout)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def load(self, data: bytes, kind: str = "str", source: str = "") -> messages.Loaded:
        fd = os.memfd_create("prompt")
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            message = messages.LoadPrompt(id=self.next_id(), kind=kind, source=source)
            self.send(message, fd)
        finally:
            os.close(fd)
        loaded = self.wait_for(messages.Loaded)
        assert isinstance(loaded, messages.Loaded)
        return loaded

    def begin(self, history: list[dict[str, str]] | None = None) -> messages.Ready:
        self.send(messages.Begin(id=self.next_id(), run_id="r1", history=history or []))
        ready = self.wait_for(messages.Ready)
        assert isinstance(ready, messages.Ready)
        return ready

    def raw(self, fd: int) -> str:
        """What was written to file descriptor 1 or 2 of the worker so far."""
        pipe = self.out_fd if fd == 1 else self.err_fd
        got = b""
        while select.select([pipe], [], [], 0)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            got += data
        return got.decode("utf-8", "replace")

    def raw_until(self, fd: int, text: str) -> str:
        """As `raw`, once *text* came."""
        pipe = self.out_fd if fd == 1 else self.err_fd
        end, got = time.monotonic() + DEADLINE, ""
        while text not in got and select.select([pipe], [], [], end - time.monotonic())[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            got += data.decode("utf-8", "replace")
        assert text in got
        return got


def echo(message: FromWorker) -> ToWorker | None:
    """Answer every sub-call with its prompt in upper case; a prompt "fail" fails."""
    if not isinstance(message, messages.SendSubcalls):
        return None
    results = [
        messages.SubcallResult(index=index, error=messages.SubcallFailure(reason="it was asked to"))
        if prompt == "fail"
        else messages.SubcallResult(index=index, text=prompt.upper())
        for index, prompt in enumerate(message.prompts)
    ]
    return messages.SubcallResults(id=message.id, results=results)
