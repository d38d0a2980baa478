"""`@subtask`: functions that a model computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.repl.model import FAIL, Model, once
from tests.repl.worker_driver import WorkerDriver

SUBTASKS = '''
from dataclasses import dataclass
@subtask
def is_spam(mail: str) -> bool:
    """Say whether the mail is spam."""

@subtask(max_tokens=9, model="m", check=lambda text: len(text) < 50)
def summary(text: str, words: int = 10):
    """Summarize the text."""

@dataclass
class Date:
    year: int

@subtask
def date_of(text: str, hint: list) -> "Date":
    """Which date is meant?"""
    return f"Hint {hint[0]}, text: {text}"
'''


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        assert driver.run(SUBTASKS).finished.ok
        yield driver


def test_the_signature_is_the_form_and_the_docstring_the_instruction(worker: WorkerDriver) -> None:
    """The instruction comes first, so that it is read once; the arguments come last."""
    model = Model(lambda prompt: "No")
    assert worker.run("is_spam('Dear all,\\nhello')", answer=model).result == "False"
    (request,) = model.asked
    (prompt,) = request.prompts
    assert prompt == ("Say whether the mail is spam.\n\nmail:\nDear all,\nhello")
    assert (request.params.task, request.params.choices) == ("is_spam", ["yes", "no"])
    assert model.verdicts == [("1-0", True)]


def test_options_and_defaults(worker: WorkerDriver) -> None:
    """A function without a return type returns text; its options hold for each call."""
    model = Model(once("long " * 50, "short"))
    assert worker.run("summary('the text', words=3)", answer=model).result == "'short'"
    first = model.asked[0]
    assert first.prompts == ["Summarize the text.\n\ntext: the text\n\nwords: 3"]
    assert (first.params.max_tokens, first.params.model) == (9, "m")
    assert worker.run("summary.prompt('t')").result == (
        "'Summarize the text.\\n\\ntext: t\\n\\nwords: 10'"
    )


def test_a_body_that_returns_a_str_shows_that(worker: WorkerDriver) -> None:
    """In place of the arguments; a class of the cell's is the type, by its name too."""
    model = Model(lambda prompt: '{"year": 1815}')
    assert worker.run("date_of('then', [1])", answer=model).result == "Date(year=1815)"
    (prompt,) = model.prompts
    assert prompt == "Which date is meant?\n\nHint 1, text: then"
    assert model.asked[0].params.schema is not None


def test_map_of_one_argument_and_of_several(worker: WorkerDriver) -> None:
    """An item is the argument, or a tuple or dict of arguments; a dict of items gives a dict."""
    model = Model(lambda prompt: FAIL if "bad" in prompt else "yes")
    code = "[str(v) for v in is_spam.map(['a', 'bad', ('t', 'u')])]"
    assert worker.run(code, answer=model).result == "['True', 'the server is gone', 'True']"
    assert worker.run("is_spam.map({'k': 'a'})", answer=model).result == "{'k': True}"
    code = "summary.map([('a', 1), {'text': 'b'}])"
    assert worker.run(code, answer=model).result == "['yes', 'yes']"
    assert model.prompts[-2].endswith("text: a\n\nwords: 1")
    assert model.prompts[-1].endswith("text: b\n\nwords: 10")
    assert worker.run("summary.map(['text'])").errors[0].ename == "TypeError"


def test_calling_one_in_a_coroutine(worker: WorkerDriver) -> None:
    """Many at once, each with its own value."""
    code = "import asyncio\nawait asyncio.gather(*(is_spam.aio(m) for m in ['yes', 'no', 'yes']))"
    model = Model(lambda prompt: prompt.rpartition(" ")[2])
    assert worker.run(code, answer=model).result == "[True, False, True]"


def test_a_failure_raises(worker: WorkerDriver) -> None:
    """Under the name of the function."""
    error = worker.run("is_spam('x')", answer=Model(lambda prompt: "perhaps")).errors[0]
    assert error.ename == "SubcallError"
    assert error.evalue.startswith("is_spam: the reply is none of yes, no, also when")
    assert worker.run("await is_spam.aio('x')", answer=Model(lambda prompt: FAIL)).errors


def test_a_recursive_one_works_on_its_arguments(worker: WorkerDriver) -> None:
    """The instruction is the query of a child run, and the arguments are its P."""
    worker.run(
        '@subtask(depth="rlm")\ndef count(book: str) -> int:\n'
        '    """How many people are named?"""\n    return book'
    )
    model = Model(lambda prompt: "7")
    assert worker.run("count('the book')", answer=model).result == "7"
    (request,) = model.asked
    assert (request.kind, request.prompts) == ("rlm", ["the book"])
    assert (request.params.query or "").startswith("How many people are named?")
    assert "JSON" in (request.params.query or "")


def test_it_looks_like_the_function_that_it_is(worker: WorkerDriver) -> None:
    """To help, and to who prints it."""
    assert worker.run("is_spam").result == "<subtask is_spam(mail: str) -> bool>"
    (page,) = worker.run("is_spam?").finished.payload
    assert "Say whether the mail is spam." in page["data"]["text/plain"]


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ("@subtask\ndef f(x): pass", "needs a docstring"),
        ("@subtask\nasync def f(x): 'do it'", "plain function"),
        ("@subtask\ndef f(x) -> None: 'do it'", "return something"),
        ("@subtask\ndef f(x) -> 'Nowhere': 'do it'", "cannot be read"),
        ("@subtask\ndef f(x) -> object(): 'do it'", "no JSON Schema"),
        ("@subtask(temprature=0)\ndef f(x): 'do it'", "did you mean temperature?"),
        ("subtask('do it')", "decorator"),
        ("@subtask\ndef f(x):\n    'do it'\n    return 5\nf(1)", "returned int"),
        ("is_spam()", "the subtask is_spam(mail: str) -> bool: missing a required argument"),
    ],
)
def test_what_cannot_be_a_subtask_is_refused_at_once(
    worker: WorkerDriver, definition: str, says: str
) -> None:
    """Where it is defined, as far as that can be known there."""
    cell = worker.run(definition)
    assert cell.errors[0].ename == "TypeError"
    assert says in cell.errors[0].evalue
    assert cell.requests == []


def test_the_name_is_the_repls(worker: WorkerDriver) -> None:
    """Put back after a turn that rebinds it, and no variable; what it made is one."""
    worker.load(b"p")
    worker.begin()
    done = worker.run("subtask = 5", turn=1).finished
    assert done.restored == ["subtask"]
    assert done.variables == []
    cell = worker.run(
        "'is_spam' in SHOW_VARS(), 'subtask' in SHOW_VARS(), callable(subtask)", turn=2
    )
    assert cell.result == "(True, False, True)"
