"""Runs that share servers: a single call is not held up by thousands of another run's."""

from __future__ import annotations

from typing import Any

from rlm_kernel.engine.budget import Budget
from rlm_kernel.subcalls.fleet.fleet import Fleet
from tests.servers.scripted import MODEL, ScriptedServer
from tests.subcalls.conftest import Bench, Gate, endpoint_for

MANY = 10_000


async def test_ten_thousand_calls_delay_the_single_call_of_another_run_by_one(
    bench_of: Any, server: ScriptedServer
) -> None:
    """It is sent when the call that was under way is done, or the next one."""
    gate = Gate(server)
    bench: Bench = bench_of(server, slots=1, budget=Budget(max_subcalls=None))
    flood = bench.submit(["many"] + [f"many {i}" for i in range(MANY)], run_id="noisy")
    await server.until(lambda s: s.active == 1)
    single = bench.submit(["one"], run_id="quiet")
    await gate.open_one_by_one(2)

    assert "one" in gate.prompts[:3]
    flood.cancel()
    gate.open("one")
    assert (await single.wait())[0].text == "re: one"
    await flood.wait()


async def test_every_run_gets_through_within_as_many_calls_as_there_are_runs(
    bench_of: Any, server: ScriptedServer
) -> None:
    """One floods; four others come later, with three calls each."""
    gate = Gate(server)
    bench: Bench = bench_of(server, slots=1)
    flood = bench.submit([f"a{i}" for i in range(1000)], run_id="a")
    await server.until(lambda s: s.active == 1)
    others = [bench.submit([f"{run}{i}" for i in range(3)], run_id=run) for run in "bcde"]
    await gate.open_one_by_one(16)

    # In every five calls in a row after the first each of the five runs has one.
    runs = [prompt[0] for prompt in gate.prompts]
    for start in (1, 6, 11):
        assert sorted(runs[start : start + 5]) == list("abcde")
    flood.cancel()
    await flood.wait()
    for batch in others:
        await batch.wait()


async def test_a_noisy_child_run_does_not_hold_up_its_parent(
    bench_of: Any, server: ScriptedServer
) -> None:
    """It is a run as any other, although its calls count against the parent's budget."""
    gate = Gate(server)
    bench: Bench = bench_of(server, slots=1)
    child = bench.ledger.child()
    flood = bench.submit([f"many {i}" for i in range(1000)], run_id="child", ledger=child)
    await server.until(lambda s: s.active == 1)
    single = bench.submit(["one"], run_id="parent")
    await gate.open_one_by_one(2)

    assert "one" in gate.prompts[:3]
    flood.cancel()
    gate.open("one")
    await single.wait()
    await flood.wait()


async def test_a_run_that_floods_two_servers_holds_up_no_call_to_either(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Lanes are shared in turn, too; a call to the one does not wait for the other's."""
    async with ScriptedServer() as other:
        gates = [Gate(server), Gate(other)]
        bench: Bench = bench_of(server, slots=1)
        endpoints = [bench.endpoint, endpoint_for(other, slots=1)]
        floods, singles = [], []
        for endpoint, run in [(endpoint, "noisy") for endpoint in endpoints]:
            bench.endpoint = endpoint
            floods.append(bench.submit([f"many {i}" for i in range(1000)], run_id=run))
        for party in (server, other):
            await party.until(lambda s: s.active == 1)
        for endpoint in endpoints:
            bench.endpoint = endpoint
            singles.append(bench.submit(["one"], run_id="quiet"))
        for gate, party in zip(gates, (server, other), strict=True):
            for number in range(2):
                gate.open(gate.prompts[number])
                await party.until(lambda s, number=number: len(s.requests) == number + 2)
            assert "one" in gate.prompts[:3]
            gate.open("one")
        for single in singles:
            await single.wait()
        for flood in floods:
            flood.cancel()
            await flood.wait()
        bench.endpoint = endpoints[0]
        await endpoints[1].close()


async def test_fairness_holds_on_a_fleet(bench_of: Any, server: ScriptedServer) -> None:
    """Its calls wait in the scheduler's queue, not in its own."""
    async with ScriptedServer() as other:
        gates = [Gate(server), Gate(other)]
        members = [endpoint_for(party, slots=2) for party in (server, other)]
        bench: Bench = bench_of(Fleet("openai:scripted@both", MODEL, members))
        flood = bench.submit([f"many {i}" for i in range(1000)], run_id="noisy")
        for party in (server, other):
            await party.until(lambda s: s.active == 2)
        single = bench.submit(["one"], run_id="quiet")
        for number in range(2):
            gates[0].open(gates[0].prompts[number])
        await server.until(lambda s: len(s.requests) == 4)

        assert "one" in gates[0].prompts
        gates[0].open("one")
        assert (await single.wait())[0].text == "re: one"
        flood.cancel()
        await flood.wait()
