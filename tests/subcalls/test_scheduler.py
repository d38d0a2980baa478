"""The scheduler with a real server: every call accounted for, every limit kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.events import Event, SubcallEnded, SubcallStarted
from rlm_kernel.errors import RecordError, SubcallError, UsageError
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.endpoint import Reply
from tests.servers.scripted import MODEL, Cut, Garbage, Hang, Refuse, Say, ScriptedServer, Step
from tests.subcalls.conftest import Bench, endpoint_for

Answers = Callable[[str], str | Step]


class Gate:
    """Answers of a server that wait until the test lets them go, in the order of arrival."""

    def __init__(self, server: ScriptedServer) -> None:
        self.prompts: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        server.reply = self._reply

    def _reply(self, prompt: str) -> Step:
        self.prompts.append(prompt)
        self._gates[prompt] = asyncio.Event()
        return Say(f"re: {prompt}", gate=self._gates[prompt])

    def open(self, prompt: str) -> None:
        self._gates[prompt].set()


# --- order, identity, count ---------------------------------------------------------------------


async def test_results_come_back_in_the_order_of_the_prompts(bench: Bench) -> None:
    """Whatever the order in which they were there."""
    prompts = [f"prompt {i}" for i in range(200)]
    outcomes = await bench.submit(prompts).wait()

    assert [outcome.text for outcome in outcomes] == [f"re: {prompt}" for prompt in prompts]
    assert [outcome.index for outcome in outcomes] == list(range(200))
    assert len({outcome.call_id for outcome in outcomes}) == 200
    bench.check_pairs()


async def test_a_thousand_calls_with_failures_are_all_accounted_for(
    bench: Bench, server: ScriptedServer
) -> None:
    """2 % of the calls fail for good, 2 % once: each is an outcome at its place."""
    hurt: set[str] = set()

    def reply(prompt: str) -> str | Step:
        number = int(prompt)
        if number % 50 == 7:
            return (Refuse(400), Refuse(503), Cut(), Garbage())[number // 50 % 4]
        if number % 50 == 31 and prompt not in hurt:
            hurt.add(prompt)
            return (Refuse(503), Cut(), Refuse(429, headers={"Retry-After": "0"}))[number % 3]
        return f"re: {prompt}"

    server.reply = reply
    outcomes = await bench.submit([str(i) for i in range(1000)]).wait()

    assert [outcome.index for outcome in outcomes] == list(range(1000))
    for number, outcome in enumerate(outcomes):
        if number % 50 == 7:
            assert isinstance(outcome.error, SubcallError)
            assert outcome.text == ""
        else:
            assert outcome.error is None
            assert outcome.text == f"re: {number}"
    delivered = sorted(outcome.index for piece in bench.delivered for outcome in piece)
    assert delivered == list(range(1000))
    assert len(bench.started) == 1000
    bench.check_pairs()


async def test_outcomes_of_one_tick_are_delivered_together(bench: Bench) -> None:
    """Fewer messages on the link than calls."""
    await bench.submit(["x"] * 500).wait()

    assert sum(len(piece) for piece in bench.delivered) == 500
    assert len(bench.delivered) < 400


async def test_an_empty_batch_is_done_at_once(bench: Bench) -> None:
    """Nothing is called, nothing delivered."""
    assert await bench.submit([]).wait() == []
    assert bench.events == []
    assert bench.delivered == []


async def test_events_say_what_was_called_and_what_came_back(bench: Bench) -> None:
    """Start and end of a call carry all that a view of the tree needs."""
    params = SubcallParams(temperature=0.0)
    batch = bench.submit(["one", "two"], params=params, run_id="r1")
    await batch.wait()

    assert [run_id for run_id, _ in bench.events] == ["r1"] * 4
    started = next(event for event in bench.started if event.index == 1)
    assert started == SubcallStarted(
        call_id=started.call_id,
        kind="llm",
        prompt="two",
        model="scripted",
        turn=1,
        batch_id=batch.batch_id,
        index=1,
        params=params,
        queued_s=started.queued_s,
        key=started.key,
    )
    assert started.queued_s > 0
    assert len(bytes.fromhex(started.key)) == 16
    ended = next(event for event in bench.ended if event.call_id == started.call_id)
    assert (ended.ok, ended.response, ended.finish, ended.attempts) == (True, "re: two", "stop", 1)
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (1, 2)
    assert bench.ledger.used.tokens == sum(event.usage.tokens for event in bench.ended)
    assert bench.ledger.used.calls == 2


async def test_the_end_of_a_call_is_written_before_it_is_handed_out(bench_of: Any) -> None:
    """Nobody is shown what the record does not have."""
    async with ScriptedServer(reply=lambda prompt: "ok") as server:
        bench: Bench = bench_of(server)
        recorded: list[bool] = []

        def deliver(outcomes: list[Any]) -> None:
            ended = {event.call_id for event in bench.ended}
            recorded.extend(outcome.call_id in ended for outcome in outcomes)

        batch = bench.scheduler.submit(
            ["x"] * 20,
            run_id="run",
            turn=1,
            ledger=bench.ledger,
            resolve=lambda model: bench.endpoint,
            deliver=deliver,
        )
        await batch.wait()

    assert recorded == [True] * 20


# --- limits -------------------------------------------------------------------------------------


async def test_no_more_calls_are_under_way_than_allowed(
    bench_of: Any, server: ScriptedServer
) -> None:
    """The cap counts over all runs, and is used to the full."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=5)
    batches = [bench.submit([f"{run}{i}" for i in range(8)], run_id=run) for run in "ab"]
    for done in range(16):
        sent = min(16, done + 5)
        await server.until(lambda s, sent=sent: len(s.requests) == sent)
        gate.open(gate.prompts[done])
    for batch in batches:
        await batch.wait()

    assert server.peak == 5
    bench.check_pairs()


