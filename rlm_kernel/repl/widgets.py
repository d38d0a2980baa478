"""Messages of a front end to the widgets of a REPL, until their handlers are through."""

from __future__ import annotations

import asyncio

from rlm_kernel.errors import WorkerDied
from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.messages import CommDone, CommToWorker

__all__ = ["WidgetMessages"]


class WidgetMessages:
    """Those that a handler is at, or will be."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[CommDone]] = {}

    def oldest(self) -> tuple[int, asyncio.Future[CommDone]] | None:
        """Id and end of the one that a handler is at; ``None`` where there is none."""
        return next(iter(self._open.items()), None)

    def send(self, worker: Worker, message: CommToWorker) -> asyncio.Future[CommDone]:
        """Send *message*; the future has `WorkerDied` where *worker* ends before its handler.

        Raises
        ------
        UsageError
            It is too large for the link.
        """
        handled = worker.request(message.id, message, CommDone)
        self._open[message.id] = handled
        handled.add_done_callback(lambda _: self._forget(message.id))
        return handled

    @staticmethod
    def to_nobody() -> asyncio.Future[CommDone]:
        """What becomes of a message where there is no worker."""
        nothing: asyncio.Future[CommDone] = asyncio.get_running_loop().create_future()
        nothing.set_exception(WorkerDied("There is no worker, and so no widget."))
        nothing.exception()  # nobody may be waiting, and that is no error
        return nothing

    def _forget(self, number: int) -> None:
        handled = self._open.pop(number)
        if not handled.cancelled():
            handled.exception()  # nobody may be waiting, and that is no error
