"""The context limit, checked with the server's own numbers before anything is sent."""

from __future__ import annotations

import re

from tests.vllm.conftest import RecordedKernel
from tests.vllm.servers import CONTEXT, Server


def test_a_prompt_over_the_context_is_not_sent_and_told_in_exact_tokens(
    kernel: RecordedKernel, server: Server
) -> None:
    """The error says how long it is, how long it may be, and how long pieces of it may be."""
    prompt = "Sum up: " + "one two three four five. " * 400
    tokens = server.tokens_of(prompt)
    assert tokens > CONTEXT
    before = server.metric("prompt_tokens_total")

    cell = kernel.run("sub_RLM('Sum up: ' + 'one two three four five. ' * 400, max_tokens=100)")

    assert cell.ename == "SubcallError"
    assert f"{tokens:,} tokens" in cell.evalue
    assert f"{CONTEXT:,}" in cell.evalue
    assert server.metric("prompt_tokens_total") == before
    pieces = re.search(r"([\d,]+) characters", cell.evalue)
    assert pieces is not None, cell.evalue
    piece = prompt[: int(pieces[1].replace(",", ""))]
    assert server.tokens_of(piece) + 100 <= CONTEXT


def test_a_prompt_just_under_the_context_is_answered(
    kernel: RecordedKernel, server: Server
) -> None:
    """Its reply gets the room that is left, though more was asked for."""
    words = 1800
    while server.tokens_of("a " * words) < CONTEXT - 12:
        words += 4
    left = CONTEXT - server.tokens_of("a " * words)
    assert 0 < left <= 12

    cell = kernel.run(f"reply = sub_RLM('a ' * {words}, max_tokens=500)")

    assert cell.status == "ok", cell.evalue
    (call,) = kernel.calls()
    assert CONTEXT - left < call["tokens"] <= CONTEXT


def test_one_prompt_too_long_fails_alone(kernel: RecordedKernel) -> None:
    """The others of its batch are answered."""
    cell = kernel.run(
        "r = sub_RLM(['Say a word.', 'a ' * 9000, 'Say a word.'], max_tokens=2)\n"
        "print([type(x).__name__ for x in r])"
    )

    assert cell.text() == "['str', 'SubcallError', 'str']\n"
