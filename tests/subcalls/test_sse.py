"""The reader of event streams."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.sse import EventReader

STREAM = b': ping\n\nevent: x\ndata: {"a":1}\r\n\r\ndata:{"b":"\xc3\xbc"}\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":"\xc3\xbc"}', b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_the_pieces_in_which_a_stream_comes_do_not_matter(cuts: list[int]) -> None:
    """Any split gives the same events, inside characters and line ends too."""
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader(1 << 20)
    events: list[bytes] = []
    for start, end in itertools.pairwise(places):
        events += reader.feed(STREAM[start:end])

    assert events == EVENTS


def test_a_stream_that_never_ends_is_cut_off() -> None:
    """The bound holds for a single line, too."""
    reader = EventReader(1 << 20)

    for _ in range(16):
        assert reader.feed(b"x" * 65536) == []

    with pytest.raises(EndpointError, match="longer than 1 MiB"):
        reader.feed(b"x")
