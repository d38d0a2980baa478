"""Sub-calls that are child runs: their places, their tokens, their depth."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget, Usage
from rlm_kernel.errors import SubcallError
from rlm_kernel.subcalls.scheduling.scheduler import ChildOutcome
from tests.servers.scripted import Hang, ScriptedServer
from tests.subcalls.conftest import Bench


def child_of(bench: Bench, *, calls: int) -> Any:
    """Starts child runs that make *calls* plain calls each, as code in their cells would."""

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        ledger = bench.ledger.child()
        batch = bench.submit([f"{prompt}.{i}" for i in range(calls)], run_id=call_id, ledger=ledger)
        try:
            outcomes = await batch.wait()
        except asyncio.CancelledError:
            batch.cancel()
            raise
        text = " ".join(outcome.text for outcome in outcomes)
        return ChildOutcome(run_id=f"child {call_id}", text=text, usage=ledger.used)

    return spawn


async def test_child_runs_do_not_wait_for_their_own_places(bench_of: Any) -> None:
    """With one place for plain calls, children that make such calls still end."""
    async with ScriptedServer(reply=lambda prompt: f"re: {prompt}") as server:
        bench: Bench = bench_of(server, concurrency=1)
        spawn = child_of(bench, calls=2)
        batch = bench.submit([f"p{i}" for i in range(9)], kind="rlm", spawn_child=spawn)
        outcomes = await batch.wait()

        assert [outcome.text for outcome in outcomes] == [
            f"re: p{i}.0 re: p{i}.1" for i in range(9)
        ]
        assert {e.child_run_id for e in bench.ended if e.child_run_id} == {
            f"child {outcome.call_id}" for outcome in outcomes
        }
        bench.check_pairs()


async def test_tokens_of_a_child_are_booked_once(bench: Bench, server: ScriptedServer) -> None:
    """The record shows them at the sub-call, the ledger counts the child's own calls."""
    spawn = child_of(bench, calls=3)
    await bench.submit(["p"], kind="rlm", spawn_child=spawn).wait()

    plain = [event for event in bench.ended if not event.child_run_id]
    child = next(event for event in bench.ended if event.child_run_id)
    assert child.usage.tokens == sum(event.usage.tokens for event in plain)
    assert bench.ledger.used.tokens == child.usage.tokens
    assert bench.ledger.subcalls == 4


async def test_four_child_runs_at_most_are_under_way(bench: Bench) -> None:
    """Each has a process and a P of its own."""
    active, peak = 0, 0
    full = asyncio.Event()

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        if active == 4:
            full.set()
        await full.wait()
        active -= 1
        return ChildOutcome(run_id="c", text="done", usage=Usage())

    outcomes = await bench.submit(["p"] * 10, kind="rlm", spawn_child=spawn).wait()

    assert [outcome.text for outcome in outcomes] == ["done"] * 10
    assert peak == 4


async def test_cancelling_a_batch_of_child_runs_cancels_them(bench_of: Any) -> None:
    """And through them the calls that they made."""
    async with ScriptedServer(reply=lambda prompt: Hang()) as server:
        bench: Bench = bench_of(server)
        batch = bench.submit(["p", "q"], kind="rlm", spawn_child=child_of(bench, calls=2))
        await server.until(lambda s: s.active == 4)
        batch.cancel()
        outcomes = await batch.wait()
        await server.until(lambda s: s.active == 0)
        await bench.scheduler.close()

        assert all("cancelled" in str(outcome.error) for outcome in outcomes)
        bench.check_pairs()


async def test_a_child_run_without_an_answer_is_an_error(bench: Bench) -> None:
    """In the outcome and in the record, with the run that it was."""

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        return ChildOutcome(run_id="c1", error=SubcallError("it stopped: 30 turns"), usage=Usage())

    outcomes = await bench.submit(["p"], kind="rlm", spawn_child=spawn).wait()

    assert str(outcomes[0].error) == "it stopped: 30 turns"
    assert (bench.ended[0].ok, bench.ended[0].child_run_id) == (False, "c1")


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_child_runs_are_plain_calls_beyond_the_depth(
    bench_of: Any, server: ScriptedServer, depth: int
) -> None:
    """``max_depth`` levels below the first run are child runs, and the record says where not."""
    bench: Bench = bench_of(server, budget=Budget(max_depth=depth))

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        return ChildOutcome(run_id="c", text="child")

    ledger = bench.ledger
    for level in range(depth + 1):
        outcomes = await bench.submit(
            ["p"],
            kind="rlm",
            spawn_child=spawn,
            ledger=ledger,
            params=SubcallParams(query="What is it?"),
        ).wait()
        last = bench.started[-1]
        if level < depth:
            assert (outcomes[0].text, last.kind, last.note) == ("child", "rlm", "")
        else:
            assert (outcomes[0].text, last.kind) == ("re: What is it?\n\np", "llm")
            assert "depth limit" in last.note
        ledger = ledger.child()
