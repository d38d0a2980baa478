"""System prompts are filled with the facts of the run; compaction keeps roles and bounds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.compaction import NO_SUMMARY, Meter, compacted
from rlm_kernel.engine.dialects import DIALECTS, PAPER, RLMS, Dialect, RunFacts, dialect_named
from rlm_kernel.engine.proposals import cell_in
from rlm_kernel.engine.roots import Message
from rlm_kernel.errors import UsageError


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_a_system_prompt_states_the_facts_of_the_run(dialect: Dialect) -> None:
    budget = Budget(max_turns=17, max_tokens=123_456, max_seconds=90, max_cost=2.5)
    text = dialect.system_prompt(RunFacts(budget=budget, sub="openai:s", sub_context=4096))

    for fact in ["17 turns", "123,456 tokens", "90 seconds", "$2.5", "4,096 tokens", "12,288"]:
        assert fact in text
    assert f"{dialect.observation_chars:,}" in text
    assert not re.search(r"@[A-Z]+@", text)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
def test_recursion_is_told_of_only_where_there_is_some(dialect: Dialect) -> None:
    def text(depth: int, max_depth: int) -> str:
        budget = Budget(max_depth=max_depth)
        return dialect.system_prompt(RunFacts(budget=budget, depth=depth, sub="s"))

    assert "child" in text(0, 1)
    assert 'depth="rlm"' not in text(1, 1)
    assert "rlm_query" not in text(1, 1)
    assert "child" in text(1, 2)
    assert not re.search(r"@[A-Z]+@|\n\n\n", text(1, 1))


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        (PAPER, ["`P`", "sub_RLM", "Final ="]),
        (RLMS, ["`context`", "llm_query_batched", 'answer["ready"] = True']),
    ],
    ids=["paper", "rlms"],
)
def test_a_dialect_uses_its_own_names(dialect: Dialect, names: list[str]) -> None:
    text = dialect.system_prompt(RunFacts(budget=Budget(), sub="s"))
    for name in names:
        assert name in text
    for name in ["llm_query", "`context`"] if dialect is PAPER else ["sub_RLM", "`P`"]:
        assert name not in text


def test_the_example_in_a_system_prompt_is_read_as_a_cell() -> None:
    for dialect in DIALECTS.values():
        assert cell_in(dialect.system_prompt(RunFacts(budget=Budget()))) is not None


def test_the_first_message_shows_no_more_of_a_prompt_than_its_beginning() -> None:
    preview = "".join(f"line {n}\n" for n in range(10_000))
    info = PromptInfo("str", 11_234_567, 1, "0" * 64, preview, "stdlib.txt")
    text = PAPER.first_message("Which code?", info)

    assert "Which code?" in text
    assert "11,234,567 characters" in text
    assert "stdlib.txt" in text
    assert len(text) < 1000


def test_an_unknown_dialect_is_told_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="choose paper or rlms; did you mean 'rlms'"):
        dialect_named("rlm")


@given(st.text(max_size=80), st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_a_cell_that_a_dialect_writes_is_read_back(prose: str, source: str) -> None:
    """So the root sees an edited cell as a reply that it could have given."""
    if re.search(r"[`~<\r]", prose + source) or not source.strip():
        return
    cell = cell_in(PAPER.cell(prose, source))

    assert cell is not None
    assert cell.source == source.rstrip("\n") or cell.source == source


def conversation(sizes: list[int]) -> list[Message]:
    messages = [Message("system", "s" * 500), Message("user", "u" * 200)]
    for size in sizes:
        messages += [Message("assistant", "a" * 50), Message("user", "o" * size)]
    return messages


@given(st.lists(st.integers(0, 9000), min_size=2, max_size=20), st.booleans())
def test_a_compacted_conversation_fits_and_alternates(sizes: list[int], summarised: bool) -> None:
    messages, meter, limit = conversation(sizes), Meter(), 4000
    messages[-1] = Message("user", f"The latest: {messages[-1].content}")
    summary = "I found it." if summarised else NO_SUMMARY
    kept = compacted(messages, summary, "Go on.", limit=limit, meter=meter)

    assert not meter.is_full(kept, limit)
    assert kept[:2] == messages[:2]
    assert [m.role for m in kept[2:]] == ["assistant", "user"] * (len(kept) // 2 - 1)
    assert kept[2].content == summary
    assert len(kept) >= 6
    assert kept[-1].content[:100] == messages[-1].content[:100]


def test_the_latest_turns_stay_as_far_as_they_fit() -> None:
    messages = conversation([1000] * 10)
    kept = compacted(messages, "Summary.", "Go on.", limit=10_000, meter=Meter())

    assert kept[4:] == messages[-len(kept) + 4 :]
    assert len(kept) > 8


def test_the_estimate_learns_from_what_a_server_counts() -> None:
    messages, meter = conversation([5000]), Meter()
    before = meter.tokens(messages)
    meter.learn(messages, before * 2)

    assert abs(meter.tokens(messages) - before * 2) <= 2
    meter.learn(messages, 1)
    meter.learn(messages, 10**9)
    assert meter.tokens(messages) <= sum(len(m.content) for m in messages) + 6 * len(messages)
