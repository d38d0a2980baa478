"""Whose turn it is: calls of several runs that wait for room on several endpoints."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["FairQueue", "Lane"]


class Lane:
    """Room on one endpoint: how many calls are under way there and may be."""

    __slots__ = ("active", "limit")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        """``None`` is no limit."""
        self.active = 0

    @property
    def free(self) -> bool:
        return self.limit is None or self.active < self.limit


class _Queued(Protocol):
    @property
    def lane(self) -> Lane: ...


T = TypeVar("T", bound=_Queued)


class FairQueue(Generic[T]):
    """A queue that serves runs in turn, and within a run in order of arrival.

    A run with 10,000 waiting calls delays another's single call by one call. Calls for a lane
    that is full are passed over and keep their place.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, dict[Lane, deque[T]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, run_id: str, items: Iterable[T]) -> None:
        """Append *items* behind those of the same run."""
        lanes = self._runs.setdefault(run_id, {})
        for item in items:
            lanes.setdefault(item.lane, deque()).append(item)
            self._size += 1

    def take(self) -> T | None:
        """The next item with room in its lane, where it is now counted; ``None`` without one."""
        for run_id, lanes in self._runs.items():
            for lane, items in lanes.items():
                if lane.free:
                    return self._pop(run_id, lane, items)
        return None

    def remove(self, run_id: str, unwanted: Callable[[T], bool]) -> list[T]:
        """Take the *unwanted* items of a run out, in order."""
        out: list[T] = []
        lanes = self._runs.get(run_id, {})
        for lane, items in list(lanes.items()):
            out += [item for item in items if unwanted(item)]
            lanes[lane] = deque(item for item in items if not unwanted(item))
            self._drop_empty(run_id, lane)
        self._size -= len(out)
        return out

    def _pop(self, run_id: str, lane: Lane, items: deque[T]) -> T:
        item = items.popleft()
        lane.active += 1
        self._size -= 1
        self._runs.move_to_end(run_id)
        self._drop_empty(run_id, lane)
        return item

    def _drop_empty(self, run_id: str, lane: Lane) -> None:
        lanes = self._runs[run_id]
        if not lanes[lane]:
            del lanes[lane]
        if not lanes:
            del self._runs[run_id]