async def test_the_budget_of_the_first_run_sets_the_cap(
    bench_of: Any, server: ScriptedServer
) -> None:
    """``max_concurrency`` holds for the children of that run as well."""
    Gate(server)
    bench: Bench = bench_of(server, budget=Budget(max_concurrency=3))
    child = bench.ledger.child(Budget(max_concurrency=99))
    batch = bench.submit([str(i) for i in range(9)], ledger=child)
    await server.until(lambda s: s.active == 3)
    await _settled(bench)

    assert server.peak == 3
    batch.cancel()
    await batch.wait()


async def test_an_endpoint_gets_no_more_than_it_has_slots_for(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Calls for another endpoint are not held up by one that is full."""
    async with ScriptedServer(reply=lambda prompt: "free") as other:
        Gate(server)
        bench: Bench = bench_of(server, slots=2, concurrency=10)
        full = bench.submit([str(i) for i in range(20)])
        await server.until(lambda s: s.active == 2)
        bench.endpoint, full_endpoint = endpoint_for(other), bench.endpoint
        outcomes = await bench.submit(["x"] * 20).wait()
        await bench.endpoint.close()
        bench.endpoint = full_endpoint

        assert [outcome.text for outcome in outcomes] == ["free"] * 20
        full.cancel()
        await full.wait()
        assert server.peak == 2


async def test_a_place_that_is_free_again_goes_to_the_next_call(
    bench_of: Any, server: ScriptedServer
) -> None:
    """More calls than slots all get their turn."""
    bench: Bench = bench_of(server, slots=2)
    outcomes = await bench.submit(["x"] * 20).wait()

    assert [outcome.text for outcome in outcomes] == ["re: x"] * 20
    assert server.peak <= 2


async def test_a_run_with_many_calls_does_not_starve_another(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Runs are served in turn, not in order of arrival."""
    bench: Bench = bench_of(server, concurrency=1)
    bench.submit([f"many {i}" for i in range(100)], run_id="noisy")
    await bench.submit(["one"], run_id="quiet").wait()

    assert [request.prompt for request in server.requests].index("one") <= 2


async def test_a_call_over_the_budget_is_refused_unsent_and_seen(
    bench_of: Any, server: ScriptedServer
) -> None:
    """It has a start and an end in the record, and an error at its place."""
    bench: Bench = bench_of(server, budget=Budget(max_subcalls=3))
    outcomes = await bench.submit(["x"] * 5).wait()

    assert [outcome.error is None for outcome in outcomes] == [True] * 3 + [False] * 2
    assert "the budget of 3 sub-calls has 0 left" in str(outcomes[4].error)
    assert len(server.requests) == 3
    assert [event.attempts for event in bench.ended if not event.ok] == [0, 0]
    bench.check_pairs()


async def test_a_batch_over_the_budget_is_refused_as_one(
    bench_of: Any, server: ScriptedServer
) -> None:
    """All calls have their error, and the record says in one place how many there were."""
    bench: Bench = bench_of(server, budget=Budget(max_subcalls=2), concurrency=1)
    loop = asyncio.get_running_loop()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    turn()
    outcomes = await bench.submit([""] * 50_000).wait()

    assert len(server.requests) == 2
    assert len({str(outcome.error) for outcome in outcomes[2:]}) == 1
    assert "the budget of 2 sub-calls has 0 left" in str(outcomes[-1].error)
    assert len(bench.started) == len(bench.ended) == 3
    assert bench.started[2].note == "refused together with 49,997 more calls of its batch"
    assert bench.ledger.subcalls == 2
    # The loop had its turns, and no delivery is the whole batch.
    assert turns > 50
    assert max(map(len, bench.delivered)) <= 2000
    bench.check_pairs()


async def test_a_call_that_does_not_fit_now_leaves_the_others_of_its_batch_alone(
    bench_of: Any, server: ScriptedServer
) -> None:
    """A smaller one may fit, and what is under way gives back what it does not use."""
    bench: Bench = bench_of(server, budget=Budget(max_tokens=3000), concurrency=1)
    outcomes = await bench.submit(["x", "y" * 9000, "z"]).wait()

    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert len(bench.ended) == 3


async def test_cancelling_a_batch_that_is_being_refused_ends_all_its_calls(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Nobody waits for ever for a call that no queue holds any more."""
    bench: Bench = bench_of(server, budget=Budget(max_subcalls=1), concurrency=1)
    batch = bench.submit([""] * 20_000)
    while not bench.delivered or not any(o.error for o in bench.delivered[-1]):
        bench.got.clear()
        await asyncio.wait_for(bench.got.wait(), 20)
    batch.cancel()

    assert len(await asyncio.wait_for(batch.wait(), 20)) == 20_000
    bench.check_pairs()


async def test_a_limit_of_tokens_bounds_what_a_server_may_generate(
    bench_of: Any, server: ScriptedServer
) -> None:
    """A call without max_tokens could take any number of them."""
    bench: Bench = bench_of(server, budget=Budget(max_tokens=5000))
    await bench.submit(["x"]).wait()
    await bench.submit(["x"], params=SubcallParams(max_tokens=7)).wait()

    sent = [request.body["max_tokens"] for request in server.requests]
    assert sent[0] > 7
    assert sent[1] == 7


DEAR = {MODEL: Price(input=1000, output=2000)}


async def test_a_limit_of_money_refuses_what_it_does_not_cover(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Calls under way are counted at the most that they can cost, those done at what they did."""
    bench: Bench = bench_of(server, budget=Budget(max_cost=0.05), prices=DEAR)
    outcomes = await bench.submit(["x"] * 20, params=SubcallParams(max_tokens=5)).wait()

    answered = [outcome for outcome in outcomes if outcome.error is None]
    assert 1 < len(answered) == len(server.requests) < 20
    assert "raise max_cost" in str(outcomes[-1].error)
    assert answered[0].usage.cost == pytest.approx(DEAR[MODEL].of(1, 2))
    assert 0 < bench.ledger.used.cost <= 0.05
    assert bench.ledger.used.cost == pytest.approx(sum(event.usage.cost for event in bench.ended))
    assert bench.ledger.reserved.cost == pytest.approx(0)


async def test_a_limit_of_money_bounds_what_a_server_may_generate(
    bench_of: Any, server: ScriptedServer
) -> None:
    """A reply of any length could cost anything."""
    bench: Bench = bench_of(server, budget=Budget(max_cost=50), prices=DEAR)
    await bench.submit(["x"]).wait()

    assert server.requests[0].body["max_tokens"] > 0


async def test_a_cost_that_the_server_names_counts(bench_of: Any) -> None:
    """Without any price."""
    async with ScriptedServer([Say("yes", cost=0.25)] * 9) as server:
        bench: Bench = bench_of(server, budget=Budget(max_cost=0.5), concurrency=1, prices={})
        outcomes = await bench.submit(["x"] * 4).wait()

    assert [outcome.error is None for outcome in outcomes] == [True, True, False, False]
    assert "has $0.0000 left" in str(outcomes[2].error)
    assert bench.ledger.used.cost == 0.5


async def test_a_model_without_a_price_is_not_asked_on_under_a_limit_of_money(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Once it showed that its server names no cost."""
    bench: Bench = bench_of(server, budget=Budget(max_cost=5), concurrency=1, prices={})
    outcomes = await bench.submit(["x"] * 3).wait()

    assert [outcome.error is None for outcome in outcomes] == [True, False, False]
    assert f"the price of {MODEL} is not known" in str(outcomes[1].error)
    assert "RLM_PRICES" in str(outcomes[1].error)
    bench.check_pairs()


async def test_the_seconds_of_the_budget_end_a_call_that_is_under_way(bench_of: Any) -> None:
    """A call is not waited for longer than the run may last."""
    async with ScriptedServer([Hang()]) as server:
        bench: Bench = bench_of(server, budget=Budget(max_seconds=0.05))
        outcomes = await bench.submit(["x"]).wait()

        assert "the budget" in str(outcomes[0].error)
        bench.check_pairs()


async def test_a_call_that_takes_too_long_is_ended_on_the_server(bench_of: Any) -> None:
    """Its own timeout counts, and its prompt is booked as an estimate."""
    async with ScriptedServer([Hang()]) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x"], params=SubcallParams(timeout=0.05)).wait()
        await server.until(lambda s: s.cancelled == 1)

        assert "no reply within 0.05 s" in str(outcomes[0].error)
        assert bench.ledger.used.estimated
        assert bench.ledger.used.input_tokens > 0
        bench.check_pairs()


@pytest.mark.parametrize(
    "params",
    [
        SubcallParams(timeout=float("nan")),
        SubcallParams(timeout=0),
        SubcallParams(timeout=float("inf")),
        SubcallParams(temperature=float("nan")),
        SubcallParams(temperature=-1),
        SubcallParams(max_tokens=0),
    ],
)
async def test_parameters_that_cannot_be_are_refused_at_once(
    bench: Bench, params: SubcallParams
) -> None:
    """They come from the worker; nothing is queued."""
    with pytest.raises(UsageError):
        bench.submit(["x"], params=params)

    assert bench.events == []


# --- cancelling ---------------------------------------------------------------------------------


async def test_cancelling_a_batch_reaches_the_server_and_sends_no_more(
    bench_of: Any, server: ScriptedServer
) -> None:
    """What had finished keeps its result, what was never sent leaves no event."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=4)
    batch = bench.submit([str(i) for i in range(20)])
    await server.until(lambda s: len(s.requests) == 4)
    gate.open("0")
    await server.until(lambda s: len(s.requests) == 5)
    await bench.got.wait()
    batch.cancel()
    batch.cancel()
    outcomes = await batch.wait()
    await server.until(lambda s: s.active == 0)

    assert [outcome.index for outcome in outcomes] == list(range(20))
    assert [outcome.text for outcome in outcomes if outcome.error is None] == ["re: 0"]
    assert server.cancelled == 4
    assert len(bench.started) == 5
    assert [[outcome.text for outcome in piece] for piece in bench.delivered] == [["re: 0"]]
    bench.check_pairs()


async def test_cancelling_one_batch_leaves_the_others_alone(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Its places go to the calls that wait."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=2)
    first = bench.submit(["a0", "a1", "a2"], run_id="a")
    second = bench.submit(["b0", "b1"], run_id="b")
    await server.until(lambda s: s.active == 2)
    first.cancel()
    await server.until(lambda s: s.active == 2 and "b1" in gate.prompts)
    gate.open("b0")
    gate.open("b1")

    assert [outcome.text for outcome in await second.wait()] == ["re: b0", "re: b1"]
    assert all(outcome.error is not None for outcome in await first.wait())
    bench.check_pairs()


async def test_a_batch_cancelled_before_its_workers_began_is_never_sent(bench: Bench) -> None:
    """Cancelling in the same tick as submitting."""
    batch = bench.submit(["x"] * 3)
    batch.cancel()
    outcomes = await batch.wait()

    assert ["cancelled" in str(outcome.error) for outcome in outcomes] == [True] * 3
    assert bench.events == []
    assert bench.ledger.subcalls == 0


async def test_a_cancellation_from_inside_an_event_hits_its_own_batch_only(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Whoever listens to events may cancel while the scheduler is in the middle of a call."""
    bench: Bench = bench_of(server, concurrency=1)
    first = bench.submit(["first", "unsent"])
    second = bench.submit(["second"], run_id="other")
    record = bench.emit

    def emit(run_id: str, event: Event) -> None:
        record(run_id, event)
        if isinstance(event, SubcallEnded) and event.response == "re: first":
            first.cancel()

    bench.emit = emit  # type: ignore[method-assign]
    assert [outcome.text for outcome in await second.wait()] == ["re: second"]
    assert [outcome.text for outcome in await first.wait()] == ["re: first", ""]
    bench.check_pairs()


async def test_closing_ends_everything(bench_of: Any, server: ScriptedServer) -> None:
    """All batches are done afterwards, and nothing more is taken."""
    Gate(server)
    bench: Bench = bench_of(server, concurrency=2)
    batches = [bench.submit(["x", "y", "z"], run_id=run) for run in "abc"]
    await server.until(lambda s: s.active == 2)
    await bench.scheduler.close()

    for batch in batches:
        assert all(outcome.error is not None for outcome in await batch.wait())
    await server.until(lambda s: s.active == 0)
    bench.check_pairs()
    with pytest.raises(UsageError, match="closed"):
        bench.submit(["x"])


# --- faults around it ---------------------------------------------------------------------------


async def test_a_call_that_cannot_be_recorded_is_not_sent(bench: Bench) -> None:
    """Its outcome is the error of the record; nothing stays set aside."""

    def emit(run_id: str, event: Event) -> None:
        raise RecordError("the disk is full: make room")

    bench.emit = emit  # type: ignore[method-assign]
    outcomes = await bench.submit(["x", "y"]).wait()

    assert [str(outcome.error) for outcome in outcomes] == ["the disk is full: make room"] * 2
    assert bench.ledger.subcalls == 0
    assert bench.ledger.reserved.subcalls == 0


async def test_a_reply_that_cannot_be_recorded_is_not_shown(bench: Bench) -> None:
    """A result that the record does not have would be lost to every replay."""
    record = bench.emit

    def emit(run_id: str, event: Event) -> None:
        if isinstance(event, SubcallEnded):
            raise RecordError("the disk is full: make room")
        record(run_id, event)

    bench.emit = emit  # type: ignore[method-assign]
    outcome = (await bench.submit(["x"]).wait())[0]

    assert outcome.text == ""
    assert str(outcome.error) == "the disk is full: make room"
    assert bench.ledger.subcalls == 1


class Broken:
    """An endpoint with a defect of its own."""

    spec = model = "broken"
    slots = None
    on_room = None

    def price(self, model: str) -> Price | None:
        return None

    async def complete(self, prompt: str, params: SubcallParams, **more: Any) -> Reply:
        raise ZeroDivisionError("a defect")

    async def context_limit(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


async def test_a_defect_in_an_endpoint_is_an_outcome_and_is_reported(bench_of: Any) -> None:
    """A batch never hangs, and the traceback is not swallowed."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    bench: Bench = bench_of(Broken())
    outcomes = await bench.submit(["x", "y"]).wait()

    assert ["a defect" in str(outcome.error) for outcome in outcomes] == [True, True]
    assert isinstance(reported[0]["exception"], ZeroDivisionError)
    bench.check_pairs()


async def _settled(bench: Bench) -> None:
    """Let everything run that could run now, several ticks of it."""
    for _ in range(50):
        await asyncio.sleep(0)
