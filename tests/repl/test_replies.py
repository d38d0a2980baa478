"""Values in what models write: found where they are unambiguous, and otherwise not."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.repl.worker.subcalls.numerals import number_in
from rlm_kernel.repl.worker.subcalls.replies import Unfit, bare, value_in


def an_object(text: str) -> Any:
    """What a task for an object with the key ``a`` takes."""
    value = json.loads(text)
    if not isinstance(value, dict) or "a" not in value:
        raise Unfit("is no object with a")
    return value


def a_list(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, list):
        raise Unfit("is no list")
    return value


def a_number(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, (int, float)):
        raise Unfit("is no number")
    return value


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        ' \n{"a": 1}\n',
        '```json\n{"a": 1}\n```',
        '```\n{"a": 1}\n```\nThat is it.',
        'Here it is:\n\n```json\n{"a": 1}\n```',
        'Sure! {"a": 1} Anything else?',
        '[see below] {"a": 1}',
        'See [1], and then {"a": 1}.',
        'First {"b": 2}, but that is no answer: {"a": 1}',
        '<think>It could be {"a": 2}, or {"a": 3}.</think>\n{"a": 1}',
        "{'a': 1}",
    ],
)
def test_the_one_value_that_fits_is_found(text: str) -> None:
    """Whatever stands around it."""
    assert value_in(text, an_object) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no JSON"),
        ("I do not know.", "holds no JSON"),
        ('{"a": 1', "holds no JSON"),
        ('{"a": {"a": 1}', "holds no JSON"),
        ('{"a": 1} or {"a": 2}', "holds 2 values"),
        ('```\n{"a": 1}\n```\nor\n```\n{"a": 2}\n```', "holds 2 values"),
        ('{"b": 1}', "is no object with a"),
        ("[" * 100_000, "holds no JSON"),
        ("(" * 10_000, "holds no JSON"),
        ("{'a': 1, **b}", "holds no JSON"),
    ],
)
def test_what_is_not_there_or_ambiguous_is_not_taken(text: str, reason: str) -> None:
    """The reason is told."""
    with pytest.raises(Unfit, match=reason):
        value_in(text, an_object)


@pytest.mark.parametrize(
    "text", ['{"list": [1, 2], "more": ', "{list: [1, 2]}", '{"list": [1, 2], "text": "cut o']
)
def test_a_part_of_something_broken_is_not_the_value(text: str) -> None:
    """A list in an object that was cut off is not the list that was asked for."""
    with pytest.raises(Unfit):
        value_in(text, a_list)


@pytest.mark.parametrize(
    "text",
    ["yes", " yes\n", "Yes.", '"yes"', "**yes**", "`yes`", "<think>no?</think> YES!", "'yes'."],
)
def test_a_label_without_its_dress(text: str) -> None:
    """Quotes, emphasis, a full stop and a thought before it are no part of it."""
    assert bare(text).casefold() == "yes"


@given(st.text())
def test_any_text_is_either_a_value_or_unfit(text: str) -> None:
    """Nothing else comes out, whatever the model wrote."""
    with suppress(Unfit):
        assert "a" in value_in(text, an_object)


@given(
    st.dictionaries(st.text(), st.integers() | st.text(), min_size=1).map(
        lambda value: {"a": value}
    ),
    st.text(alphabet="abc .,:\n"),
)
def test_prose_around_a_value_changes_nothing(value: dict[str, Any], prose: str) -> None:
    """As long as it has no brackets of its own."""
    assert value_in(f"{prose}{json.dumps(value)}{prose}", an_object) == value


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("**42**", 42),
        ('"42"', 42),
        ("```json\n42\n```", 42),
        ("$1,234,567.50 in all", 1234567.5),
        ("1_000 people", 1000),
        ("There are 12\u202f345, I think.", 12345),
        ("It is -5.", -5),
        ("It is \u22125 degrees.", -5),
        ("+7", 7),
        ("007", 7),
        (".5", 0.5),
        ("About 6.02e23 of them", 6.02e23),
        ("42%", 42),
        ("<think>4 or 5? No.</think>6", 6),
        ("```json\n[]\n```\n```json\n8\n```", 8),
    ],
)
def test_the_only_number_of_a_sentence_is_found(text: str, number: float) -> None:
    """However its thousands and its sign are written."""
    assert number_in(text, a_number) == number


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no number"),
        ("I do not know.", "holds no number"),
        ("null", "holds no number"),
        ("42 of 100", "holds 2 numbers"),
        ("10-20", "holds 2 numbers"),
        ("1,2", "holds 2 numbers"),
        ("0,500", "holds 2 numbers"),
        ("1,2345", "holds 2 numbers"),
        ("on 24.12.2020", "holds 3 numbers"),
        ("GPT-4", "only a part"),
        ("the 3rd", "only a part"),
        ("5k", "only a part"),
        ("2\u00bd", "only a part"),
        ("1.5 million", "only a part"),
        ("minus 5", "only a part"),
        ("-$5", "only a part"),
        ("<think>Perhaps 5", "in the middle of a thought"),
        ('{"year": 19', "holds no JSON"),
        ('{"year": 1900}', "is no number"),
        ("[1]", "is no number"),
    ],
)
def test_a_number_that_may_be_another_is_not_taken(text: str, reason: str) -> None:
    """The reason says how many there are."""
    with pytest.raises(Unfit, match=reason):
        number_in(text, a_number)


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_read_as_python_writes_it(number: float) -> None:
    """With and without marks between thousands, in a sentence."""
    assert number_in(f"It is {number!r}.", a_number) == number
    if isinstance(number, int):
        assert number_in(f"It is {number:,}.", a_number) == number


@given(st.text(alphabet="0123456789.,-+eE_ %$kx\u00a0\u2212\u0663"))
def test_any_numerals_are_either_a_number_or_unfit(text: str) -> None:
    """What is found is always JSON."""
    with suppress(Unfit):
        assert isinstance(number_in(text, a_number), (int, float))
