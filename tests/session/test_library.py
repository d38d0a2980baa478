"""``RLM(…).completion(P)`` in a Python program: the same engine, REPL and record as the kernel."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlm_kernel import RLM, Budget, PlaybookRoot
from rlm_kernel.engine.events import RunEnded, RunStarted, SubcallEnded, SubcallStarted
from rlm_kernel.errors import NoAnswer, PromptError, RLMError, UsageError
from tests.session.conftest import Serve

Make = Callable[..., RLM]


def test_the_answer_keeps_its_type_and_the_usage_is_exact(rlm: Make, tmp_path: Path) -> None:
    made = rlm("r = llm_query_batched(['a', 'b'])\nr", "Final = {'n': len(P), 'r': tuple(r)}")
    done = made.completion("x" * 1000, query="how long?")
    assert done.answer == {"n": 1000, "r": ("R:a", "R:b")}
    assert done.response == str(done.answer)
    assert done.usage.calls == 4
    assert (done.run.state, done.run.turns, done.run.subcalls) == ("answered", 2, 2)
    assert done.run.record_path == tmp_path / "run.rlm.sqlite"


def test_every_fact_is_in_the_record(rlm: Make) -> None:
    done = rlm("Final = llm_query('one')").completion("P is this", root_prompt="what?")
    events = [stored.event for stored in done.run.events()]
    assert isinstance(events[0], RunStarted)
    assert events[0].query == "what?"
    assert isinstance(events[-1], RunEnded)
    started = next(e for e in events if isinstance(e, SubcallStarted))
    ended = next(e for e in events if isinstance(e, SubcallEnded))
    assert (started.prompt, ended.response, started.call_id) == ("one", "R:one", ended.call_id)


def test_chat_messages_are_taken_as_in_a_chat_call(rlm: Make) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert rlm("Final = P").completion(messages).answer == ["system: be brief", "user: hi"]


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], {"k": "v"}])
def test_a_prompt_is_a_str_or_a_list_or_dict_of_them(rlm: Make, prompt: object) -> None:
    assert rlm("Final = P").completion(prompt, query="q").answer == prompt


@pytest.mark.parametrize("prompt", ["", [], {}, [1], {"k": 1}])
def test_a_prompt_that_is_none_is_refused(rlm: Make, prompt: object) -> None:
    with pytest.raises(PromptError):
        rlm("Final = 1").completion(prompt, query="q")


@pytest.mark.parametrize(
    "prompt",
    [None, 5, Path("book.txt"), object(), b"bytes", {"a", "b"}, (item for item in "ab")],
)
def test_what_can_be_no_prompt_is_refused_with_what_can(rlm: Make, prompt: object) -> None:
    with pytest.raises(PromptError, match=r"a prompt is a str, or a list or dict of str, not "):
        rlm("Final = 1").completion(prompt, query="q")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "user", "content": [5]},
    ],
)
def test_a_message_without_text_is_refused(rlm: Make, message: dict[str, object]) -> None:
    with pytest.raises(PromptError, match="message 2 of the prompt holds no content"):
        rlm("Final = 1").completion([{"role": "user", "content": "hi"}, message])


def test_parts_of_a_message_are_joined(rlm: Make) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = ({"role": "user", "content": parts},)
    assert rlm("Final = P").completion(messages).answer == ["user: a\nb"]


@pytest.mark.parametrize("name", ["query", "root_prompt"])
@pytest.mark.parametrize(
    ("query", "message"),
    [(5, "a str, not int"), (b"q", "a str, not bytes"), ("", "is empty"), (" ", "is empty")],
)
def test_what_can_be_no_query_is_refused(rlm: Make, name: str, query: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rlm("Final = 1").completion("text", **{name: query})  # type: ignore[arg-type]


async def test_it_works_inside_a_running_event_loop(rlm: Make) -> None:
    assert rlm("Final = 1").completion("text", query="q").answer == 1
    assert (await rlm("Final = 2").acompletion("text", query="q")).answer == 2


def test_parallel_completions_do_not_mix(serve: Serve, tmp_path: Path) -> None:
    def make(number: int) -> RLM:
        root = serve([f"```repl\nprint('mine {number}')\n```", f"```repl\nFinal = {number}\n```"])
        return RLM(root=f"openai:scripted@{root.base_url}", record=tmp_path / f"{number}.sqlite")

    async def all_of_them() -> list[object]:
        done = await asyncio.gather(*(make(n).acompletion("text", query="q") for n in range(3)))
        return [one.answer for one in done]

    assert asyncio.run(all_of_them()) == [0, 1, 2]


def test_a_limit_ends_as_no_answer_and_leaves_the_record(rlm: Make, tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="1 turns"):
        rlm("x = 1", "x = 2", budget=Budget(max_turns=1)).completion("text", query="q")
    assert (tmp_path / "run.rlm.sqlite").stat().st_size > 0


def test_a_root_that_cannot_be_asked_is_an_error_with_its_reason(tmp_path: Path) -> None:
    made = RLM(root="openai:m@http://127.0.0.1:9", record=tmp_path / "r.sqlite")
    with pytest.raises(RLMError, match=r"127\.0\.0\.1:9"):
        made.completion("text", query="q")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"root": "opnai:x"}, "did you mean"),
        ({"root": ""}, "no root"),
        ({"root": "playbook:nowhere.py"}, "no playbook"),
        ({"root": "human", "sub": "human"}, "only be a root"),
    ],
)
def test_a_bad_spec_is_refused_before_anything_starts(kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RLM(**kwargs, environ={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("root", 5, "not int"),
        ("root", (c for c in "x"), "not generator"),
        ("root", ["cell"], "not list"),
        ("root", lambda: None, "not function"),
        ("root", PlaybookRoot, "not the class PlaybookRoot"),
        ("sub", 5, "not int"),
        ("sub", PlaybookRoot(["1"]), "not PlaybookRoot"),
        ("budget", 0, "budget is a Budget, not int"),
        ("budget", {"max_turns": 3}, "budget is a Budget, not dict"),
        ("policy", "ask", "policy is a function of a proposal, not str"),
        ("on_event", 5, "on_event is a function"),
        ("record", 5, "record is the path"),
        ("environ", ["A=1"], "environ is a dict"),
        ("dialect", 5, "dialect is a str"),
        ("dialect", "papper", "papper"),
    ],
)
def test_an_argument_of_another_type_is_refused_where_it_is_given(
    name: str, value: object, message: str
) -> None:
    given = {"root": "human", "environ": {}, name: value}
    with pytest.raises(UsageError, match=message):
        RLM(**given)  # type: ignore[arg-type]


def test_no_process_is_left_after_a_completion(rlm: Make) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    rlm("import subprocess; p = subprocess.Popen(['sleep', '300'])", "Final = 1").completion("x")
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_playbook_generator_sees_the_observations(serve: Serve, tmp_path: Path) -> None:
    seen: list[str] = []

    def playbook():  # type: ignore[no-untyped-def]
        seen.append((yield "Look.", "len(P)"))
        yield "Answer.", "Final = len(P)"

    made = RLM(root=PlaybookRoot(playbook), record=tmp_path / "r.sqlite")
    assert made.completion("12345", query="q").answer == 5
    assert "5" in seen[0]


def test_a_lost_worker_costs_the_variables_but_not_the_run(rlm: Make) -> None:
    cells = ["kept = 1", "import os; os._exit(7)", "Final = (len(P), 'kept' in globals())"]
    assert rlm(*cells).completion("12345", query="q").answer == (5, False)


def test_a_child_run_has_its_own_repl_and_shares_the_budget(serve: Serve, tmp_path: Path) -> None:
    script = [
        "```repl\nimport os\nanswer_of_child = rlm_query('the material of the child')\n```",
        "```repl\nimport os\nFinal = f'{P}/{os.getpid()}'\n```",  # said by the child's root
        "```repl\nFinal = (answer_of_child, os.getpid())\n```",
    ]
    server = serve(script)
    made = RLM(
        root=f"openai:scripted@{server.base_url}", record=tmp_path / "r.sqlite", budget=Budget()
    )
    done = made.completion("the parent's", query="q")
    child, parent_pid = done.answer  # type: ignore[misc]
    text, _, child_pid = child.rpartition("/")
    assert text == "the material of the child"
    assert int(child_pid) not in (parent_pid, os.getpid())
    assert done.usage.calls == 3
    started = next(s.event for s in done.run.events() if isinstance(s.event, SubcallStarted))
    assert started.kind == "rlm"


def test_beyond_the_depth_a_child_is_a_plain_call(rlm: Make) -> None:
    made = rlm("Final = rlm_query('deep')", budget=Budget(max_depth=0))
    assert "deep" in str(made.completion("x", query="q").answer)
