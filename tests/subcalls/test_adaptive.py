"""How many requests a server is sent at once, before a simulated server on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.subcalls.fleet.adaptive import MOST, START, Concurrency

SERVICE_S = 1.0
SPREADS = ("equal", "similar", "wild")
"""How long requests take: all the same, about the same, or exponentially distributed."""


class Server:
    """Works on *slots* requests at once, in order of arrival, and is kept asked by a client that
    always has more than the limit permits.

    Parameters
    ----------
    refuses_above
        Requests inside above which it refuses more.
    knee
        Requests that slow each other down: n of them take 1 + n / knee times as long as one.
    tells
        Whether it is asked for its queue, every second.
    """

    def __init__(
        self,
        slots: int = 10**6,
        *,
        spread: str = "similar",
        seed: int = 0,
        start: int | None = None,
        refuses_above: int | None = None,
        knee: float | None = None,
        tells: bool = False,
        demand: int = 10**6,
    ) -> None:
        self.now = 0.0
        self.completed = 0
        self.refusals = 0
        self.load = Concurrency(start, clock=lambda: self.now)
        self.refusing = False
        """Whether it refuses everything."""
        self.slots = slots
        self._spread = spread
        self._random = random.Random(seed)
        self._refuses_above = refuses_above
        self._knee = knee
        self._tells = tells
        self._demand = demand
        self._running = 0
        self._queue: deque[float] = deque()
        self._events: list[tuple[float, int, str, float]] = []
        self._numbers = itertools.count()
        self._at(0.0, "more", 0.0)
        if tells:
            self._at(1.0, "told", 0.0)

    def run(self, seconds: float) -> float:
        """Let so much time pass; completions per second in it."""
        until, before = self.now + seconds, self.completed
        while self._events[0][0] <= until:
            self.now, _, what, begun = heapq.heappop(self._events)
            getattr(self, f"_{what}")(begun)
            assert self.load.limit >= 1
        self.now = until
        return (self.completed - before) / seconds

    def _at(self, when: float, what: str, begun: float) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, begun))

    def _more(self, _: float) -> None:
        """The client sends what it may."""
        while self.load.free and self.load.active < self._demand:
            begun = self.load.begin()
            inside = self._running + len(self._queue)
            full = self._refuses_above is not None and inside >= self._refuses_above
            if self.refusing or full:
                self._at(self.now + 0.02 * SERVICE_S, "refused", begun)
            elif self._running < self.slots:
                self._serve(begun)
            else:
                self._queue.append(begun)

    def _serve(self, begun: float) -> None:
        self._running += 1
        seconds = SERVICE_S * (1 + self._running / self._knee if self._knee else 1)
        if self._spread == "similar":
            seconds *= self._random.uniform(0.5, 1.5)
        elif self._spread == "wild":
            seconds *= self._random.expovariate(1)
        self._at(self.now + seconds, "completed", begun)

    def _completed(self, begun: float) -> None:
        self._running -= 1
        self.completed += 1
        self.load.done(begun)
        while self._queue and self._running < self.slots:
            self._serve(self._queue.popleft())
        self._more(0.0)

    def _refused(self, begun: float) -> None:
        self.refusals += 1
        self.load.refused(begun)
        self._at(self.now + SERVICE_S / 2, "more", 0.0)

    def _told(self, _: float) -> None:
        self.load.queue(self._running, len(self._queue))
        self._at(self.now + 1.0, "told", 0.0)


@settings(max_examples=25, deadline=None)
@given(
    slots=st.sampled_from([1, 2, 4, 8, 10, 20, 32, 50, 100, 200, 256, 400]),
    spread=st.sampled_from(SPREADS),
    tells=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_nine_tenths_of_the_best_throughput_are_reached(
    slots: int, spread: str, tells: bool, seed: int
) -> None:
    """Whatever the number of slots, of which nobody knows."""
    server = Server(slots, spread=spread, tells=tells, seed=seed)
    server.run(150 * SERVICE_S)
    before, at = server.completed, server.now
    rate = server.run(max(150.0, 1500 / slots) * SERVICE_S)
    drawn = server.completed - before

    # A wild server of few slots completes by chance some percent more or fewer than it should.
    chance = 3 * drawn**-0.5 if spread == "wild" else 0.0
    assert rate >= (0.9 - chance) * slots / SERVICE_S, f"limit {server.load.limit} at {at:g} s"


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("slots", [16, 40, 100, 200])
def test_no_long_queue_is_left_on_the_server(slots: int, spread: str) -> None:
    """In the middle of a long time not more than twice what it works on is in flight."""
    server = Server(slots, spread=spread)
    server.run(200 * SERVICE_S)
    limits = []
    for _ in range(300):
        server.run(SERVICE_S)
        limits.append(server.load.limit)

    assert sorted(limits)[150] <= 2 * slots
    assert sorted(limits)[270] <= 4 * slots


@pytest.mark.parametrize("slots", [1, 4, 10, 64, 300])
def test_a_server_that_tells_of_its_queue_soon_has_a_short_one(slots: int) -> None:
    """Its metrics are worth more than trials."""
    server = Server(slots, tells=True)
    server.run(120 * SERVICE_S)
    limits = []
    for _ in range(60):
        server.run(SERVICE_S)
        limits.append(server.load.limit)

    assert sorted(limits)[30] <= slots * 1.3 + 2
    assert server.run(60 * SERVICE_S) >= 0.9 * slots / SERVICE_S or slots == 1


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("bound", [1, 4, 10, 40, 150])
def test_a_server_that_refuses_more_is_used_to_its_bound(bound: int, spread: str) -> None:
    """With few refusals."""
    server = Server(spread=spread, refuses_above=bound)
    server.run(200 * SERVICE_S)
    refusals, completed = server.refusals, server.completed
    rate = server.run(400 * SERVICE_S)

    assert rate >= 0.8 * bound / SERVICE_S
    assert server.refusals - refusals <= 0.03 * (server.completed - completed)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("slots", [10, 32, 100, 256])
def test_a_storm_of_refusals_is_recovered_from(slots: int, spread: str) -> None:
    """The limit falls to 1, not to 0, and is soon where it was."""
    server = Server(slots, spread=spread)
    server.run(150 * SERVICE_S)
    server.refusing = True
    server.run(15 * SERVICE_S)
    assert server.load.limit == 1
    server.refusing = False
    server.run(40 * SERVICE_S)

    assert server.run(60 * SERVICE_S) >= 0.8 * slots / SERVICE_S


@pytest.mark.parametrize("knee", [2, 30, 400])
@pytest.mark.parametrize("tells", [False, True])
def test_a_server_whose_requests_slow_each_other_down_is_used_well(knee: int, tells: bool) -> None:
    """As GPUs do: each request more brings less than the one before it. Where it tells that none
    of them waits, the last bit is taken, too."""
    server = Server(knee=knee, tells=tells)
    best = MOST / (SERVICE_S * (1 + MOST / knee))
    server.run(600 * SERVICE_S)

    assert server.run(300 * SERVICE_S) >= (0.9 if tells else 0.75) * best


def test_slots_that_grow_and_shrink_are_followed() -> None:
    """Another client comes, and goes."""
    server = Server(64)
    server.run(150 * SERVICE_S)
    server.slots = 16
    server.run(300 * SERVICE_S)
    assert server.load.limit <= 48
    server.slots = 128
    server.run(300 * SERVICE_S)

    assert server.run(100 * SERVICE_S) >= 0.9 * 128 / SERVICE_S


def test_nothing_is_learnt_where_nobody_asks_for_more() -> None:
    """A client with five requests at a time says nothing of a sixth."""
    server = Server(1000, demand=5)
    server.run(500 * SERVICE_S)

    assert server.load.limit == START


def test_refusals_of_what_was_in_flight_together_cut_once() -> None:
    """32 refusals in one moment are one sign, not 32."""
    now = 0.0
    load = Concurrency(clock=lambda: now)
    begun = [load.begin() for _ in range(START)]
    now = 1.0
    for at in begun:
        load.refused(at)

    assert load.active == 0
    assert load.limit == int(START * 0.7)


def test_a_hint_counts_until_more_is_known() -> None:
    """And is bounded as the limit is."""
    load = Concurrency()
    load.hint(4)
    assert load.limit == 5
    load.hint(10**9)
    assert load.limit == MOST
    load.hint(0)
    assert load.limit == MOST

    learnt = Concurrency()
    learnt.refused(learnt.begin())
    learnt.hint(500)
    assert learnt.limit < START


def test_a_request_that_tells_nothing_only_gives_its_room_back() -> None:
    load = Concurrency(2)
    load.begin()
    load.begin()
    assert not load.free
    load.abandoned()

    assert load.free
    assert (load.active, load.limit) == (1, 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_of_events_moves_the_limit_out_of_its_bounds(data: st.DataObject) -> None:
    """Nor does the count of requests go wrong."""
    now = 0.0
    load = Concurrency(data.draw(st.integers(1, 2000)), most=64, clock=lambda: now)
    begun: list[float] = []
    steps = st.sampled_from(["begin", "begin", "done", "refused", "abandoned", "queue", "hint"])
    for step in data.draw(st.lists(steps, max_size=300)):
        now += data.draw(st.sampled_from([0.0, 0.001, 1.0]))
        if step == "begin":
            begun.append(load.begin())
        elif step == "queue":
            load.queue(data.draw(st.integers(0, 2000)), data.draw(st.integers(0, 2000)))
        elif step == "hint":
            load.hint(data.draw(st.integers(-1, 2000)))
        elif begun:
            at = begun.pop(data.draw(st.integers(0, len(begun) - 1)))
            load.abandoned() if step == "abandoned" else getattr(load, step)(at)
        assert 1 <= load.limit <= 64
        assert load.active == len(begun)
