"""Workers that take calls from a fair queue, so many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rlm_kernel.subcalls.scheduling.batch import Batch, Call
from rlm_kernel.subcalls.scheduling.fair_queue import FairQueue

__all__ = ["Pool"]


class Pool:
    """Runs calls, at most *size* at once.

    A worker lives while it finds calls that may run: as long as one is waiting for nothing but
    a worker there are *size* of them, and an idle pool has none.

    Parameters
    ----------
    size
        Calls under way at once. May be changed: what runs then goes on, and `fill` makes use of
        more.
    run
        Does one call, and never fails. It is cancelled where the call's batch is.
    """

    def __init__(self, size: int, run: Callable[[Call], Awaitable[None]]) -> None:
        self.size = size
        self._run = run
        self._queue: FairQueue[Call] = FairQueue()
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(self, run_id: str, calls: Iterable[Call]) -> None:
        """Queue *calls* behind those of the same run."""
        self._queue.push(run_id, calls)
        self.fill()

    def remove(self, batch: Batch) -> list[Call]:
        """Take the calls of *batch* that no worker has taken yet out of the queue."""
        return self._queue.remove(batch.plan.run_id, lambda call: call.batch is batch)

    async def close(self) -> None:
        """Wait for the workers, whose calls were cancelled before."""
        self._closed = True
        await asyncio.gather(*self._workers, return_exceptions=True)

    def fill(self) -> None:
        """Start the calls for which there is room, where it may have grown."""
        while not self._closed and len(self._workers) < self.size:
            call = self._queue.take()
            if call is None:
                return
            self._workers.add(asyncio.create_task(self._work(call)))

    async def _work(self, first: Call) -> None:
        task = asyncio.current_task()
        assert task is not None
        call: Call | None = first
        try:
            while call is not None:
                call.task = task
                try:
                    await self._run(call)
                finally:
                    call.task = None
                    call.lane.active -= 1
                # A cancellation that came while the call ended is not for the next one.
                done = self._closed or task.cancelling() or len(self._workers) > self.size
                call = None if done else self._queue.take()
        except asyncio.CancelledError:
            # Cancelled by somebody else than the batch: the event loop is ending. A new worker
            # would be one that nobody cancels.
            if call is not None and not call.batch.cancelled:
                self._closed = True
            raise
        finally:
            self._workers.discard(task)
            self.fill()
