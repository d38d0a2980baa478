"""Whose turn it is: calls of several runs that wait for room on several endpoints."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["FairQueue", "Lane"]


class Lane:
    """Room on one endpoint: how many calls are under way there and may be.

    Parameters
    ----------
    limit
        Asked each time, because what a server takes changes; its ``None`` is no limit.
    """

    __slots__ = ("_limit", "active", "batches")

    def __init__(self, limit: Callable[[], int | None]) -> None:
        self._limit = limit
        self.active = 0
        self.batches = 0
        """That have calls which have not ended."""

    @property
    def free(self) -> bool:
        limit = self._limit()
        return limit is None or self.active < limit


class _Queued(Protocol):
    @property
    def lane(self) -> Lane: ...


T = TypeVar("T", bound=_Queued)

_Chunks = deque[tuple[int, deque[T]]]
"""Items of one lane that arrived together, each time with the number of their arrival."""


class FairQueue(Generic[T]):
    """A queue that serves runs in turn, and within a run in order of arrival.

    A run with 10,000 waiting calls delays another's single call by one call. Calls for a lane
    that is full are passed over and keep their place.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, dict[Lane, _Chunks[T]]] = OrderedDict()
        self._size = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return self._size

    def push(self, run_id: str, items: Iterable[T]) -> None:
        """Append *items* behind those of the same run."""
        self._arrivals += 1
        arrived: dict[Lane, deque[T]] = {}
        for item in items:
            arrived.setdefault(item.lane, deque()).append(item)
            self._size += 1
        for lane, chunk in arrived.items():
            lanes = self._runs.setdefault(run_id, {})
            lanes.setdefault(lane, deque()).append((self._arrivals, chunk))

    def take(self) -> T | None:
        """The next item with room in its lane, where it is now counted; ``None`` without one."""
        for run_id, lanes in self._runs.items():
            first: Lane | None = None
            for lane, chunks in lanes.items():
                earlier = first is None or chunks[0][0] < lanes[first][0][0]
                if earlier and lane.free:
                    first = lane
            if first is not None:
                return self._pop(run_id, first)
        return None

    def remove(self, run_id: str, unwanted: Callable[[T], bool]) -> list[T]:
        """Take the *unwanted* items of a run out, in order."""
        out: list[T] = []
        lanes = self._runs.get(run_id, {})
        for lane, chunks in list(lanes.items()):
            kept: _Chunks[T] = deque()
            for arrival, chunk in chunks:
                out += [item for item in chunk if unwanted(item)]
                kept.append((arrival, deque(item for item in chunk if not unwanted(item))))
            lanes[lane] = kept
            self._drop_empty(run_id, lane)
        self._size -= len(out)
        return out

    def _pop(self, run_id: str, lane: Lane) -> T:
        item = self._runs[run_id][lane][0][1].popleft()
        lane.active += 1
        self._size -= 1
        self._runs.move_to_end(run_id)
        self._drop_empty(run_id, lane)
        return item

    def _drop_empty(self, run_id: str, lane: Lane) -> None:
        lanes = self._runs[run_id]
        chunks = lanes[lane]
        while chunks and not chunks[0][1]:
            chunks.popleft()
        if not chunks:
            del lanes[lane]
        if not lanes:
            del self._runs[run_id]
