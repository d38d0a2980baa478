"""A run ends once, whatever ends it, and says how."""

from __future__ import annotations

import asyncio

import pytest

from rlm_kernel.cells import CellResult
from rlm_kernel.engine.decisions import Decision, Proposal, ask
from rlm_kernel.engine.events import (
    Event,
    ReplyStreamed,
    RunEnded,
    RunPaused,
    TurnExecuted,
    TurnExecuting,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.engine.roots import HumanRoot, PlaybookRoot
from rlm_kernel.errors import RecordError, UsageError, WorkerDied
from tests.engine.conftest import Stage, cell, chat
from tests.servers.scripted import Cut, ErrorEvent, Ramble, Refuse, ScriptedServer


async def test_a_stop_cuts_the_stream_of_the_root(stage: Stage) -> None:
    async with ScriptedServer([Ramble()]) as server:
        root = chat(server)
        run = stage.run(root)
        task = asyncio.ensure_future(run.run())
        await stage.until(ReplyStreamed)
        run.stop("enough")
        ended = await task
        await server.until(lambda s: s.active == 0)
        await root.close()

    assert (ended.state, ended.reason) == ("stopped", "enough")
    assert server.cancelled == 1
    assert ended.usage.estimated
    assert ended.usage.output_tokens > 0


async def test_a_stop_interrupts_the_cell_and_keeps_what_it_did(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["print('begun')\nawait hold()"]))
    task = asyncio.ensure_future(run.run())
    await stage.repl.running.wait()
    run.stop("enough")
    ended = await task

    assert stage.repl.interrupted
    assert ended.reason == "enough"
    assert "begun" in str(stage.of(TurnExecuted)[0].result.outputs)


async def test_a_stop_cancels_a_cell_that_cannot_be_interrupted(stage: Stage) -> None:
    class Stubborn:
        cancelled = False

        async def execute(self, turn: int, source: str, history: object) -> CellResult:
            stage.repl.running.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError

    executor = Stubborn()
    run = stage.run(PlaybookRoot(["1"]), executor=executor)
    task = asyncio.ensure_future(run.run())
    await stage.repl.running.wait()
    run.stop("enough")
    assert (await task).state == "stopped"
    assert executor.cancelled


async def test_a_stop_ends_the_wait_for_a_person(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1"]), policy=ask)
    task = asyncio.ensure_future(run.run())
    await stage.until(RunPaused)
    run.stop("enough")

    assert (await task).reason == "enough"
    assert run.proposal is None


async def test_a_run_that_is_stopped_before_it_begins_asks_nobody(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1"]))
    run.stop("never mind")

    assert (await run.run()).reason == "never mind"
    assert stage.names == ["RunStarted", "RunEnded"]


async def test_a_playbook_that_ends_without_an_answer_stops_the_run(stage: Stage) -> None:
    ended = await stage.run(PlaybookRoot(["1", "2"])).run()
    assert (ended.state, ended.reason) == (
        "stopped",
        "the playbook ended without setting an answer",
    )


@pytest.mark.parametrize("fault", [Refuse(401), Cut("half a th"), ErrorEvent(text="half")])
async def test_a_root_that_cannot_be_asked_fails_the_run(stage: Stage, fault: Refuse) -> None:
    async with ScriptedServer([cell("1"), fault]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "failed"
    assert root.name in ended.reason
    assert len(stage.of(TurnExecuted)) == 1


async def test_a_stream_that_was_cut_after_its_cell_is_used(stage: Stage) -> None:
    async with ScriptedServer([Cut(cell("FINAL(1)").rstrip("\n"))]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "answered"
    assert stage.of(TurnProposed)[0].finish == "cut"


async def test_an_executor_that_fails_fails_the_run(stage: Stage) -> None:
    class Broken:
        async def execute(self, turn: int, source: str, history: object) -> CellResult:
            raise WorkerDied("the worker is gone")

    ended = await stage.run(PlaybookRoot(["1"]), executor=Broken()).run()
    assert (ended.state, ended.reason) == ("failed", "the worker is gone")


async def test_a_record_that_breaks_fails_the_run(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["await hold()"]))
    task = asyncio.ensure_future(run.run())
    await stage.repl.running.wait()
    run.fail("the disk is full")
    assert ((await task).state, (await task).reason) == ("failed", "the disk is full")


async def test_an_event_that_cannot_be_recorded_ends_the_run(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1"] * 9))
    emit = run._emit

    def full(event: Event) -> None:
        if isinstance(event, TurnExecuting):
            raise RecordError("the disk is full")
        emit(event)

    run._emit = full
    ended = await run.run()

    assert (ended.state, ended.reason) == ("failed", "the disk is full")
    assert stage.repl.seen == []


@pytest.mark.parametrize("where", ["proposing", "proposed", "executing"])
async def test_a_cancelled_run_still_tells_its_end(stage: Stage, where: str) -> None:
    roots = {"proposing": HumanRoot(), "proposed": PlaybookRoot(["1"])}
    root = roots.get(where, PlaybookRoot(["await hold()"]))
    run = stage.run(root, **({"policy": ask} if where == "proposed" else {}))
    task = asyncio.ensure_future(run.run())
    if where == "executing":
        await stage.repl.running.wait()
    else:
        await stage.until(TurnStarted if where == "proposing" else RunPaused)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert stage.of(RunEnded) == [stage.events[-1]]
    assert stage.of(RunEnded)[0].reason == "the run was cancelled"


async def test_a_bug_is_told_as_the_end_and_not_hidden(stage: Stage) -> None:
    def broken(proposal: Proposal) -> Decision:
        raise KeyError("oops")

    with pytest.raises(KeyError):
        await stage.run(PlaybookRoot(["1"]), policy=broken).run()
    assert [e.state for e in stage.of(RunEnded)] == ["failed"]


async def test_a_run_runs_once(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["Final = 1"]))
    await run.run()
    with pytest.raises(UsageError, match="started already"):
        await run.run()
    assert len(stage.of(RunEnded)) == 1
