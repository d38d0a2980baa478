"""Who waits for what on the link, and in which thread or event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from rlm_kernel.repl import messages

__all__ = ["Accept", "Reply", "Request", "Waiter"]

Reply = (
    messages.SubcallResults
    | messages.InputReply
    | messages.BudgetLeft
    | messages.RunReply
    | messages.Failed
)
"""What answers a request of the worker's; anything else from the kernel is a command."""

Request = (
    messages.SendSubcalls
    | messages.GetInput
    | messages.GetBudget
    | messages.StartRun
    | messages.RunCommand
)
"""What the worker asks of the kernel, and waits for."""

Accept = Callable[[Reply], bool]
"""Takes a reply and says whether the request is complete."""


class Waiter:
    """Somebody who waits for a reply, and runs the tools that come before it."""

    __slots__ = (
        "aborted",
        "accept",
        "bell",
        "calls",
        "done",
        "id",
        "main",
        "notify",
        "open",
        "thread",
    )

    def __init__(self, number: int, accept: Accept | None, *, main: bool = False) -> None:
        self.id = number
        self.accept = accept
        self.main = main
        self.thread = threading.get_ident()
        self.done = False
        self.aborted = False
        self.bell: SimpleQueue[None] = SimpleQueue()
        self.notify: Callable[[], None] | None = None
        self.calls: deque[messages.CallTool] = deque()
        self.open = True
        """Whether it is still there: its reply may come later."""

    def wake(self) -> None:
        if self.notify is None:
            self.bell.put(None)
        else:
            self.notify()
