"""Typed sub-tasks: choices, schemas and checks, and one second try for what is no value."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rlm_kernel.repl import messages
from tests.repl.model import FAIL, Model, once
from tests.repl.worker_driver import WorkerDriver


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


KINDS = """
import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict
import msgspec, pydantic, pydantic.dataclasses
@dataclass
class Point:
    x: int
    y: int = 0
class Colour(enum.Enum):
    RED = 'red'
    BLUE = 'blue'
class Row(TypedDict):
    name: str
class Model(pydantic.BaseModel):
    x: int
class Struct(msgspec.Struct):
    x: int
@pydantic.dataclasses.dataclass
class Positive:
    x: int = pydantic.Field(gt=0)
@dataclass
class Tree:
    x: int
    below: 'list[Tree]'
"""


@pytest.mark.parametrize(
    ("kind", "reply", "value"),
    [
        ("int", "42", "42"),
        ("int", "The answer is 1,234.", "1234"),
        ("{'type': 'integer', 'minimum': 0}", "There are 3.", "3"),
        ("float", "```json\n0.5\n```", "0.5"),
        ("bool", "No.", "False"),
        ("bool", "true", "True"),
        ("str", '"as it is"', "'\"as it is\"'"),
        ("list[str]", '["a", "b"]', "['a', 'b']"),
        ("dict[str, int]", '{"a": 1}', "{'a': 1}"),
        ("int | None", "null", "None"),
        ("Literal['a', 'b']", "b", "'b'"),
        ("Literal[1, 2]", "2", "2"),
        ("Colour", "Blue", "<Colour.BLUE: 'blue'>"),
        ("Point", '{"x": 1}', "Point(x=1, y=0)"),
        ("list[Point]", 'Two: [{"x": 1}, {"x": 2}]', "[Point(x=1, y=0), Point(x=2, y=0)]"),
        ("Row", '{"name": "n"}', "{'name': 'n'}"),
        ("Model", '{"x": 1}', "Model(x=1)"),
        ("list[Model]", '[{"x": 1}]', "[Model(x=1)]"),
        ("Positive", '{"x": 1} or {"x": 0}', "Positive(x=1)"),
        ("Struct", '{"x": 1}', "Struct(x=1)"),
        (
            "Tree",
            '{"x": 1, "below": [{"x": 2, "below": []}]}',
            "Tree(x=1, below=[Tree(x=2, below=[])])",
        ),
        ("{'type': 'array', 'items': {'type': 'integer'}}", "[1, 2]", "[1, 2]"),
    ],
)
def test_a_reply_becomes_a_value_of_its_type(
    worker: WorkerDriver, kind: str, reply: str, value: str
) -> None:
    """An instance where there is a class; asked for once, and judged as a value."""
    worker.run(KINDS)
    model = Model(lambda prompt: reply)
    cell = worker.run(f"print(repr(sub_RLM('p', schema={kind}, task='t')))", answer=model)
    assert cell.out.strip() == value
    assert len(model.asked) == 1
    typed = kind != "str"
    assert model.verdicts == ([("1-0", True)] if typed else [])


def test_the_server_is_told_the_schema(worker: WorkerDriver) -> None:
    """Of a dataclass with the class itself at the root; small types are choices."""
    worker.run(KINDS)
    model = Model(lambda prompt: '{"x": 1, "below": []}')
    worker.run("sub_RLM('p', schema=Point); sub_RLM('p', schema=Tree)", answer=model)
    point, tree = (json.loads(request.params.schema or "") for request in model.asked)
    assert point["type"] == "object"
    assert set(point["properties"]) == {"x", "y"}
    assert point["required"] == ["x"]
    assert tree["properties"]["below"]["items"] == {"$ref": "#/$defs/Tree"}
    assert "Tree" in tree["$defs"]
    assert [request.params.task for request in model.asked] == ["Point", "Tree"]
    model = Model(lambda prompt: "yes")
    worker.run("sub_RLM('p', schema=bool)", answer=model)
    assert (model.asked[0].params.choices, model.asked[0].params.schema) == (["yes", "no"], None)


def test_a_reply_that_is_nested_without_end_costs_no_other(worker: WorkerDriver) -> None:
    """A schema that refers to itself allows any depth; only so much can be checked."""
    worker.run("tree = {'type': 'array', 'items': {'$ref': '#'}}")

    def nested(prompt: str) -> str:
        depth = int(prompt.split(maxsplit=1)[0])
        return "[" * depth + "]" * depth

    model = Model(nested)
    code = "[str(r) for r in sub_RLM(['2', '400'], schema=tree)]"
    result = worker.run(code, answer=model).result or ""
    assert result.startswith("['[[]]',")
    assert "JSON: the reply does not fit the schema: it is nested too deeply, also when" in result


def test_choices_with_accents_that_are_written_otherwise(worker: WorkerDriver) -> None:
    """Unicode has two ways, which nobody can tell apart."""
    model = Model(lambda prompt: "caf\u00e9")
    cell = worker.run("sub_RLM('p', choices=['cafe\\u0301', 'bar']) == 'cafe\\u0301'", answer=model)
    assert cell.result == "True"


@pytest.mark.parametrize("reply", ["spam", "Spam", ' "spam".\n', "**SPAM**"])
def test_one_of_the_choices(worker: WorkerDriver, reply: str) -> None:
    """As it was given, however the model dressed it."""
    model = Model(lambda prompt: reply)
    assert worker.run("sub_RLM('p', choices=['spam', 'ham'])", answer=model).result == "'spam'"
    assert model.asked[0].params.choices == ["spam", "ham"]
    assert model.asked[0].params.task == "choices(spam|ham)"
    assert model.verdicts == [("1-0", True)]


def test_choices_of_other_types_are_mapped_back(worker: WorkerDriver) -> None:
    """They go out as their str."""
    model = Model(lambda prompt: "3")
    code = "import numpy as np\nsub_RLM('p', choices=[1, 2, 3]), sub_RLM('p', choices=np.arange(4))"
    assert worker.run(code, answer=model).result == "(3, np.int64(3))"
    assert model.asked[0].params.choices == ["1", "2", "3"]


def test_choices_that_differ_in_case_only(worker: WorkerDriver) -> None:
    """Are told apart exactly, or not at all."""
    model = Model(lambda prompt: prompt[:1])
    code = "sub_RLM(['a', 'A', 'b'], choices=['a', 'A', 'B'])"
    assert worker.run(code, answer=model).result == "['a', 'A', 'B']"
    model = Model(lambda prompt: f'"{prompt[:1]}"')
    cell = worker.run("sub_RLM(['a'], choices=['a', 'A'])[0]", answer=model)
    assert "is none of a, A" in (cell.result or "")


def test_all_failing_items_are_asked_again_together_and_once(worker: WorkerDriver) -> None:
    """With the reason at the end of the prompt, naming the calls that they repeat."""
    model = Model(
        lambda prompt: {"good": "1", "mended": once("one", "2")(prompt), "bad": "no"}[
            prompt.partition("\n")[0]
        ]
    )
    code = "r = sub_RLM(['bad', 'good', 'mended', 'bad'], schema=int, task='count')\n"
    cell = worker.run(code + "r[1], r[2], [type(x).__name__ for x in r]", answer=model)
    assert cell.result == "(1, 2, ['SubcallError', 'int', 'int', 'SubcallError'])"
    first, second = model.asked
    assert first.retry_of == []
    assert second.retry_of == ["1-0", "1-2", "1-3"]
    assert second.params == first.params
    for prompt, start in zip(second.prompts, ["bad", "mended", "bad"], strict=True):
        assert prompt.startswith(f"{start}\n\n")
        assert "holds no number, where one is asked for" in prompt
        assert prompt.endswith("Reply once more, in the form that is asked for.")
    assert "one" in second.prompts[1]
    assert model.verdicts == [
        ("1-0", False),
        ("1-1", True),
        ("1-2", False),
        ("1-3", False),
        ("2-0", False),
        ("2-1", True),
        ("2-2", False),
    ]
    assert {asked.params.task for asked in model.asked} == {"count"}
    assert len(model.judged) == 2
    reasons = [v.reason for judged in model.judged for v in judged.verdicts if not v.ok]
    assert all("number" in reason for reason in reasons)


def test_a_single_prompt_that_stays_unfit_raises(worker: WorkerDriver) -> None:
    """With the name of the task, the reason and the beginning of the reply."""
    for code in (
        "sub_RLM('p', schema=int, task='age')",
        "await sub_RLM.aio('p', schema=int, task='age')",
    ):
        error = worker.run(code, answer=Model(lambda prompt: "old " * 1000)).errors[0]
        assert error.ename == "SubcallError"
        assert error.evalue.startswith("age: the reply holds no number")
        assert "also when it was asked again" in error.evalue
        assert "'old old" in error.evalue
        assert len(error.evalue) < 500


def test_a_call_that_failed_is_not_asked_again(worker: WorkerDriver) -> None:
    """It was no reply; nothing is judged of it."""
    model = Model(lambda prompt: FAIL if prompt == "x" else "1")
    cell = worker.run("str(sub_RLM(['x', 'y'], schema=int)[0])", answer=model)
    assert cell.result == "'the server is gone'"
    assert len(model.asked) == 1
    assert model.verdicts == [("1-1", True)]


def test_a_second_try_that_cannot_be_made_costs_no_other_result(worker: WorkerDriver) -> None:
    """Where the call fails, and where the kernel refuses it."""
    model = Model(once("no", FAIL))
    cell = worker.run("str(sub_RLM(['a'], schema=int)[0])", answer=model)
    assert "the call failed when it was asked again: the server is gone" in (cell.result or "")

    def refuse(message: messages.FromWorker) -> messages.ToWorker | None:
        if isinstance(message, messages.SendSubcalls) and message.retry_of:
            return messages.Failed(id=message.id, ename="SubcallError", reason="spent")
        return Model(lambda prompt: prompt)(message)

    cell = worker.run("r = sub_RLM(['a', '7'], schema=int)\nstr(r[0]), r[1]", answer=refuse)
    assert "it was not asked again: spent" in (cell.result or "")
    assert (cell.result or "").endswith(" 7)")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("lambda v: v > 5", "failed the check"),
        ("lambda v: 'too small' if v < 5 else ''", "failed the check: too small"),
        ("at_least", "failed the check: it is 3"),
        ("refuse", "failed the check: not this"),
    ],
)
def test_a_check_that_fails(worker: WorkerDriver, check: str, reason: str) -> None:
    """By what it returns or raises; the second try passes."""
    worker.run(
        "def at_least(v): assert v > 5, f'it is {v}'\n"
        "def refuse(v):\n    if v < 5: raise ValueError('not this')"
    )
    model = Model(once("3", "7"))
    assert worker.run(f"sub_RLM('p', schema=int, check={check})", answer=model).result == "7"
    assert model.judged[0].verdicts[0].reason == reason
    assert reason in model.asked[1].prompts[0]
    assert model.verdicts == [("1-0", False), ("2-0", True)]


def test_a_check_of_a_text(worker: WorkerDriver) -> None:
    """Needs no type; its name is the sub-task's."""
    worker.run("def short(text): return len(text) < 5")
    model = Model(once("much too long", "ok"))
    assert worker.run("sub_RLM('p', check=short)", answer=model).result == "'ok'"
    assert [asked.params.task for asked in model.asked] == ["short", "short"]


