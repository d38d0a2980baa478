"""What a cell may ask of the kernel: input, the budget, a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from rlm_kernel.errors import RLMError, SubcallError, UsageError
from rlm_kernel.repl import messages
from rlm_kernel.repl.worker.budget import BudgetNow
from rlm_kernel.repl.worker.link import Link, Reply, Request
from rlm_kernel.repl.worker.streams import Outlet, Streams

__all__ = ["Requests", "raise_failure"]

R = TypeVar("R")

_ERRORS: dict[str, type[RLMError]] = {
    "UsageError": UsageError,
    "SubcallError": SubcallError,
    "RLMError": RLMError,
}


def raise_failure(failed: messages.Failed) -> NoReturn:
    """Raise what the kernel refused a request with."""
    if failed.ename == "StdinNotImplemented":
        no_stdin(failed.reason)
    raise _ERRORS[failed.ename](failed.reason)


def no_stdin(reason: str) -> NoReturn:
    """Raise what ``input()`` raises where nobody can be asked."""
    from IPython.core.error import StdinNotImplementedError

    raise StdinNotImplementedError(reason)


class Requests:
    """Requests of the current cell, and the time that it spent waiting for them."""

    def __init__(self, link: Link, outlet: Outlet, streams: Streams) -> None:
        self.link = link
        self.outlet = outlet
        self.streams = streams
        self.allow_stdin = False
        self._under_way: set[object] = set()
        self._since = 0.0
        self._waited = 0.0

    def begin_cell(self, *, allow_stdin: bool) -> None:
        """Start counting anew."""
        self.allow_stdin = allow_stdin
        self._under_way, self._waited = set(), 0.0

    @property
    def waited(self) -> float:
        """Seconds in which at least one request of this cell was unanswered."""
        now = time.perf_counter() - self._since if self._under_way else 0.0
        return self._waited + now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait; waits of several threads and tasks that overlap count once."""
        # No lock: an interrupt could leave it taken. Adding to a set is atomic enough.
        under_way, wait = self._under_way, object()
        if not under_way:
            self._since = time.perf_counter()
        under_way.add(wait)
        try:
            yield
        finally:
            under_way.discard(wait)
            if not under_way and under_way is self._under_way:
                self._waited += time.perf_counter() - self._since

    def one(self, request: Request, kind: type[R]) -> R:
        """The one reply to *request*.

        Raises
        ------
        RLMError
            Of the class that the kernel named, where it refuses.
        """
        got: list[Reply] = []

        def accept(reply: Reply) -> bool:
            got.append(reply)
            return True

        self.streams.flush()
        with self.waiting():
            self.link.ask(request, accept)
        reply = got[0]
        if isinstance(reply, messages.Failed):
            raise_failure(reply)
        if not isinstance(reply, kind):
            raise RLMError(f"the kernel answered {type(request).__name__} with another message")
        return reply

    def input(self, prompt: object = "", /) -> str:
        """``input()``."""
        return self._read(prompt, password=False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        """``getpass.getpass()``."""
        return self._read(prompt, password=True)

    def _read(self, prompt: object, *, password: bool) -> str:
        if not self.allow_stdin:
            no_stdin(
                "input() was called, but nobody can be asked in this cell; "
                "set the value in the code"
            )
        request = messages.GetInput(
            id=self.link.next_id(), cell=self.outlet.cell, prompt=str(prompt), password=password
        )
        reply = self.one(request, messages.InputReply)
        if reply.text is None:
            raise EOFError("the input was closed")
        return reply.text

    def budget(self) -> BudgetNow:
        """What the run has used and set aside, and what is left of its budget."""
        before = self.waited
        request = messages.GetBudget(id=self.link.next_id())
        view = self.one(request, messages.BudgetLeft).budget
        return BudgetNow(view, waited=before)

    def start_run(self, query: str, options: dict[str, str | bool | None]) -> str:
        """Start a run after this cell; what the person is told."""
        request = messages.StartRun(
            id=self.link.next_id(), cell=self.outlet.cell, query=query, options=options
        )
        return self.one(request, messages.RunReply).text

    def run_command(self, command: str, args: list[str]) -> str:
        """Give a command to the run; what the person is told."""
        request = messages.RunCommand(
            id=self.link.next_id(), cell=self.outlet.cell, command=command, args=args
        )
        return self.one(request, messages.RunReply).text
