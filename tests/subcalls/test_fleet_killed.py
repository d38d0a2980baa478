"""Servers in processes of their own, killed in the middle of a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlm_kernel.config import EndpointSpec
from rlm_kernel.engine.budget import Budget
from rlm_kernel.subcalls.fleet.fleet import Fleet
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from tests.servers.scripted import MODEL
from tests.subcalls.conftest import Bench
from tests.subcalls.faulty import FaultyProcess, faulty_processes

CALLS = 1000
BUDGET = Budget(max_concurrency=48)


def fleet_before(processes: list[FaultyProcess], **options: Any) -> Fleet:
    specs = [EndpointSpec(kind="openai", model=MODEL, base_url=p.base_url) for p in processes]
    members = [OpenAIEndpoint(spec, "none") for spec in specs]
    return Fleet("openai:scripted@all", MODEL, members, cooldown_s=0.05, **options)


async def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until *true*, which is asked again and again."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - processes are waited for
            await asyncio.sleep(0.005)


def served(bench: Bench, since: int = 0) -> Counter[str]:
    """Calls that each server answered, from the end number *since* on."""
    return Counter(event.server for event in bench.ended[since:])


async def test_a_thousand_calls_survive_faults_and_the_death_of_a_server(bench_of: Any) -> None:
    """Of three servers that fail 2 % of their requests one is killed and started again: every
    call has its reply at its place, and the server takes part again."""
    with faulty_processes(3) as processes:
        bench: Bench = bench_of(fleet_before(processes), budget=BUDGET)
        batch = bench.submit([str(number) for number in range(CALLS)])
        await until(lambda: len(bench.ended) >= CALLS // 4)
        lost = processes.pop(0)
        lost.kill()
        await until(lambda: len(bench.ended) >= CALLS // 2)
        back = await asyncio.to_thread(FaultyProcess, lost.port)
        processes.append(back)
        outcomes = await batch.wait()

        assert [outcome.error for outcome in outcomes] == [None] * CALLS
        assert [outcome.text for outcome in outcomes] == [f"re: {n}" for n in range(CALLS)]
        assert [outcome.index for outcome in outcomes] == list(range(CALLS))
        assert sum(event.attempts for event in bench.ended) > CALLS
        bench.check_pairs()

        async def until_it_takes_part() -> None:
            since = len(bench.ended)
            while not served(bench, since)[lost.base_url]:
                await bench.submit([str(number) for number in range(100)]).wait()

        await asyncio.wait_for(until_it_takes_part(), 60)


async def test_the_death_of_all_servers_is_an_error_for_every_call_left(bench_of: Any) -> None:
    """Those that had finished keep their replies."""
    with faulty_processes(2) as processes:
        bench: Bench = bench_of(fleet_before(processes, patience_s=0.5), budget=BUDGET)
        batch = bench.submit([str(number) for number in range(CALLS)])
        await until(lambda: len(bench.ended) >= CALLS // 4)
        while processes:
            processes.pop().kill()
        outcomes = await batch.wait()

        good = [outcome for outcome in outcomes if outcome.error is None]
        assert len(good) >= CALLS // 4
        assert all(outcome.text == f"re: {outcome.index}" for outcome in good)
        errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
        assert len(errors) == CALLS - len(good) > 0
        assert {error.split(":")[0] for error in errors} == {
            "none of the 2 servers of 'scripted' takes calls"
        }
        bench.check_pairs()


async def test_one_server_that_comes_back_in_time_finishes_everything(bench_of: Any) -> None:
    """All were dead; the calls waited."""
    with faulty_processes(2) as processes:
        bench: Bench = bench_of(fleet_before(processes, patience_s=60), budget=BUDGET)
        batch = bench.submit([str(number) for number in range(CALLS)])
        await until(lambda: len(bench.ended) >= CALLS // 4)
        port = processes[0].port
        while processes:
            processes.pop().kill()
        processes.append(await asyncio.to_thread(FaultyProcess, port))
        outcomes = await batch.wait()

        assert [outcome.text for outcome in outcomes] == [f"re: {n}" for n in range(CALLS)]
        bench.check_pairs()
