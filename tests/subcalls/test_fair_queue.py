"""Whose turn it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.subcalls.scheduling.fair_queue import FairQueue, Lane


@dataclass(frozen=True, eq=False)
class Item:
    """What waits."""

    run: str
    number: int
    lane: Lane

    def __repr__(self) -> str:
        return f"{self.run}{self.number}"


class Room:
    """The limit of a lane, which a test changes."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.lane = Lane(lambda: self.limit)

    def items(self, run: str, number: int, start: int = 0) -> list[Item]:
        return [Item(run, start + at, self.lane) for at in range(number)]


def drained(queue: FairQueue[Item]) -> list[str]:
    """All that can be taken now, in order."""
    out = []
    while (item := queue.take()) is not None:
        out.append(repr(item))
    return out


def test_runs_are_served_in_turn_and_each_in_order_of_arrival() -> None:
    room, queue = Room(), FairQueue[Item]()
    queue.push("a", room.items("a", 4))
    queue.push("b", room.items("b", 1))
    queue.push("c", room.items("c", 2))
    queue.push("a", room.items("a", 1, start=4))

    assert drained(queue) == ["a0", "b0", "c0", "a1", "c1", "a2", "a3", "a4"]
    assert len(queue) == 0


def test_a_full_lane_is_passed_over_and_what_waits_for_it_keeps_its_place() -> None:
    full, free, queue = Room(1), Room(), FairQueue[Item]()
    queue.push("a", full.items("full", 2))
    queue.push("a", free.items("free", 2))

    assert drained(queue) == ["full0", "free0", "free1"]
    full.lane.active -= 1
    assert drained(queue) == ["full1"]


def test_a_run_is_served_in_order_of_arrival_over_several_lanes() -> None:
    """What came first goes first, whichever endpoint it is for."""
    one, two, queue = Room(), Room(), FairQueue[Item]()
    queue.push("a", one.items("one", 2))
    queue.push("a", two.items("two", 1))
    queue.push("a", one.items("one", 1, start=2))

    assert drained(queue) == ["one0", "one1", "two0", "one2"]


def test_a_limit_that_changes_holds_from_the_next_call_on() -> None:
    room, queue = Room(2), FairQueue[Item]()
    queue.push("a", room.items("a", 6))
    assert drained(queue) == ["a0", "a1"]
    room.limit = 3
    assert drained(queue) == ["a2"]
    room.limit = 1
    room.lane.active -= 2
    assert drained(queue) == []
    room.lane.active -= 1
    assert drained(queue) == ["a3"]
    room.limit = None
    assert drained(queue) == ["a4", "a5"]


def test_what_is_taken_out_leaves_the_rest_in_order() -> None:
    room, queue = Room(), FairQueue[Item]()
    for start in (0, 3, 6):
        queue.push("a", room.items("a", 3, start=start))
    taken = queue.remove("a", lambda item: 2 <= item.number <= 6)

    assert [item.number for item in taken] == [2, 3, 4, 5, 6]
    assert len(queue) == 4
    assert drained(queue) == ["a0", "a1", "a7", "a8"]
    assert queue.remove("a", lambda item: True) == []
    assert queue.remove("unknown", lambda item: True) == []


@settings(max_examples=60, deadline=None)
@given(
    pushes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 5)), max_size=12
    ),
    unwanted=st.sets(st.integers(0, 20)),
    limits=st.tuples(*[st.one_of(st.none(), st.integers(1, 3))] * 3),
)
def test_everything_pushed_comes_out_once_whatever_the_limits(
    pushes: list[tuple[str, int, int]], unwanted: set[int], limits: tuple[int | None, ...]
) -> None:
    """Or was taken out. Of one run and lane it comes in order, and no lane is overfilled."""
    rooms = [Room(limit) for limit in limits]
    queue = FairQueue[Item]()
    pushed: list[Item] = []
    for run, at, number in pushes:
        items = rooms[at].items(run, number, start=len(pushed))
        queue.push(run, items)
        pushed += items
    removed = [item for run in "abc" for item in queue.remove(run, lambda i: i.number in unwanted)]
    assert {item.number for item in removed} == {i.number for i in pushed} & unwanted

    out: list[Item] = []
    while len(queue):
        while (item := queue.take()) is not None:
            out.append(item)
            room = next(room for room in rooms if room.lane is item.lane)
            assert room.limit is None or room.lane.active <= room.limit
        for room in rooms:
            room.lane.active = 0
    assert Counter(out + removed) == Counter(pushed)
    for run in "abc":
        for room in rooms:
            numbers = [i.number for i in out if i.run == run and i.lane is room.lane]
            assert numbers == sorted(numbers)
