"""One worker process as the kernel sees it: its link, its two pipes and what it was asked."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Protocol, TypeVar

from rlm_kernel.errors import LinkError, WorkerDied
from rlm_kernel.repl.link import Link
from rlm_kernel.repl.messages import FromWorker, Hello, ToWorker
from rlm_kernel.repl.output import StreamName
from rlm_kernel.repl.pipes import PipeReader
from rlm_kernel.repl.processes import SupervisorProcess, describe_exit

__all__ = ["Worker", "WorkerOwner"]

_CLOSED_LINK_S = 1.0
"""Seconds between the end of the link and the news that the process ended, which should be none."""

_MAX_EARLY = 2000
"""Characters written before `Hello` that are kept, to say why a worker did not start."""

T = TypeVar("T")


class WorkerOwner(Protocol):
    """Who is told what comes from a worker. Called on the event loop."""

    def on_worker_messages(self, worker: Worker, messages: list[FromWorker]) -> None:
        """Messages that came in one read. `LinkError` raised here ends the worker."""

    def on_worker_text(self, worker: Worker, name: StreamName, text: str) -> None:
        """Text that was written to a file descriptor."""

    def on_worker_end(self, worker: Worker, reason: str) -> None:
        """The worker is gone or given up. Called once, after all that it had sent."""


class Worker:
    """A worker from its order to its end.

    Creating it is synchronous and needs no event loop, as with `SupervisorProcess`.
    """

    def __init__(self, supervisor: SupervisorProcess, argv: Sequence[str], cwd: str) -> None:
        self.pid: int | None = None
        self.ended = False
        self.hello: asyncio.Future[Hello] | None = None
        """Done once the worker is up; `WorkerDied` where it never came up. Set by `attach`."""

        self.used = False
        """Whether it was ever asked for anything; one that was not is not replaced unasked."""

        self.gone = asyncio.Event()
        """Set once the process is dead."""

        self._supervisor = supervisor
        self._owner: WorkerOwner | None = None
        self._early = ""
        self._ending: asyncio.TimerHandle | None = None
        self._diverted: asyncio.Queue[str] | None = None
        self._pending: dict[int, tuple[type, asyncio.Future[object]]] = {}
        ours, theirs = socket.socketpair()
        (out_read, out), (err_read, err) = os.pipe(), os.pipe()
        self.link = Link(ours)
        self._pipes = (
            PipeReader(out_read, lambda text: self._on_text("stdout", text)),
            PipeReader(err_read, lambda text: self._on_text("stderr", text)),
        )
        self.ticket = supervisor.spawn(argv, cwd, (theirs.fileno(), out, err))
        theirs.close()
        os.close(out)
        os.close(err)

    @property
    def is_up(self) -> bool:
        """Whether it said hello and has not ended."""
        return self.hello is not None and self.hello.done() and not self.ended

    def attach(self, loop: asyncio.AbstractEventLoop, owner: WorkerOwner) -> None:
        """Start to listen to it."""
        self._owner = owner
        self.hello = loop.create_future()
        for pipe in self._pipes:
            pipe.attach(loop, before=self.link.catch_up)
        self.link.attach(loop, self)

    # --- requests -----------------------------------------------------------------------------

    def request(
        self, message_id: int, message: ToWorker, reply: type[T], fds: Sequence[int] = ()
    ) -> asyncio.Future[T]:
        """Send *message* and return the future of its reply, `WorkerDied` where none comes.

        Raises
        ------
        UsageError
            The message is too large.
        """
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.used = True
        self.link.send(message, fds)
        if self.ended:
            future.set_exception(WorkerDied("The worker ended before it was asked."))
        else:
            self._pending[message_id] = (reply, future)
        return future  # type: ignore[return-value]  # `settle` checks the type

    def settle(self, message_id: int, reply: object) -> None:
        """Hand *reply* to who waits for it, if anybody still does.

        Raises
        ------
        LinkError
            Nothing of this kind was asked under this id.
        """
        wanted, future = self._pending.pop(message_id, (None, None))
        if future is None or type(reply) is not wanted:
            raise LinkError(
                f"The worker answered {type(reply).__name__} {message_id}, which was not asked."
            )
        if not future.done():
            future.set_result(reply)

    # --- order and text -----------------------------------------------------------------------

    def drain_pipes(self) -> None:
        """Take in what was written to the descriptors before a message that ends a cell."""
        for pipe in self._pipes:
            pipe.drain()

    def divert_stderr(self) -> asyncio.Queue[str]:
        """From now on put text of descriptor 2 into the queue returned, instead of passing it."""
        self._diverted = asyncio.Queue()
        return self._diverted

    def restore_stderr(self) -> None:
        """Pass text of descriptor 2 on again."""
        self._diverted = None

    def _on_text(self, name: StreamName, text: str) -> None:
        if self._diverted is not None and name == "stderr":
            self._diverted.put_nowait(text)
        elif self._owner is None or self.hello is None or not self.hello.done():
            self._early = (self._early + text)[-_MAX_EARLY:]
        else:
            self._owner.on_worker_text(self, name, text)

    # --- what the link reports ----------------------------------------------------------------

    def on_messages(self, messages: list[FromWorker]) -> None:
        assert self._owner is not None
        assert self.hello is not None
        try:
            if not self.hello.done():
                self._take_hello(messages.pop(0))
            self._owner.on_worker_messages(self, messages)
        except LinkError as error:
            self.on_violation(error)

    def _take_hello(self, message: FromWorker) -> None:
        assert self.hello is not None
        if not isinstance(message, Hello):
            raise LinkError(f"The worker sent {type(message).__name__} before it said hello.")
        self.hello.set_result(message)

    def on_violation(self, error: LinkError) -> None:
        # Part of a sentence about the worker: "The worker was stopped: it sent …; it held …"
        what = str(error).removeprefix("The worker ").removesuffix(".")
        self.end(f"was stopped: it {what}")

    def on_end(self) -> None:
        # Its exit status comes through the supervisor, and says more than the end of the link.
        loop = asyncio.get_running_loop()
        self._ending = loop.call_later(_CLOSED_LINK_S, self.end, "closed its link to the kernel")

    # --- end ----------------------------------------------------------------------------------

    def on_exit(self, status: int) -> None:
        """The process is gone. What it had sent before is handled first."""
        self.gone.set()
        if not self.ended:
            self.link.drain()
            for pipe in self._pipes:
                pipe.drain_to_end()
        self.end(describe_exit(status))

    def end(self, reason: str) -> None:
        """Give the worker up, kill it if it lives, and tell the owner. Later calls do nothing."""
        if self.ended:
            return
        self.ended = True
        if self._ending is not None:
            self._ending.cancel()
        self.link.close()
        for pipe in self._pipes:
            pipe.close()
        if self.pid is not None:
            self._supervisor.kill(self.pid)
        self._fail_all(f"The worker {reason}.")
        if self._owner is not None:
            self._owner.on_worker_end(self, reason)

    def _fail_all(self, message: str) -> None:
        if self.hello is not None and not self.hello.done():
            text = " ".join(self._early.split())
            self.hello.set_exception(WorkerDied(f"{message} {text}" if text else message))
            self.hello.exception()  # nobody may be waiting, and that is no error
        pending, self._pending = self._pending, {}
        for _, future in pending.values():
            if not future.done():
                future.set_exception(WorkerDied(message))
                future.exception()
