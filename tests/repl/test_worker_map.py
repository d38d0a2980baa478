"""One prompt for each item, by `sub_RLM.map` and by the magic's `--map`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.repl.model import FAIL, Model
from tests.repl.worker_driver import WorkerDriver


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        driver.run(
            "from collections import namedtuple\nfrom dataclasses import dataclass\n"
            "import numpy as np\n"
            "Row = namedtuple('Row', 'title year')\n"
            "@dataclass\nclass Book:\n    title: str\n    year: int = 1900\n"
        )
        yield driver


@pytest.mark.parametrize(
    ("template", "items", "prompts"),
    [
        ("Year of {}?", "['a', 'b']", ["Year of a?", "Year of b?"]),
        ("Year of {item}?", "['a']", ["Year of a?"]),
        ("{} or {}", "[5]", ["5 or 5"]),
        ("Which year?", "['a', 'b']", ["Which year?\n\na", "Which year?\n\nb"]),
        ("Which year?", "[{'t': 'a', 'n': 1}]", ["Which year?\n\nt: a\nn: 1"]),
        ("In {title}: {year}", "[{'title': 'T', 'year': 1}]", ["In T: 1"]),
        ("In {title}: {year}", "[Row('T', 1)]", ["In T: 1"]),
        ("In {title}: {year}", "[Book('T')]", ["In T: 1900"]),
        ("{item[1]}-{item[0]}", "[('a', 'b')]", ["b-a"]),
        ("{item.title!r:>5}|{year:05d}", "[Book('T', 7)]", ["  'T'|00007"]),
        ('As {{"a": 1}}: {}', "['x']", ['As {"a": 1}: x']),
        ("{}", "['{braces} stay']", ["{braces} stay"]),
        ("{}", "(str(i) for i in range(3))", ["0", "1", "2"]),
        ("{}", "np.array(['a', 'b'])", ["a", "b"]),
        ("{}", "{'k': 'a', 'l': 'b'}", ["a", "b"]),
        ("{}", "[None]", ["None"]),
        ("{}", "[]", []),
    ],
)
def test_a_template_is_filled_for_each_item(
    worker: WorkerDriver, template: str, items: str, prompts: list[str]
) -> None:
    """With the item or what it holds; without a field the item goes to the end."""
    model = Model(lambda prompt: prompt)
    cell = worker.run(f"sub_RLM.map({template!r}, {items})", answer=model)
    assert cell.errors == []
    assert model.prompts == prompts


def test_the_order_and_the_keys_are_those_of_the_items(worker: WorkerDriver) -> None:
    """A list gives a list, a dict a dict; a failed item is an error at its place."""
    model = Model(lambda prompt: FAIL if prompt == "b" else prompt.upper())
    code = "[str(r) for r in sub_RLM.map('{}', ('a', 'b', 'c'))]"
    assert worker.run(code, answer=model).result == "['A', 'the server is gone', 'C']"
    code = "{k: str(v) for k, v in sub_RLM.map('{}', {5: 'a', 'x': 'b'}).items()}"
    assert worker.run(code, answer=model).result == "{5: 'A', 'x': 'the server is gone'}"
    assert worker.run("sub_RLM.map('{}', {})", answer=model).result == "{}"


def test_a_function_makes_the_prompt(worker: WorkerDriver) -> None:
    """And options hold for all of them, as one batch."""
    model = Model(lambda prompt: "yes")
    code = "sub_RLM.map(lambda n: f'Is {n} even?', range(3), choices=['yes', 'no'], model='m')"
    assert worker.run(code, answer=model).result == "['yes', 'yes', 'yes']"
    (request,) = model.asked
    assert request.prompts == ["Is 0 even?", "Is 1 even?", "Is 2 even?"]
    assert (request.params.model, request.params.choices) == ("m", ["yes", "no"])


def test_prompts_of_a_template_begin_alike(worker: WorkerDriver) -> None:
    """Up to the first field, so that a server reads that part once for all."""
    model = Model(lambda prompt: prompt)
    instruction = "Reply with the year in which the book came out. "
    worker.run(
        f"sub_RLM.map({instruction!r} + '{{title}}', [{{'title': t}} for t in 'ab'])", answer=model
    )
    assert all(prompt.startswith(instruction) for prompt in model.prompts)


@pytest.mark.parametrize(
    ("call", "ename", "says"),
    [
        ("sub_RLM.map('{}', 'a str')", "TypeError", "list or another iterable"),
        ("sub_RLM.map('{}', 5)", "TypeError", "list or another iterable"),
        ("sub_RLM.map(['a'], '{}')", "TypeError", "list or another iterable"),
        ("sub_RLM.map(5, ['a'])", "TypeError", "a template or a function"),
        ("sub_RLM.map(len, ['a'])", "TypeError", "returned int for item 0"),
        ("sub_RLM.map('{x}', [{'y': 1}])", "ValueError", "it has y"),
        ("sub_RLM.map('{x}', ['a'])", "ValueError", "use {item}"),
        ("sub_RLM.map('{\"a\": 1}', ['a'])", "ValueError", "write {{ and }}"),
        ("sub_RLM.map('{', ['a'])", "ValueError", "write {{ and }}"),
        ("import itertools; sub_RLM.map('{}', itertools.count())", "ValueError", "100,000"),
    ],
)
def test_what_cannot_be_mapped_is_refused_at_once(
    worker: WorkerDriver, call: str, ename: str, says: str
) -> None:
    """With what to do about it; nothing is sent."""
    cell = worker.run(call)
    assert cell.errors[0].ename == ename
    assert says in cell.errors[0].evalue
    assert cell.requests == []


def test_the_magic_asks_about_each_item_of_a_variable(worker: WorkerDriver) -> None:
    """The cell is the template, `--out` keeps the outcomes and shows nothing."""
    worker.run(
        "rows = [{'who': 'a', 'text': 'x' * 9}, {'who': 'b', 'text': 'y' * 9}]; greeting = 'Hi'"
    )
    model = Model(lambda prompt: "Yes.")
    cell = worker.run(
        "%%sub_RLM --map rows --out labels --choices yes,no --model m --task spam\n"
        "{greeting}, is this spam? {{}}\n{text[:3]} {who!r}\n",
        answer=model,
    )
    assert cell.outputs == []
    assert model.prompts == ["Hi, is this spam? {}\nxxx 'a'", "Hi, is this spam? {}\nyyy 'b'"]
    (request,) = model.asked
    assert (request.params.model, request.params.task) == ("m", "spam")
    assert worker.run("labels").result == "['yes', 'yes']"


def test_the_items_of_the_magic_may_be_an_expression(worker: WorkerDriver) -> None:
    """In quotes where it has spaces; without `--out` the outcomes are the cell's value."""
    model = Model(lambda prompt: prompt.upper())
    cell = worker.run("%%sub_RLM --map \"{k: k * 2 for k in 'ab'}\"\nsay", answer=model)
    assert cell.result == "{'a': 'SAY\\n\\nAA', 'b': 'SAY\\n\\nBB'}"


def test_failures_of_the_magic_are_told(worker: WorkerDriver) -> None:
    """They would else be hidden in the variable."""
    model = Model(lambda prompt: FAIL if prompt == "b" else prompt)
    cell = worker.run("%%sub_RLM --map ['a','b'] --out got\n{}", answer=model)
    assert cell.err.startswith("1 of 2 sub-calls failed")
    assert "the server is gone" in cell.err
    assert worker.run("got[0], type(got[1]).__name__").result == "('a', 'SubcallError')"


@pytest.mark.parametrize(
    "code",
    ["%%sub_RLM --map rows --out not-a-name\n{}", "%%sub_RLM --map rows\n{ {}", "%%sub_RLM\n{}"],
)
def test_a_mistake_in_the_magic_is_one_line(worker: WorkerDriver, code: str) -> None:
    """And costs no call."""
    cell = worker.run(code)
    assert cell.errors[0].ename == "UsageError"
    assert cell.requests == []
