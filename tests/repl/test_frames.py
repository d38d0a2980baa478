"""How the values of a frame are counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.repl import frames
from rlm_kernel.repl.frames import holds_too_many


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small examples reach."""
    monkeypatch.setattr(frames, "MAX_VALUES", 20)
    monkeypatch.setattr(frames, "_HARMLESS", 0)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.sampled_from(["x" * 70_000, b"y" * 70_000])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=18) | st.dictionaries(st.text(), inner, max_size=18),
    max_leaves=25,
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(values)
def test_a_frame_holds_too_many_where_its_values_are_more_than_the_limit(value: Any) -> None:
    frame = msgspec.msgpack.encode(value)

    assert holds_too_many(frame) == (count(value) > 20)


def test_many_items_in_one_container_count_each() -> None:
    assert holds_too_many(msgspec.msgpack.encode(list(range(70_000))))
    assert holds_too_many(msgspec.msgpack.encode({str(n): n for n in range(70_000)}))


@given(st.binary(max_size=40))
def test_bytes_that_are_no_message_are_left_to_the_decoder(frame: bytes) -> None:
    """No end of a frame, wherever it is cut, is read past."""
    assert holds_too_many(frame) in (True, False)
