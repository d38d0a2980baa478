"""What a worker and its children write to file descriptors 1 and 2."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import Callable

__all__ = ["PipeReader"]

_READ = 64 << 10
"""Bytes per read: what a pipe holds, so that one read has all that was written before it."""

_MAX_READS = 16
"""The largest pipe that Linux gives an ordinary user holds 1 MiB."""


class PipeReader:
    """Text from one pipe, decoded as it comes. Owns the descriptor.

    Bytes that are not UTF-8 become U+FFFD; a character cut by the end of a
    read waits for the next.

    Parameters
    ----------
    on_text
        Called on the event loop.
    """

    def __init__(self, fd: int, on_text: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._on_text = on_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Callable[[], None] = lambda: None

    def attach(
        self, loop: asyncio.AbstractEventLoop, before: Callable[[], None] = lambda: None
    ) -> None:
        """Start to read; *before* is called each time that there is something to read.

        It takes in what came over the link first: the worker sends nothing while the pipe holds
        text (`rlm_kernel.repl.worker.streams`), so what is on the link is older.
        """
        self._loop = loop
        self._before = before
        loop.add_reader(self._fd, self._ready)

    def _ready(self) -> None:
        self._before()
        self.drain()

    def drain(self) -> bool:
        """Read once, at most what the pipe can hold: whoever goes on writing waits for a turn.

        Return whether anything came.
        """
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return False
        text = self._decoder.decode(data, final=not data)
        if not data:
            self.close()
        if text:
            self._on_text(text)
        return bool(data)

    def drain_to_end(self) -> None:
        """Read what is left when every writer should be dead. One that is not cannot hold us."""
        for _ in range(_MAX_READS):
            if not self.drain():
                break

    def close(self) -> None:
        """Stop and close the descriptor. A second call does nothing."""
        if self._fd < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)