def test_a_defect_of_a_check_is_raised_before_anything_is_asked_again(
    worker: WorkerDriver,
) -> None:
    """The replies are kept as they came."""
    model = Model(lambda prompt: "7")
    cell = worker.run("sub_RLM(['p', 'q'], schema=int, check=lambda v: v.nothing)", answer=model)
    assert cell.errors[0].ename == "AttributeError"
    assert len(model.asked) == 1
    assert worker.run("list(sub_RLM.last)").result == "['7', '7']"


def test_a_child_run_is_told_the_form_with_its_query(worker: WorkerDriver) -> None:
    """Its prompt is its P, which stays as it is; so it does when it is asked again."""
    model = Model(lambda prompt: f"{len(model.asked)}" if len(model.asked) > 1 else "many")
    code = "sub_RLM('the text', depth='rlm', query='How many?', schema=int)"
    assert worker.run(code, answer=model).result == "2"
    first, second = model.asked
    assert first.prompts == second.prompts == ["the text"]
    assert (first.params.query or "").startswith("How many?")
    assert "JSON" in (first.params.query or "")
    assert "was not accepted" in (second.params.query or "")


@pytest.mark.parametrize(
    "options",
    [
        "choices=[]",
        "choices='yes'",
        "choices=5",
        "choices=['a', 'a']",
        "choices=['a', '']",
        "choices=['a'], schema=int",
        "schema=object()",
        "schema=Plain",
        "schema={'type': 'no such type'}",
        "schema={'const': {1}}",
        "schema={'$ref': '#'}",
        "schema=endless",
        "check=5",
        "check=later",
        "task=5",
        "temprature=0",
    ],
)
def test_options_of_no_use_are_refused_at_once(worker: WorkerDriver, options: str) -> None:
    """Nothing is sent then."""
    worker.run(
        "async def later(v): pass\nclass Plain: pass\n"
        "endless = {}\nendless['properties'] = {'x': endless}"
    )
    for call in ("sub_RLM('p'", "await sub_RLM.aio('p'", "sub_RLM.map('{}', ['p']"):
        model = Model(lambda prompt: "x")
        cell = worker.run(f"{call}, {options})", answer=model)
        assert cell.errors[0].ename in ("TypeError", "ValueError")
        assert "\n" not in cell.errors[0].evalue
        assert cell.requests == []


