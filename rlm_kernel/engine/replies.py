"""Reading the reply of a root: it is shown as it comes, and cut where its cell ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.fences import FenceReader
from rlm_kernel.engine.proposals import Cell, cell_of
from rlm_kernel.engine.root_protocol import RootStream
from rlm_kernel.engine.stopping import StopSignal, abandon
from rlm_kernel.errors import RootError
from rlm_kernel.text import replace_surrogates

__all__ = ["Reply", "StreamLog", "read_reply"]

INTERVAL = 1 / 30
"""Seconds between two events of one stream, at least."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a root said."""

    text: str
    prose: str
    """Without thoughts and cell."""

    cell: Cell | None
    usage: Usage
    finish: str


class StreamLog:
    """Joins the deltas of a stream, so that they are told of at most 30 times a second.

    *tell* is called with the offset and the text; all its calls together give
    the whole text, without gaps.
    """

    def __init__(
        self,
        tell: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._pending: list[str] = []
        self._offset = 0
        self._last = float("-inf")

    def add(self, text: str) -> None:
        """Tell of *text*, now or soon; see `due`."""
        if text:
            self._pending.append(text)
        if self.due() == 0:
            self.flush()

    def due(self) -> float | None:
        """Seconds until `flush` has to be called; ``None`` where nothing waits."""
        if not self._pending:
            return None
        return max(0.0, self._last + INTERVAL - self._clock())

    def flush(self) -> None:
        """Tell of what waits."""
        text, self._pending = "".join(self._pending), []
        if text:
            self._last = self._clock()
            self._tell(self._offset, text)
            self._offset += len(text)


async def read_reply(
    stream: RootStream,
    words: frozenset[str],
    *,
    signal: StopSignal,
    log: StreamLog,
    max_chars: int | None = None,
) -> Reply:
    """Read *stream* up to the end of its first code fence, or to its end.

    The stream is closed in any case, and its usage holds then.

    Parameters
    ----------
    words
        Info words of code fences; none reads the whole reply.
    max_chars
        Cut the reply there; finish is ``length`` then.

    Raises
    ------
    RootError
        The root failed before its cell was complete.
    """
    reader = FenceReader(words)
    text: list[str] = []
    finish = ""
    try:
        finish = await _read(stream, reader, text, signal, log, max_chars)
    except RootError:
        # The connection may have gone after the cell was there but for its last newline.
        if reader.finish(closed=True) is None:
            raise
        finish = "cut"
    finally:
        log.flush()
        await stream.aclose()
    finish = finish or stream.finish
    # What was cut in the middle of a cell is no cell: half of it must not run.
    reader.finish(closed=finish == "length")
    whole = "".join(text)
    return Reply(whole, reader.prose, cell_of(reader, whole), stream.usage, finish)


async def _read(
    stream: RootStream,
    reader: FenceReader,
    text: list[str],
    signal: StopSignal,
    log: StreamLog,
    max_chars: int | None,
) -> str:
    """Why reading ended, where it was not the stream that ended."""
    length = 0
    while (delta := await _next(stream, signal, log)) is not None:
        fence = reader.feed(delta)
        if fence is not None:
            # A root that goes on would make up the output of its own cell.
            delta = delta[: max(fence.end - length, 0)]
        text.append(delta)
        log.add(delta)
        length += len(delta)
        if fence is not None:
            return "fence"
        if max_chars is not None and length >= max_chars:
            return "length"
    return ""


async def _next(stream: RootStream, signal: StopSignal, log: StreamLog) -> str | None:
    """The next delta, while the log is flushed when it is due; ``None`` at the end."""
    task = asyncio.ensure_future(_delta(stream))
    try:
        while not await signal.until(task, log.due()):
            log.flush()
        return task.result()
    finally:
        await abandon(task)


async def _delta(stream: RootStream) -> str | None:
    try:
        return replace_surrogates(await anext(stream))
    except StopAsyncIteration:
        return None
