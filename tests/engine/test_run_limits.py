"""The limits of its budget and of those above end a run before they are overspent."""

from __future__ import annotations

import asyncio

import pytest

from rlm_kernel.engine.budget import Budget, Cost, Ledger, Usage
from rlm_kernel.engine.events import (
    TurnObserved,
    TurnProposed,
)
from rlm_kernel.engine.roots import HumanRoot, PlaybookRoot
from rlm_kernel.prices import Price
from tests.engine.conftest import Stage, cell, chat
from tests.servers.scripted import Say, ScriptedServer


async def test_the_deadline_ends_a_run_whose_cell_never_returns(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["await hold()"]), Budget(max_seconds=0.05))
    ended = await run.run()

    assert ended.state == "stopped"
    assert "0.05 seconds" in ended.reason
    assert stage.repl.interrupted


async def test_the_deadline_of_the_run_above_ends_a_run_whose_root_never_replies(
    stage: Stage,
) -> None:
    above = Ledger(Budget(max_seconds=0.05))
    run = stage.run(HumanRoot(), ledger=above.child(Budget()))
    ended = await run.run()

    assert ended.state == "stopped"
    assert "0.05 seconds" in ended.reason


async def test_the_turn_limit_stops_the_run_and_the_root_is_warned(stage: Stage) -> None:
    ended = await stage.run(PlaybookRoot(["1"] * 9), Budget(max_turns=5)).run()
    observations = [e.observation for e in stage.of(TurnObserved)]

    assert (ended.state, ended.turns) == ("stopped", 5)
    assert "max_turns" in ended.reason
    assert ["left" in text for text in observations] == [False, True, True, False, False]
    assert "This is the last turn" in observations[3]


async def test_the_token_limit_stops_the_run_before_it_is_overspent(stage: Stage) -> None:
    async with ScriptedServer(reply=lambda prompt: cell("print('x' * 2000)")) as server:
        root = chat(server, max_tokens=100)
        ended = await stage.run(root, Budget(max_tokens=12_000)).run()
        await root.close()

    assert ended.state == "stopped"
    assert "max_tokens" in ended.reason
    assert 0 < ended.usage.tokens <= 12_000
    assert ended.usage.calls == len(server.requests)


async def test_a_root_that_only_thinks_keeps_to_the_token_limit(stage: Stage) -> None:
    """Also where its server keeps to no bound: its thoughts are counted as they come."""
    async with ScriptedServer(reply=lambda _: Say("", reasoning="I think so. " * 9000)) as server:
        root = chat(server)
        ended = await stage.run(root, Budget(max_tokens=5_000)).run()
        await root.close()

    assert ended.state == "stopped"
    # The piece that reaches the limit is counted whole.
    assert 4_000 < ended.usage.tokens <= 5_020
    assert all(r.body["max_tokens"] < 5_000 for r in server.requests)


async def test_the_money_limit_stops_the_run_before_it_is_overspent(stage: Stage) -> None:
    price = Price(input=10, output=40)
    async with ScriptedServer(reply=lambda prompt: cell("print('x' * 2000)")) as server:
        root = chat(server, prices={"scripted": price})
        ended = await stage.run(root, Budget(max_cost=0.5)).run()
        await root.close()

    assert ended.state == "stopped"
    assert "max_cost" in ended.reason
    assert len(server.requests) > 1
    assert 0 < ended.usage.cost <= 0.5
    assert ended.usage.cost == pytest.approx(sum(e.usage.cost for e in stage.of(TurnProposed)))
    assert all(r.body["max_tokens"] > 0 for r in server.requests)


async def test_a_root_without_a_price_stops_under_a_money_limit(stage: Stage) -> None:
    async with ScriptedServer([cell("1"), cell("2")]) as server:
        root = chat(server, prices={})
        ended = await stage.run(root, Budget(max_cost=9)).run()
        await root.close()

    assert (ended.state, len(server.requests)) == ("stopped", 1)
    assert f"the price of {root.name} is not known" in ended.reason
    assert "RLM_PRICES" in ended.reason


async def test_a_cost_that_the_server_of_a_root_names_counts(stage: Stage) -> None:
    said = Say("No cell.", cost=0.75), Say("Again none.", cost=0.5)
    async with ScriptedServer(said) as server:
        root = chat(server, prices={})
        ended = await stage.run(root, Budget(max_cost=9)).run()
        await root.close()

    assert (len(server.requests), ended.usage.cost) == (2, 1.25)


async def test_a_run_above_that_has_spent_its_tokens_stops_the_child(stage: Stage) -> None:
    above = Ledger(Budget(max_tokens=100))
    above.used = Usage(input_tokens=100)
    ended = await stage.run(PlaybookRoot(["1"]), ledger=above.child(Budget())).run()

    assert (ended.state, ended.turns) == ("stopped", 0)


async def test_a_root_waits_for_what_sub_calls_set_aside_and_give_back(stage: Stage) -> None:
    """A child run does not stop because the calls of others hold the budget for a moment."""
    above = Ledger(Budget(max_tokens=20_000))
    held = above.reserve(Cost(tokens=19_900))
    async with ScriptedServer(["```repl\nFinal = 1\n```"]) as server:
        root = chat(server, max_tokens=100)
        run = asyncio.create_task(stage.run(root, ledger=above.child(Budget())).run())
        async with asyncio.timeout(20):
            while not above._waiting and not run.done():  # noqa: ASYNC110 - it waits unseen
                await asyncio.sleep(0)
        held.settle(Usage(input_tokens=10))
        ended = await asyncio.wait_for(run, 20)
        await root.close()

    assert ended.state == "answered"
    assert above.reserved == Cost()


async def test_a_root_that_waits_for_the_budget_can_be_stopped(stage: Stage) -> None:
    """And leaves nothing set aside."""
    above = Ledger(Budget(max_tokens=20_000))
    held = above.reserve(Cost(tokens=19_900))
    async with ScriptedServer() as server:
        root = chat(server, max_tokens=100)
        run = stage.run(root, ledger=above.child(Budget()))
        ending = asyncio.create_task(run.run())
        async with asyncio.timeout(20):
            while not above._waiting and not ending.done():  # noqa: ASYNC110 - it waits unseen
                await asyncio.sleep(0)
        run.stop("enough")
        ended = await asyncio.wait_for(ending, 20)
        await root.close()
    held.release()

    assert (ended.state, ended.reason) == ("stopped", "enough")
    assert above.reserved == Cost()
