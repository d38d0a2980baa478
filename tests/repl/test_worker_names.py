"""The REPL's names: given to every run, put back after every turn, and the answer they take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlm_kernel.cells import AnswerSet
from rlm_kernel.repl import messages
from rlm_kernel.values import decode
from tests.repl.worker_driver import WorkerDriver, echo


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


@pytest.fixture
def worker(shared: WorkerDriver) -> WorkerDriver:
    """A worker at the beginning of a run over a prompt."""
    shared.load(b"the prompt")
    assert shared.begin().prompt is not None
    return shared


def answered(answer: AnswerSet | None) -> tuple[str, object]:
    assert answer is not None
    return answer.how, decode(answer.value)


@pytest.mark.parametrize(
    ("code", "how", "value"),
    [
        ("Final = {'a': [1, 2]}", "Final", {"a": [1, 2]}),
        ("Final = 0", "Final", 0),
        ("def f():\n    global Final\n    Final = 'in a function'\nf()", "Final", "in a function"),
        ("FINAL('x (with (nested) parens)')", "FINAL", "x (with (nested) parens)"),
        ("FINAL(False)", "FINAL", False),
        ("found = 42\nFINAL_VAR('found')", "FINAL_VAR", 42),
        ("found = 'text'\nFINAL_VAR(found)", "FINAL_VAR", "text"),
        ("FINAL_VAR([1])", "FINAL_VAR", [1]),
        ("SUBMIT(3)", "SUBMIT", 3),
        ("SUBMIT(answer='x', score=2)", "SUBMIT", {"answer": "x", "score": 2}),
        ("answer['content'] = 'c'; answer['ready'] = True", "answer", "c"),
        ("answer['ready'] = True\nanswer['content'] = 'set later'", "answer", "set later"),
        ("answer.update(content=[1], ready=1)", "answer", [1]),
        ("answer |= {'content': 'c', 'ready': True}", "answer", "c"),
        ("answer['content'] = 'c'; del answer['ready']; answer.setdefault('ready', 1)",) * 1
        + ("answer", "c"),
        ("answer = {'content': 'plain dict', 'ready': True}", "answer", "plain dict"),
    ],
)
def test_every_way_to_answer(worker: WorkerDriver, code: str, how: str, value: object) -> None:
    """The value keeps its type, and the next cell has no answer any more."""
    assert answered(worker.run(code, turn=1).finished.answer) == (how, value)
    assert worker.run("x = 1", turn=2).finished.answer is None


def test_the_same_answer_can_be_set_again(worker: WorkerDriver) -> None:
    """An answer that was not accepted must not stand in the way of the next try."""
    for code in ("Final = 'same'", "answer.update(content='same', ready=True)"):
        for turn in (1, 2):
            assert worker.run(code, turn=turn).finished.answer is not None


def test_an_answer_is_told_though_the_cell_raises(worker: WorkerDriver) -> None:
    """Whether it counts is the engine's decision."""
    done = worker.run("Final = 5\n1 / 0", turn=1).finished
    assert not done.ok
    assert answered(done.answer) == ("Final", 5)


@pytest.mark.parametrize(
    "code",
    [
        "Final = None",
        "from typing import Final",
        "answer['content'] = 'not ready'",
        "answer['ready'] = True",
        "answer = {'content': 'c', 'ready': False}",
    ],
)
def test_what_is_no_answer(worker: WorkerDriver, code: str) -> None:
    """None, an import of the same name, and what is not ready or empty."""
    assert worker.run(code, turn=1).finished.answer is None


@pytest.mark.parametrize("code", ["Final = None", "answer.update(content='', ready=True)"])
def test_an_empty_answer_is_told_to_who_gave_it(worker: WorkerDriver, code: str) -> None:
    """Else a root waits for the end of its run, and never learns why it does not come."""
    for _ in range(2):
        assert "no answer was taken" in worker.run(code, turn=1).err


def test_a_none_of_an_earlier_cell_is_not_told_again(worker: WorkerDriver) -> None:
    """In the cells of a person it stays bound."""
    assert "no answer was taken" in worker.run("Final = None").err
    assert worker.run("1").err == ""


def test_an_unready_dict_is_kept(worker: WorkerDriver) -> None:
    """A root that binds `answer` to its own dict goes on with it."""
    worker.run("answer = {'content': 'draft', 'ready': False}", turn=1)
    done = worker.run("answer['ready'] = True", turn=2).finished
    assert answered(done.answer) == ("answer", "draft")


@pytest.mark.parametrize("call", ["FINAL(None)", "SUBMIT(None)", "SUBMIT()", "SUBMIT(1, 2)"])
def test_a_call_without_an_answer_raises(worker: WorkerDriver, call: str) -> None:
    """So that the root learns of it."""
    done = worker.run(call, turn=1).finished
    assert not done.ok
    assert done.answer is None


def test_final_var_of_a_missing_variable_names_its_likes(worker: WorkerDriver) -> None:
    """An error like any other, after which the run goes on."""
    cell = worker.run("final_result = 1\nFINAL_VAR('final_resutl')", turn=1)
    assert cell.errors[0].ename == "NameError"
    assert "'final_result'" in cell.errors[0].evalue
    assert cell.finished.answer is None


def test_an_answer_of_a_class_of_the_users(worker: WorkerDriver) -> None:
    """Travels as its text; nothing of it is loaded on the other side."""
    answer = worker.run("class R:\n    def __str__(self): return 'as text'\nFinal = R()").done
    assert answer is not None
    assert answer.answer is not None
    assert (answer.answer.value.exact, answer.answer.value.text) == (False, "as text")