def test_a_misspelt_option_names_its_like(worker: WorkerDriver) -> None:
    """Where Python itself does not say it."""
    error = worker.run("await sub_RLM.aio('p', temprature=0)").errors[0]
    assert "did you mean temperature?" in error.evalue


def test_a_stop_that_is_no_text_is_named(worker: WorkerDriver) -> None:
    """It has no length and no parts, which is nothing that a person asked for."""
    error = worker.run("sub_RLM('p', stop=5)").errors[0]
    assert error.evalue == "stop of a sub-call: a str or a list of str, not int"


@pytest.mark.parametrize("number", ["2**63", "-(2**63) - 1", "2**70"])
def test_a_seed_that_no_server_takes_is_told_the_range(worker: WorkerDriver, number: str) -> None:
    """Nothing is sent."""
    cell = worker.run(f"sub_RLM('p', seed={number})")
    assert cell.errors[0].evalue == "seed of a sub-call: give a number from -2**63 to 2**63 - 1"
    assert cell.requests == []


def test_a_schema_is_never_fetched(worker: WorkerDriver) -> None:
    """A reference to a URL is an error of the cell that gave it."""
    code = "sub_RLM('p', schema={'$ref': 'http://127.0.0.1:9/schema.json'})"
    cell = worker.run(code, answer=Model(lambda prompt: "{}"))
    assert cell.errors[0].ename == "ValueError"
    assert "put it under $defs" in cell.errors[0].evalue


def test_a_name_alone_groups_calls_and_judges_nothing(worker: WorkerDriver) -> None:
    """`task=` without a form."""
    model = Model(lambda prompt: "text")
    assert worker.run("sub_RLM('p', task='summary')", answer=model).result == "'text'"
    assert model.asked[0].params.task == "summary"
    assert model.judged == []


def test_many_verdicts_fit_into_messages(worker: WorkerDriver) -> None:
    """Each of 25,000 replies is judged, in few messages."""
    model = Model(lambda prompt: "yes")
    code = "sum(sub_RLM(['p'] * 25_000, choices=['yes', 'no'], task='t').count(x) for x in ['yes'])"
    assert worker.run(code, answer=model).result == "25000"
    assert len(model.verdicts) == 25_000
    assert len(model.judged) == 25
