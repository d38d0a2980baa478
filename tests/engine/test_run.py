"""A run goes through its states in order, pauses in one place, and ends once, saying how."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from rlm_kernel.cells import CellResult
from rlm_kernel.engine.budget import Budget, Ledger, Usage
from rlm_kernel.engine.decisions import Decision, Proposal, ask
from rlm_kernel.engine.dialects import RLMS
from rlm_kernel.engine.events import (
    AnswerRejected,
    Event,
    ReplyStreamed,
    RunEnded,
    RunPaused,
    RunResumed,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.engine.roots import ChatRoot, HumanRoot, Message, PlaybookRoot
from rlm_kernel.engine.run import Run
from rlm_kernel.errors import RecordError, UsageError, WorkerDied
from rlm_kernel.prices import Price
from tests.engine.conftest import Stage
from tests.servers.scripted import Cut, ErrorEvent, Ramble, Refuse, Say, ScriptedServer


def cell(source: str, prose: str = "Next.") -> str:
    return f"{prose}\n\n```repl\n{source}\n```\n"


def chat(server: ScriptedServer, **options: object) -> ChatRoot:
    return ChatRoot("scripted", server.base_url, "key", backoff=0.001, **options)  # type: ignore[arg-type]


TURN = [
    "TurnStarted",
    "TurnProposed",
    "TurnDecided",
    "TurnExecuting",
    "TurnExecuted",
    "TurnObserved",
]


async def test_a_run_of_two_turns_is_answered_with_a_typed_value(stage: Stage) -> None:
    run = stage.run(
        PlaybookRoot([("Look.", "print(len(P))"), ("Done.", "Final = [P.find('hay')]")])
    )
    ended = await run.run()

    assert (ended.state, ended.response) == ("answered", "[10]")
    assert ended.answer is not None
    assert ended.answer.data == [10]
    assert (ended.turns, run.state) == (2, "answered")
    assert stage.names == ["RunStarted", *TURN, *TURN, "RunEnded"]
    assert stage.of(TurnObserved)[0].observation.startswith("13\n")


async def test_every_state_is_told_before_what_comes_of_it(stage: Stage) -> None:
    states: list[tuple[str, str]] = []
    run = stage.run(PlaybookRoot(["Final = 1"]))
    emit = run._emit

    def watch(event: Event) -> None:
        states.append((type(event).__name__, run.state))
        emit(event)

    run._emit = watch
    await run.run()

    assert [pair for pair in states if pair[0] != "ReplyStreamed"] == [
        ("RunStarted", "idle"),
        ("TurnStarted", "proposing"),
        ("TurnProposed", "proposed"),
        ("TurnDecided", "proposed"),
        ("TurnExecuting", "executing"),
        ("TurnExecuted", "executing"),
        ("TurnObserved", "observing"),
        ("RunEnded", "answered"),
    ]


async def test_a_chat_root_sees_its_query_its_cells_and_their_observations(stage: Stage) -> None:
    async with ScriptedServer([cell("print(P[:6])"), cell("FINAL('hay')")]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.response == "hay"
    first, second = server.requests
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert "Where is the needle?" in first.prompt
    assert "13 characters" in first.prompt
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2]["content"] == cell("print(P[:6])").strip()
    assert second.prompt.startswith("needle\n")


async def test_the_stream_is_cut_where_the_cell_ends(stage: Stage) -> None:
    """A root cannot make up the output of its own cell: what it says after it is not heard."""
    made_up = cell("print(1)") + "The output is 5.\n\n" + cell("FINAL(5)") * 500
    async with ScriptedServer([made_up, cell("FINAL(1)")]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await server.until(lambda s: s.active == 0)
        await root.close()

    proposed = stage.of(TurnProposed)[0]
    assert ended.response == "1"
    assert proposed.finish == "fence"
    assert proposed.reply == cell("print(1)").rstrip("\n")
    assert "5" not in str(server.requests[1].messages[2:])


async def test_streamed_text_is_the_reply_without_gaps_and_precedes_the_proposal(
    stage: Stage,
) -> None:
    async with ScriptedServer([Say(cell("x = 1\n" * 400), chunk=3), cell("FINAL(x)")]) as server:
        root = chat(server)
        await stage.run(root).run()
        await root.close()

    streamed = [e for e in stage.of(ReplyStreamed) if e.turn == 1]
    joined = ""
    for event in streamed:
        assert event.offset == len(joined)
        joined += event.text
    assert joined == stage.of(TurnProposed)[0].reply
    assert stage.events.index(streamed[-1]) < stage.events.index(stage.of(TurnProposed)[0])
    # 800 deltas came, joined to far fewer events.
    assert len(streamed) < 100


async def test_a_child_run_can_keep_its_stream_to_itself(stage: Stage) -> None:
    await stage.run(PlaybookRoot(["Final = 1"]), hide_stream=True).run()
    assert stage.of(ReplyStreamed) == []


async def test_the_repl_gets_every_message_once_as_history(stage: Stage) -> None:
    run = stage.run(PlaybookRoot(["1", "2", "Final = 3"]))
    await run.run()

    assert stage.repl.seen == run.history[:-1]
    assert [m.role for m in stage.repl.seen] == ["system", "user"] + ["assistant", "user"] * 2 + [
        "assistant"
    ]


# --- answers ----------------------------------------------------------------------------------


async def test_an_answer_of_a_cell_that_raised_is_rejected_and_told(stage: Stage) -> None:
    root = PlaybookRoot(["FINAL(1)\n1/0", "FINAL(2)"])
    ended = await stage.run(root).run()

    assert ended.response == "2"
    assert stage.of(AnswerRejected) == [
        AnswerRejected(turn=1, reason="the cell that set it ended with ZeroDivisionError")
    ]
    assert "The answer was not accepted" in stage.of(TurnObserved)[0].observation


async def test_an_answer_that_is_ready_and_empty_is_rejected(stage: Stage) -> None:
    root = PlaybookRoot(["answer['ready'] = True", "answer.update(content=0, ready=True)"])
    ended = await stage.run(root, dialect=RLMS).run()

    assert [e.turn for e in stage.of(AnswerRejected)] == [1]
    assert (ended.state, ended.response) == ("answered", "0")


@pytest.mark.parametrize(
    ("source", "response"), [("Final = 0", "0"), ("FINAL([])", "[]"), ("FINAL('')", "")]
)
async def test_falsy_answers_are_answers(stage: Stage, source: str, response: str) -> None:
    ended = await stage.run(PlaybookRoot([source])).run()
    assert (ended.state, ended.response) == ("answered", response)


async def test_an_answer_ends_the_run_even_if_it_was_the_last_turn(stage: Stage) -> None:
    ended = await stage.run(PlaybookRoot(["1", "Final = 2"]), Budget(max_turns=2)).run()
    assert ended.state == "answered"


async def test_a_bare_final_statement_is_evaluated_in_the_repl(stage: Stage) -> None:
    async with ScriptedServer([cell("found = (1, 2)"), "I am sure.\n\nFINAL(found)"]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.answer is not None
    assert ended.answer.data == (1, 2)


# --- replies without code ---------------------------------------------------------------------


async def test_a_reply_without_code_is_counted_and_asked_again(stage: Stage) -> None:
    async with ScriptedServer(["Let me think.", cell("FINAL(1)")]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "answered"
    assert (ended.turns, [e.attempt for e in stage.of(TurnStarted)]) == (1, [1, 2])
    assert stage.names[1:4] == ["TurnStarted", "ReplyWithoutCode", "TurnStarted"]
    assert "held no cell" in server.requests[1].prompt


async def test_a_second_reply_without_code_in_a_row_stops_the_run(stage: Stage) -> None:
    async with ScriptedServer(["Hm.", cell("1"), "Hm.", ""]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "stopped"
    assert "without a cell twice in a row" in ended.reason
    assert len(server.requests) == 4


async def test_half_a_cell_is_not_run(stage: Stage) -> None:
    """A reply that hit its length limit inside the cell is asked for again."""
    cut = Say("```repl\nimport shutil\nshutil.rmtree('/tmp/x", finish="length")
    async with ScriptedServer([cut, cell("FINAL(1)")]) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "answered"
    assert [e.source for e in stage.of(TurnExecuting)] == ["FINAL(1)"]
    assert "cut off" in server.requests[1].prompt


# --- decisions --------------------------------------------------------------------------------


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


# --- ends -------------------------------------------------------------------------------------


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


async def test_a_playbook_generator_sees_observations(stage: Stage) -> None:
    seen: list[str] = []

    def cells() -> Generator[tuple[str, str], str, None]:
        seen.append((yield "Look.", "print(len(P))"))
        yield "Answer.", f"Final = {seen[0].split()[0]}"

    ended = await stage.run(PlaybookRoot(cells)).run()
    assert ended.response == "13"


async def test_a_person_can_be_the_root(stage: Stage) -> None:
    async def write(messages: object) -> str:
        return "Final = '```'"

    ended = await stage.run(HumanRoot(write)).run()
    assert ended.response == "```"
    assert [e.sampled for e in stage.of(TurnProposed)] == [False]


# --- context ----------------------------------------------------------------------------------


async def test_a_conversation_that_fills_the_context_is_summarised(stage: Stage) -> None:
    def reply(prompt: str) -> str:
        if "Write a summary" in prompt:
            return "<think>hm</think>Found nothing yet in `hits`."
        return cell("print('x' * 3000)") if len(stage.of(TurnExecuted)) < 9 else cell("FINAL(1)")

    async with ScriptedServer(reply=reply, models={"scripted": 6000}) as server:
        root = chat(server)
        run = stage.run(root)
        ended = await run.run()
        await root.close()

    assert ended.state == "answered"
    assert "Compacted" in stage.names
    for request in server.requests:
        roles = [m["role"] for m in request.messages]
        assert roles == ["system", "user"] + ["assistant", "user"] * ((len(roles) - 2) // 2)
        assert sum(len(m["content"]) for m in request.messages) / 4 < 6000
    assert any("Found nothing yet" in str(r.messages) for r in server.requests)
    assert "hm" not in [m["content"] for m in server.requests[-1].messages]
    assert len(run.history) == 2 + 2 * 10
    assert stage.repl.seen == run.history[:-1]


async def test_a_context_is_made_to_fit_even_where_no_summary_can_be_had(stage: Stage) -> None:
    def reply(prompt: str) -> str | Refuse:
        if "Write a summary" in prompt:
            return Refuse(400, "maximum context length is 6000 tokens")
        return cell("print('x' * 3000)") if len(stage.of(TurnExecuted)) < 9 else cell("FINAL(1)")

    async with ScriptedServer(reply=reply, models={"scripted": 6000}) as server:
        root = chat(server)
        ended = await stage.run(root).run()
        await root.close()

    assert ended.state == "answered"
    assert "Earlier turns were left out" in str(server.requests[-1].messages)


def test_a_run_is_a_run_control() -> None:
    from rlm_kernel.engine.decisions import RunControl

    control: type[RunControl] = Run
    assert control is Run
    assert Message("user", "x").role == "user"
