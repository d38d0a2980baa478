"""The prompt on its way up, no faster than it is taken."""

from __future__ import annotations

import asyncio
from collections import deque

from rlm_kernel.errors import WorkerDied
from rlm_kernel.repl.link import Link

__all__ = ["PromptReader"]

_HELD = 8 << 20
"""Bytes that wait to be taken before the link is paused."""


class PromptReader:
    """Chunks of one `ReadPrompt`. The link is paused while more than `_HELD` bytes wait."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._complete = False
        self._abandoned = False
        self._error: WorkerDied | None = None
        self._changed = asyncio.Event()

    def put(self, data: bytes, *, last: bool) -> None:
        """A chunk came."""
        self._complete = last
        if data and not self._abandoned:
            self._chunks.append(data)
            self._held += len(data)
            if self._held > _HELD:
                self._link.pause(self._name)
        self._changed.set()

    def fail(self, error: WorkerDied) -> None:
        """No chunk comes any more."""
        self._error = error
        self._changed.set()

    async def take(self) -> bytes:
        """Return the next chunk, empty at the end.

        Raises
        ------
        WorkerDied
            The worker ended before the last chunk.
        """
        while not self._chunks:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        chunk = self._chunks.popleft()
        self._held -= len(chunk)
        if self._held <= _HELD // 2:
            self._link.resume(self._name)
        return chunk

    def abandon(self) -> None:
        """Drop what still comes: nobody takes it."""
        self._abandoned = True
        self._chunks.clear()
        self._link.resume(self._name)
