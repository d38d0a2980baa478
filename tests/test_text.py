"""Text is cleaned and measured in one way by all rooms."""

from __future__ import annotations

import pytest

from rlm_kernel.text import (
    escape_surrogates,
    estimated_tokens,
    replace_surrogates,
    without_ansi,
)


@pytest.mark.parametrize(
    "sequence",
    ["\x1b[31m", "\x1b[0;1;38:5:9m", "\x1b[?25l", "\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1bM"],
)
def test_control_sequences_of_terminals_leave_nothing_behind(sequence: str) -> None:
    assert without_ansi(f"a{sequence}[b]{sequence}c") == "a[b]c"


def test_tokens_are_estimated_from_bytes_and_never_none() -> None:
    assert estimated_tokens("") == 1
    assert estimated_tokens("x" * 300) == 101
    assert estimated_tokens("\u4e16" * 100) == 101
    assert estimated_tokens("\ud800") > 0


def test_lone_surrogates_are_escaped_or_replaced_and_pairs_joined() -> None:
    assert escape_surrogates("a\udc80\u00e9") == "a\\udc80\u00e9"
    assert replace_surrogates("a\udc80\u00e9") == "a\ufffd\u00e9"
    assert replace_surrogates("\ud83d\ude00 \ud83d") == "\U0001f600 \ufffd"
    assert escape_surrogates("\U0001f600") == replace_surrogates("\U0001f600") == "\U0001f600"
