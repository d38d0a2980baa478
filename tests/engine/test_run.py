"""A run goes through its states in order and ends with a typed answer."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.dialects import RLMS
from rlm_kernel.engine.events import (
    AnswerRejected,
    Event,
    ReplyStreamed,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.engine.roots import HumanRoot, Message, PlaybookRoot
from rlm_kernel.engine.run import Run
from tests.engine.conftest import Stage, cell, chat
from tests.servers.scripted import Refuse, Say, ScriptedServer

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
