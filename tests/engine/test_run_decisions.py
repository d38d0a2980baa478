"""A run pauses in one place, for the decision of a person or a policy."""

from __future__ import annotations

import asyncio

import pytest

from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.decisions import Decision, Proposal, ask
from rlm_kernel.engine.events import (
    RunPaused,
    RunResumed,
    TurnDecided,
    TurnExecuting,
    TurnProposed,
)
from rlm_kernel.engine.roots import PlaybookRoot
from rlm_kernel.errors import UsageError
from tests.engine.conftest import Stage, cell, chat
from tests.servers.scripted import ScriptedServer


async def test_stepping_waits_for_a_decision_and_tells_it_first(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["Final = 1"]), policy=ask)
    task = asyncio.ensure_future(run.run())
    paused = await stage.until(RunPaused)
    await asyncio.sleep(0)

    assert paused.turn == 1
    assert run.proposal == Proposal(turn=1, source="Final = 1")
    assert (run.state, stage.of(TurnExecuting)) == ("proposed", [])
    run.decide(Decision(action="run", by="lab"))
    assert run.proposal is None
    ended = await task
    assert ended.state == "answered"
    assert stage.of(TurnDecided) == [TurnDecided(turn=1, action="run", by="lab")]


async def test_an_edit_runs_and_the_root_sees_it_as_its_own(stage: Stage) -> None:
    async with ScriptedServer([cell("print('wrong')", "Look."), cell("FINAL(1)")]) as server:
        root = chat(server)
        edits = [Decision(action="edit", source="print('right')", by="lab"), Decision(action="run")]
        await stage.run(root, policy=lambda proposal: edits.pop(0)).run()
        await root.close()

    assert stage.of(TurnProposed)[0].source == "print('wrong')"
    assert stage.of(TurnExecuting)[0].source == "print('right')"
    sent = server.requests[1].messages
    assert sent[2]["content"] == cell("print('right')", "Look.").strip()
    assert "wrong" not in str(sent)


async def test_regenerate_asks_again_and_the_note_is_said_once(stage: Stage) -> None:
    script = [cell("print(1)"), cell("print(2)"), cell("FINAL(3)")]
    decisions = [Decision(action="regenerate", note="too short"), *[Decision(action="run")] * 2]
    async with ScriptedServer(script) as server:
        root = chat(server)
        await stage.run(root, policy=lambda proposal: decisions.pop(0)).run()
        await root.close()

    assert [(e.turn, e.attempt) for e in stage.of(TurnProposed)] == [(1, 1), (1, 2), (2, 1)]
    assert "too short" in server.requests[1].prompt
    assert "print(1)" in str(server.requests[1].messages)
    assert "too short" not in str(server.requests[2].messages)
    assert "print(1)" not in str(server.requests[2].messages)


async def test_regenerate_without_a_note_asks_the_same_again(stage: Stage) -> None:
    decisions = [Decision(action="regenerate"), Decision(action="run")]
    async with ScriptedServer([cell("1"), cell("FINAL(2)")]) as server:
        root = chat(server)
        await stage.run(root, policy=lambda proposal: decisions.pop(0)).run()
        await root.close()

    assert server.requests[0].messages == server.requests[1].messages


async def test_regenerating_in_the_last_turn_costs_no_turn(stage: Stage) -> None:
    decisions = [Decision(action="regenerate"), Decision(action="run")]
    run = stage.run(
        PlaybookRoot(["Final = 1"]),
        Budget(max_turns=1),
        policy=lambda proposal: decisions.pop(0),
    )
    assert (await run.run()).state == "answered"


async def test_a_policy_that_accepts_no_proposal_stops_the_run(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1"]), policy=lambda proposal: Decision(action="regenerate"))
    async with asyncio.timeout(20):
        ended = await run.run()

    assert ended.state == "stopped"
    assert "none of 20 proposals for turn 1 was accepted" in ended.reason
    assert len(stage.of(TurnProposed)) == len(stage.of(TurnDecided)) == 20


async def test_a_skipped_cell_is_not_run_and_the_root_is_told_why(stage: Stage) -> None:
    decisions = [Decision(action="skip", note="it prints P"), Decision(action="run")]
    async with ScriptedServer([cell("print(P)"), cell("FINAL(1)")]) as server:
        root = chat(server)
        await stage.run(root, policy=lambda proposal: decisions.pop(0)).run()
        await root.close()

    assert [e.source for e in stage.of(TurnExecuting)] == ["FINAL(1)"]
    assert "it prints P" in server.requests[1].prompt
    assert [m["role"] for m in server.requests[1].messages][-2:] == ["assistant", "user"]


async def test_the_decision_stop_ends_the_run(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1"]), policy=lambda proposal: Decision(action="stop", by="lab"))
    ended = await run.run()

    assert (ended.state, ended.reason) == ("stopped", "stopped by lab")
    assert stage.names[-2:] == ["TurnDecided", "RunEnded"]


async def test_pause_waits_at_the_next_proposal_and_resume_goes_on(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["await hold()", "2", "Final = 3"]))
    task = asyncio.ensure_future(run.run())
    await stage.repl.running.wait()
    run.pause()
    stage.repl.gate.set()
    paused = await stage.until(RunPaused)
    assert paused.turn == 2
    run.resume()
    ended = await task

    assert ended.state == "answered"
    assert stage.of(RunResumed) == [RunResumed(turn=2)]
    assert len(stage.of(RunPaused)) == 1


async def test_decisions_that_are_not_possible_are_refused(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["Final = 1"]), policy=ask)
    with pytest.raises(UsageError, match="no proposal waits"):
        run.decide(Decision(action="run"))
    task = asyncio.ensure_future(run.run())
    await stage.until(RunPaused)
    with pytest.raises(UsageError, match="needs the new source"):
        run.decide(Decision(action="edit", source="  "))
    run.decide(Decision(action="run"))
    with pytest.raises(UsageError, match="no proposal waits"):
        run.decide(Decision(action="run"))
    await task
