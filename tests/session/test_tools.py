"""Tools of a run in a program: functions that the models of its sub-calls use, its root not."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel import RLM, Budget
from rlm_kernel.engine.events import SubcallStarted, ToolCalled, WorkerLost
from rlm_kernel.errors import UsageError
from rlm_kernel.record import Record
from tests.servers.scripted import AskTools, Say, ScriptedServer, Step
from tests.session.conftest import Serve

Make = Callable[..., RLM]

LINES = ["the first line", "the second line"]


def line(number: int) -> str:
    """Return one line of the material."""
    return LINES[number]


def where() -> int:
    """Return the process that this runs in."""
    return os.getpid()


def asking(*uses: tuple[str, Any]) -> Callable[[str], Step]:
    """A sub-model that uses each of *uses* once, and then says what it was told."""
    rounds = [AskTools(((name, json.dumps(arguments)),)) for name, arguments in uses]
    state = {"at": 0}

    def reply(prompt: str) -> Step:
        at = state["at"] % (len(rounds) + 1)
        state["at"] += 1
        return rounds[at] if at < len(rounds) else Say(f"told: {prompt}")

    return reply


def used(done: Any) -> list[ToolCalled]:
    return [s.event for s in done.run.events() if isinstance(s.event, ToolCalled)]


def test_a_sub_model_uses_functions_of_the_program(rlm: Make, serve: Serve) -> None:
    """With what they refer to, in the worker's process; the root's cells do not have them."""
    sub = serve(reply=asking(("line", {"number": 1}), ("where", {})))
    made = rlm(
        "r = sub_RLM('which?')",
        "Final = r, os.getpid() if 'os' in globals() else __import__('os').getpid(),"
        " [n for n in ('line', 'where') if n in globals()]",
        sub=sub,
        tools=[line, where],
    )
    done = made.completion("P", query="q")
    text, worker, names = done.answer  # type: ignore[misc]
    first, second = used(done)
    assert (first.text, second.text, text) == (LINES[1], str(worker), f"told: {worker}")
    assert worker != os.getpid()
    assert names == []


def test_the_root_is_not_told_of_tools(serve: Serve, tmp_path: Path) -> None:
    """Neither as tools of its requests nor in its prompt; their outputs do not reach it."""
    root = serve(["```repl\nprint(sub_RLM('which?'))\n```", "```repl\nFinal = 1\n```"])
    sub = serve(reply=asking(("line", {"number": 0})))
    made = RLM(
        root=f"openai:scripted@{root.base_url}",
        sub=f"openai:scripted@{sub.base_url}",
        tools=[line],
        record=tmp_path / "r.sqlite",
    )
    made.completion("P", query="q")
    sent = json.dumps([request.body for request in root.requests])
    assert "one line of the material" not in sent
    assert "tools" not in root.requests[0].body
    assert "one line of the material" in json.dumps(sub.requests[0].body)


def test_tools_are_handed_on_to_the_sub_calls_of_a_child_run(serve: Serve, tmp_path: Path) -> None:
    """They run in the worker that has them, the first run's, which waits for the child."""
    script: list[Step | str] = [
        "```repl\nFinal = (rlm_query('material'), __import__('os').getpid())\n```",
        "```repl\nFinal = (sub_RLM('which?'), __import__('os').getpid())\n```",
    ]
    root = serve(script)
    sub = serve(reply=asking(("where", {})))
    made = RLM(
        root=f"openai:scripted@{root.base_url}",
        sub=f"openai:scripted@{sub.base_url}",
        tools=[where],
        record=tmp_path / "r.sqlite",
    )
    done = made.completion("P", query="q")
    child, parent_pid = done.answer  # type: ignore[misc]
    with Record.read(tmp_path / "r.sqlite") as record:
        events = [s.event for s in record.events() if isinstance(s.event, ToolCalled)]
    assert [event.text for event in events] == [str(parent_pid)]
    assert str(parent_pid) not in child.rpartition(",")[2]
    assert f"told: {parent_pid}" in child


def test_a_function_that_fails_is_the_models_affair(rlm: Make, serve: Serve) -> None:
    """The error goes to the model and into the record; the call goes on."""
    sub = serve(reply=asking(("line", {"number": 7}), ("line", {"number": "x"})))
    done = rlm("Final = sub_RLM('which?')", sub=sub, tools=[line]).completion("P", query="q")
    first, second = used(done)
    assert first.error == "IndexError: list index out of range"
    assert "what line takes" in second.error
    assert str(done.answer).startswith("told: error: ")


def test_functions_of_a_program_outlive_a_worker(rlm: Make, serve: Serve) -> None:
    """A new one gets them again."""
    sub = serve(reply=asking(("line", {"number": 0})))
    made = rlm("import os; os._exit(1)", "Final = sub_RLM('which?')", sub=sub, tools=[line])
    done = made.completion("P", query="q")
    assert any(isinstance(s.event, WorkerLost) for s in done.run.events())
    assert done.answer == f"told: {LINES[0]}"


def test_a_tool_that_ends_its_worker_fails_the_call(rlm: Make, serve: Serve) -> None:
    """And the cell; the run goes on."""

    def crash() -> None:
        """Crash."""
        os._exit(7)

    sub = serve(reply=asking(("crash", {})))
    done = rlm("sub_RLM('which?')", "Final = len(P)", sub=sub, tools=[crash]).completion("PP")
    assert done.answer == 2


def _no_doc() -> None:
    pass


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (line, "tools is a list of functions, not function"),
        ([5], "a tool is a function, not 5"),
        ([_no_doc], "the tool _no_doc"),
        ([line, line], "two tools are called line"),
        ([str], "not the class str"),
    ],
)
def test_what_can_be_no_tool_is_refused_where_it_is_given(tools: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RLM(root="human", environ={}, tools=tools)


def test_what_cannot_be_copied_is_refused_before_the_run(rlm: Make) -> None:
    """With what to do about it."""
    lock = threading.Lock()

    def locked() -> None:
        """Use a lock of the program's."""
        lock.acquire()

    with pytest.raises(UsageError, match="cannot be copied into the REPL"):
        rlm("Final = 1", tools=[locked]).completion("P", query="q")


def test_tools_do_not_change_what_a_run_without_them_sends(rlm: Make, serve: Serve) -> None:
    """No ``tools`` in its requests."""
    sub: ScriptedServer = serve(reply=lambda prompt: f"R:{prompt}")
    rlm("Final = sub_RLM('x')", sub=sub, budget=Budget()).completion("P", query="q")
    assert "tools" not in sub.requests[0].body


def test_events_of_tools_stand_between_those_of_their_call(rlm: Make, serve: Serve) -> None:
    """In the record, with the id of the call."""
    sub = serve(reply=asking(("line", {"number": 0})))
    done = rlm("Final = sub_RLM('which?')", sub=sub, tools=[line]).completion("P", query="q")
    events = [s.event for s in done.run.events()]
    (started,) = [event for event in events if isinstance(event, SubcallStarted)]
    (tool,) = used(done)
    assert tool.call_id == started.call_id
    assert events.index(tool) > events.index(started)
