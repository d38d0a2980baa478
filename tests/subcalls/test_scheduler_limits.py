"""The limits of the scheduler: concurrency, slots, fairness, budget, time."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget
from rlm_kernel.errors import UsageError
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.scheduling.batch import MOST_SHARED, ChildOutcome
from tests.servers.scripted import MODEL, Hang, Say, ScriptedServer
from tests.subcalls.conftest import Bench, Gate, endpoint_for, settled


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
    await settled(bench)

    assert server.peak == 3
    batch.cancel()
    await batch.wait()


async def test_calls_leave_half_of_the_files_that_may_be_open_to_the_rest_of_the_kernel(
    bench_of: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the budget nor the server sets a limit that is lower."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 80))
    Gate(server)
    bench: Bench = bench_of(server, slots=1000)
    batch = bench.submit([str(i) for i in range(100)])
    await server.until(lambda s: s.active == 20)
    await settled(bench)

    assert server.peak == 20
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


async def test_calls_wait_for_what_others_set_aside_and_give_back(
    bench_of: Any, server: ScriptedServer
) -> None:
    """A limit of tokens bounds how many are under way, not how many get a reply."""
    bench: Bench = bench_of(server, budget=Budget(max_tokens=3000), slots=16)
    outcomes = await asyncio.wait_for(bench.submit(["x"] * 100).wait(), 60)

    assert [outcome.error for outcome in outcomes] == [None] * 100
    assert server.peak <= 2  # each sets 1,024 tokens aside for its reply
    bench.check_pairs()


async def test_calls_that_wait_for_others_are_refused_when_nothing_is_given_back(
    bench_of: Any, server: ScriptedServer
) -> None:
    """As soon as that is known."""
    server.reply = lambda prompt: "word " * 1000
    bench: Bench = bench_of(server, budget=Budget(max_tokens=3000), slots=16)
    outcomes = await asyncio.wait_for(bench.submit(["x"] * 100).wait(), 60)

    assert [outcome.error is None for outcome in outcomes] == [True, True] + [False] * 98
    assert "the budget of 3,000 tokens has" in str(outcomes[-1].error)
    bench.check_pairs()


async def test_cancelling_calls_that_wait_for_others_leaves_no_event_of_them(
    bench_of: Any, server: ScriptedServer
) -> None:
    """They were never sent, and hold nothing."""
    gate = Gate(server)
    bench: Bench = bench_of(server, budget=Budget(max_tokens=3000), slots=16)
    one = bench.submit(["a", "b"])
    await server.until(lambda s: s.active == 2)
    other = bench.submit(["c"] * 20)
    await settled(bench)
    other.cancel()
    cancelled = await asyncio.wait_for(other.wait(), 20)
    for prompt in "ab":
        gate.open(prompt)

    assert {str(outcome.error) for outcome in cancelled} == {"the call was cancelled"}
    assert [outcome.text for outcome in await one.wait()] == ["re: a", "re: b"]
    assert len(bench.started) == 2
    bench.check_pairs()


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


async def test_others_have_their_turn_between_calls_that_fail_unsent(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Such calls wait for nothing by themselves: the kernel would answer nobody meanwhile."""
    server.models[MODEL] = 10
    bench: Bench = bench_of(server, concurrency=1)
    batch = bench.submit(["x" * 1000] * 300)
    turns = 0
    while not batch.complete:
        turns += 1
        await asyncio.sleep(0)

    assert len({str(outcome.error) for outcome in await batch.wait()}) == 1
    assert not server.requests
    assert turns >= 300


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SubcallParams(schema="no JSON"), "the schema is no JSON text"),
        (SubcallParams(schema="{}" + " " * 100_000), "the schema is longer than 64 KiB"),
        (SubcallParams(choices=["x" * 100_000]), "the choices are longer than 64 KiB"),
        (SubcallParams(choices=["a", ""]), "choices must be texts that are not empty"),
    ],
)
async def test_a_form_that_cannot_be_sent_refuses_the_batch_as_one(
    bench: Bench, params: SubcallParams, says: str
) -> None:
    """Not each of its calls, which would write it thousands of times; a child run is sent none."""
    with pytest.raises(UsageError, match=says):
        bench.submit(["x"] * 9000, params=params)
    assert not bench.events

    async def child(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        return ChildOutcome(run_id="child", text="done")

    outcomes = await bench.submit(["x"], kind="rlm", params=params, spawn_child=child).wait()
    assert outcomes[0].text == "done"


@pytest.mark.parametrize("field", ["system", "schema", "task", "choices", "stop"])
async def test_what_calls_share_has_a_bound(
    bench_of: Any, server: ScriptedServer, field: str
) -> None:
    """It is worked through again for each call, and comes from the worker."""
    huge: Any = "x" * (MOST_SHARED // 4 + 1)
    value = [huge] * 4 if field in ("choices", "stop") else huge * 4
    bench: Bench = bench_of(server)
    with pytest.raises(UsageError, match="4,194,308 characters, more than"):
        bench.submit(["x"], params=SubcallParams(**{field: value}))
    assert not bench.events


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
    async with ScriptedServer(["warm", Hang()]) as server:
        bench: Bench = bench_of(server)
        await bench.submit(["x"]).wait()
        outcomes = await bench.submit(["x"], params=SubcallParams(timeout=1)).wait()
        await server.until(lambda s: s.cancelled == 1)

        assert "no reply within 1 s" in str(outcomes[0].error)
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
