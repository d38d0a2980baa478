"""One execute request of the headless host, from being sent to the end of its output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlm_kernel.driver.outputs import CellOutputs
from rlm_kernel.driver.progress_bar import Tally, is_bar, tally_in

__all__ = ["Execution"]

_IDLE_GRACE_S = 5.0
"""Seconds between an execute reply and the end of its output, whichever is first."""


class Execution:
    """An execute request under way.

    Parameters
    ----------
    outputs
        Get what the cell shows, late output of its background tasks too.
    on_progress
        Is told how far its sub-calls are, and ``None`` when there is nothing to tell any more.
    """

    def __init__(self, outputs: CellOutputs, on_progress: Callable[[Tally | None], None]) -> None:
        self.outputs = outputs
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._on_progress = on_progress
        self._in_progress = False

    def on_reply(self, content: dict[str, Any]) -> None:
        """The execute reply came."""
        if not self.reply.done():
            self.reply.set_result(content)

    def on_iopub(self, kind: str, content: dict[str, Any]) -> None:
        """A message that belongs to this request came on iopub."""
        if kind == "status":
            if content.get("execution_state") == "idle":
                self._idle.set()
                self._progress(None)
            return
        metadata = content.get("metadata") or {}
        if kind in ("display_data", "update_display_data") and is_bar(metadata):
            # No output of the cell: it is for whoever looks on, and gone when the cell is over.
            self._progress(tally_in(metadata))
            return
        if kind == "clear_output":
            self._progress(None)
        self.outputs.message(kind, content)

    async def over(self) -> None:
        """Wait for the reply and the end of the output."""
        idle = asyncio.create_task(self._idle.wait())
        both: list[asyncio.Future[Any]] = [self.reply, idle]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # They come on two sockets, either may be first, and a kernel in trouble may send only
            # one of them (ipykernel's thread for the shell channel keeps a reply back at times).
            await asyncio.wait(both, timeout=_IDLE_GRACE_S)
        finally:
            idle.cancel()
        self.on_reply({"status": "ok" if self.outputs.error is None else "error"})

    def _progress(self, tally: Tally | None) -> None:
        if tally is not None or self._in_progress:
            self._in_progress = tally is not None
            self._on_progress(tally)
