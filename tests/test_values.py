"""Values cross the link as what they are, and nothing that comes from below does harm."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import Value
from rlm_kernel.engine.events import RunEnded
from rlm_kernel.record.codec import pack, unpack
from rlm_kernel.values import MAX_DEPTH, decode, encode, received

# Hypothesis builds it where a draw is tried again, and the strategies below are nested.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


def through(value: object) -> Any:
    """*value* after the way over the link, as msgpack."""
    return decode(msgspec.msgpack.decode(msgspec.msgpack.encode(encode(value)), type=Value))


def same(left: Any, right: Any) -> bool:
    """Equal and of equal types, all the way down; NaN is itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, Decimal):
        return str(left) == str(right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(a, b) for a, b in pairs)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


any_text = st.text(st.characters(exclude_categories=()))
hashable_leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | any_text
    | st.binary()
    | st.fractions()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.times()
    | st.timedeltas()
    | st.builds(Path, st.text("abc/.", min_size=1))
)
leaf = (
    hashable_leaf | st.floats() | st.complex_numbers() | st.decimals() | st.binary().map(bytearray)
)
hashables = st.recursive(
    hashable_leaf, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3)
)
values = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
    ),
)


@given(values)
def test_a_value_arrives_as_what_it_was(value: object) -> None:
    """Of the same type and equal, however nested; its text is whole."""
    assert encode(value).exact
    assert same(through(value), value)


@given(any_text)
def test_a_str_is_carried_once(text: str) -> None:
    """A long answer is not sent as text and as data."""
    carried = encode(text)
    assert decode(carried) == text
    if "\ud800" <= max(text, default="") <= "\udfff":
        return
    assert carried.data is None or any("\ud800" <= c <= "\udfff" for c in text)


def test_integers_of_any_size() -> None:
    """Also of more digits than str() will write."""
    for value in (2**63 - 1, 2**63, -(2**63) - 1, 10**5000):
        assert through(value) == value


class Colour(enum.Enum):
    RED = 1


class Number(int):
    def __repr__(self) -> str:
        return "a number"


@dataclasses.dataclass
class Point:
    x: int
    tags: list[str]


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (Point(1, ["a"]), {"x": 1, "tags": ["a"]}),
        ([Point(1, [])], [{"x": 1, "tags": []}]),
        (Pair(1, 2), (1, 2)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (Number(5), 5),
        (np.float64(0.5), 0.5),
        (np.int32(7), 7),
        (np.str_("x"), "x"),
        (np.bool_(True), True),
        (Colour.RED, "Colour.RED"),
        ([Colour.RED], ["Colour.RED"]),
    ],
)
def test_what_cannot_be_exact_says_so_and_comes_near(value: object, nearest: object) -> None:
    """Dataclasses as dicts, subclasses and numpy scalars as builtins, the rest as text."""
    assert not encode(value).exact
    assert same(through(value), nearest)


def test_zones_are_not_silently_lost() -> None:
    """An offset is carried exactly; a named zone is not, and says so."""
    import zoneinfo

    fixed = datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    assert through(fixed) == fixed
    named = datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC"))
    assert not encode(named).exact


def test_cycles_and_depth_are_text_only() -> None:
    """Neither loops nor overflows the stack."""
    cycle: list[Any] = []
    cycle.append(cycle)
    assert (encode(cycle).exact, encode(cycle).data) == (False, None)
    assert through(cycle) == "[[...]]"
    nested: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert same(through(nested), nested)
    for _ in range(300):
        nested = [nested]
    assert isinstance(through(nested), str)
    twice = [1]
    assert through([twice, twice]) == [[1], [1]]


class Hostile:
    def __str__(self) -> str:
        raise ValueError

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_classes_that_raise_do_not_stop_it() -> None:
    """There is always some text."""
    for value in (Hostile(), [Hostile()], {"k": Hostile()}):
        carried = encode(value)
        assert not carried.exact
        assert carried.text


@pytest.mark.parametrize(
    "data",
    [
        ["nosuch", 1],
        ["l"],
        ["l", 5],
        ["l", 1, 2],
        [],
        {"a": 1},
        ["i", "not hex"],
        ["i", 5],
        ["b", 1 << 50],
        ["u", "text"],
        ["u", b"\xff"],
        ["d", [[1]]],
        ["d", [[["l", []], 1]]],
        ["s", [["l", []]]],
        ["fr", ["1", "0"]],
        ["td", [10**12, 0, 0]],
        ["da", "yesterday"],
        ["de", "x"],
        ["pa", 5],
        ["c", ["a", "b"]],
        [["l", []], []],
    ],
)
def test_malformed_data_decodes_to_the_text(data: Any) -> None:
    """A worker that lies gets nothing but its text through."""
    assert decode(Value("x", "the text", data, True)) == "the text"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
tags = st.sampled_from([*"ltsfdicub", "da", "dt", "ti", "td", "de", "fr", "pa", "o"])


@given(st.tuples(tags, json_like).map(list) | json_like)
def test_no_data_at_all_makes_it_raise(data: Any) -> None:
    """Whatever comes from below, the kernel's process goes on."""
    decode(Value("x", "the text", data, True))


def deep(levels: int) -> object:
    """Dicts in dicts, the most nested that a value can become for the link."""
    value: object = 2**70
    for _ in range(levels):
        value = {"key": value}
    return value


def test_deepest_value_that_is_carried_is_received_whole_and_can_be_recorded() -> None:
    value = encode(deep(MAX_DEPTH))

    assert value.exact
    assert received(value) == value
    answer = RunEnded(state="answered", answer=value)
    body, blobs = pack(answer)
    assert unpack(body, blobs.__getitem__) == answer


@pytest.mark.parametrize("data", [{"a": 1}, ["l", [{}]], ["l", [1, ["d", [[1, {"b": 2}]]]]]])
def test_maps_are_no_data_of_a_value(data: object) -> None:
    assert received(Value("dict", "…", data)) == Value("dict", "…", None, False)


def test_data_nested_without_end_is_not_received() -> None:
    data: object = 1
    for _ in range(100_000):
        data = [data]

    assert received(Value("list", "…", data)) == Value("list", "…", None, False)


def test_fraction_whose_making_would_take_long_travels_as_text() -> None:
    small, large = Fraction(-(16**999), 3), Fraction(16**1000 + 1, 3)

    assert through(small) == small
    assert encode(large).data is None
    assert not encode(large).exact
    hostile = Value("Fraction", "…", ["fr", ["f" * 600_000, "e" * 600_000]])
    assert decode(hostile) == "…"


@pytest.mark.parametrize("tag", ["s", "f", "d"])
def test_keys_that_are_made_to_collide_decode_to_the_text(tag: str) -> None:
    """The hash of an int is its remainder by 2**61 - 1: 200,000 with one hash take minutes."""
    keys = [["i", format(n * (2**61 - 1), "x")] for n in range(1, 200_000)]
    payload = [[key, None] for key in keys] if tag == "d" else keys

    assert decode(Value("set", "…", [tag, payload])) == "…"