def test_an_answer_that_is_too_large_is_refused(worker: WorkerDriver) -> None:
    """With a message, and without harm."""
    cell = worker.run("Final = 'x' * 70_000_000", turn=1)
    assert cell.finished.answer is None
    assert "could not be handed over" in cell.err


@pytest.mark.parametrize(
    "name",
    ["P", "context", "sub_RLM", "llm_query", "FINAL", "FINAL_VAR", "SUBMIT", "SHOW_VARS", "budget"],
)
def test_a_turn_cannot_lose_the_names_of_the_repl(worker: WorkerDriver, name: str) -> None:
    """Rebound or deleted, each is back before the next cell, and the root is told."""
    before = worker.run(f"id({name})").result
    assert worker.run(f"{name} = None", turn=1).finished.restored == [name]
    assert worker.run(f"del {name}", turn=2).finished.restored == [name]
    assert worker.run(f"id({name})").result == before
    assert worker.run("x = 1", turn=3).finished.restored == []


def test_history_and_answer_are_restored_too(worker: WorkerDriver) -> None:
    """Also where they were changed in place."""
    worker.begin([{"role": "user", "content": "q"}])
    assert worker.run("history.clear()", turn=1).finished.restored == ["history"]
    assert worker.run("len(history)").result == "1"
    assert worker.run("answer = 5", turn=2).finished.restored == ["answer"]
    assert worker.run("answer").result == "{'content': '', 'ready': False}"


def test_a_prompt_changed_in_place_is_restored(worker: WorkerDriver) -> None:
    """A list or dict is the same object afterwards, with what it held."""
    worker.load(b'["a","b"]', kind="list")
    worker.run("before = P", turn=1)
    assert worker.run("P.pop(); P[0] = 'x'", turn=2).finished.restored == ["P", "context"]
    assert worker.run("P, P is before, context is P", turn=3).result == ("(['a', 'b'], True, True)")
    worker.load(b'{"k":"v"}', kind="dict")
    assert worker.run("context['k2'] = 'v2'", turn=4).finished.restored == ["P", "context"]
    assert worker.run("P").result == "{'k': 'v'}"


def test_history_grows_with_the_turns(worker: WorkerDriver) -> None:
    """Begin sets it, Execute appends to it."""
    worker.begin([{"role": "system", "content": "s"}])
    code = "[m['content'] for m in history]"
    assert worker.run(code, turn=1).result == "['s']"
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "o"}]
    assert worker.run(code, turn=2, history=more).result == "['s', 'a', 'o']"
    worker.begin()
    assert worker.run(code, turn=1).result == "[]"


def test_begin_forgets_the_run_before(worker: WorkerDriver) -> None:
    """No answer, no rebound name and no Final is left; the variables are."""
    worker.run("Final = 1\nanswer.update(content='c', ready=True)\nkept = 2\nsub_RLM = None")
    worker.begin()
    code = "'Final' in globals(), answer, kept, sub_RLM is not None"
    assert worker.run(code).result == "(False, {'content': '', 'ready': False}, 2, True)"
    assert worker.run("x = 0", turn=1).finished.answer is None


def test_a_person_may_rebind_the_prompt(worker: WorkerDriver) -> None:
    """Either name; both follow, the kernel is told, and a run works on the new one."""
    cell = worker.run("P = 'another'")
    (told,) = cell.requests
    assert isinstance(told, messages.SetPrompt)
    assert (told.prompt.chars, told.cell) == (7, cell.finished.id)
    assert worker.run("context").result == "'another'"
    worker.run("context = ['a', 'b']")
    ready = worker.begin()
    assert ready.prompt is not None
    assert (ready.prompt.kind, ready.prompt.items, ready.prompt.chars) == ("list", 2, 2)
    assert worker.run("P is context").result == "True"


def test_a_person_may_use_the_name_for_something_else(worker: WorkerDriver) -> None:
    """Then a run that begins is told that this is no prompt."""
    assert worker.run("P = 5").requests == []
    assert worker.run("P").result == "5"
    ready = worker.begin()
    assert ready.prompt is None
    assert "int" in ready.error


def test_a_reset_leaves_the_names_of_the_repl(worker: WorkerDriver) -> None:
    """`%reset` forgets the person's variables, not what a run needs."""
    worker.run("mine = 1")
    worker.run("%reset -f")
    code = "P, context, answer['ready'], callable(sub_RLM), 'mine' in globals()"
    assert worker.run(code).result == "('the prompt', 'the prompt', False, True, False)"


def test_reading_variables_leaves_no_trace(worker: WorkerDriver) -> None:
    """SHOW_VARS names the variables with type and size, and none of the REPL's."""
    worker.run("%reset_selective -f .*_kept\nlist_kept = [1, 2, 3]")
    result = worker.run("SHOW_VARS()['list_kept'], 'P' in SHOW_VARS()").result
    assert result == "('list (3)', False)"


def test_a_wrong_call_of_budget_names_budget(worker: WorkerDriver) -> None:
    """And none of the things that it is made of."""
    error = worker.run("budget(3)").errors[0]
    assert error.evalue == "budget() takes 0 positional arguments but 1 was given"


def test_a_magic_of_a_name_does_not_hide_the_function(worker: WorkerDriver) -> None:
    """`sub_RLM("x")` alone in a cell is the call, not `%sub_RLM`."""
    assert worker.run("sub_RLM('x')", answer=echo).result == "'X'"
