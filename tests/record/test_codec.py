"""Events survive the record unchanged, whatever is in them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.cells import CellResult, Display, Value
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import (
    Event,
    ReplyStreamed,
    RunEnded,
    SubcallEnded,
    TurnExecuted,
    TurnObserved,
)
from rlm_kernel.record import codec
from rlm_kernel.record.fault import Fault
from tests.record import samples

ANY_TEXT = st.text(st.characters(codec=None), max_size=50) | st.sampled_from(
    ["rlm:", "rlm:blob:", "rlm:float:nan", "rlm:pairs", "null", "x" * 5000, "rlm:" + "y" * 5000]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=20)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(ANY_TEXT | st.integers() | st.binary(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def roundtrip(event: Event) -> tuple[Event, str]:
    body, blobs = codec.pack(event)
    return codec.unpack(body, blobs.__getitem__), body


@pytest.mark.parametrize("event", samples.one_of_each(), ids=lambda e: type(e).__name__)
def test_every_kind_of_event_comes_back_equal(event: Event) -> None:
    back, body = roundtrip(event)

    assert type(back) is type(event)
    assert repr(back) == repr(event)  # not ==: a sample holds nan, which equals nothing
    assert json.loads(body)["event"] == type(event).__name__


def test_the_samples_hold_every_kind_of_event() -> None:
    assert {type(event) for event in samples.one_of_each()} == set(get_args(Event))


@settings(deadline=None)
@given(ANYTHING)
def test_a_value_of_user_code_comes_back_as_it_was(data: Any) -> None:
    answer = RunEnded(state="answered", answer=Value("object", "", data))
    shown = TurnExecuted(
        turn=1, result=CellResult(ok=True, execution_count=1, outputs=[Display({"any": data})])
    )

    assert repr(roundtrip(answer)[0]) == repr(answer)
    assert repr(roundtrip(shown)[0]) == repr(shown)


@settings(deadline=None)
@given(ANY_TEXT)
def test_any_text_comes_back_as_it_was_from_any_field(text: str) -> None:
    for event in (
        ReplyStreamed(turn=1, offset=0, text=text),
        TurnObserved(turn=1, observation=text),
        *samples.turn(source=text),
    ):
        assert roundtrip(event)[0] == event


def test_a_float_that_is_no_number_is_not_lost_in_json() -> None:
    event = SubcallEnded(call_id="c", ok=True, usage=Usage(cost=float("nan")))

    assert repr(roundtrip(event)[0]) == repr(event)


def test_long_texts_go_to_blobs_and_equal_ones_to_the_same() -> None:
    event = SubcallEnded(call_id="c", ok=False, response=samples.LONG, error=samples.LONG)

    body, blobs = codec.pack(event)

    assert len(body) < 1000
    assert list(blobs.values()) == [samples.LONG.encode()]
    assert list(codec.references(body)) == list(blobs) * 2


def test_source_and_observation_stay_readable_in_plain_sql_however_long() -> None:
    body, blobs = codec.pack(TurnObserved(turn=1, observation=samples.LONG))

    assert json.loads(body)["observation"] == samples.LONG
    assert not blobs


def test_a_reference_of_a_later_kind_is_refused_and_not_taken_for_text() -> None:
    body = '{"event":"TurnObserved","turn":1,"observation":"rlm:pieces:…"}'

    with pytest.raises(Fault, match="cannot read"):
        codec.unpack(body, lambda sha256: b"")


def test_compressed_data_of_another_size_than_announced_is_not_unpacked() -> None:
    frame = codec.compress(b"x" * 1000, 3)

    assert codec.decompress(frame, 1000) == b"x" * 1000
    with pytest.raises(Fault, match="size"):
        codec.decompress(frame, 999)
    with pytest.raises(Fault, match="damaged"):
        codec.decompress(b"not zstd at all", 1000)
