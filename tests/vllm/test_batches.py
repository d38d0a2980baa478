"""Batches of sub-calls from a cell: order, count, form of the replies, prefix cache."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.conftest import RecordedKernel
from tests.vllm.prompts import INSTRUCTION
from tests.vllm.servers import Server

# Hard to answer with one of two words: what keeps to them is the server, not the model.
OFF_TOPIC = "Write a long poem about the sea in winter, number {item}."


def test_a_batch_comes_back_in_order_with_the_tokens_that_the_server_counted(
    kernel: RecordedKernel, server: Server
) -> None:
    """Prompts are told apart by their length: the server's usage in a reply says which it was to.
    No two counts of tokens are nearer than the longest reply."""
    kernel.run("prompts = ['Go on:' + ' one two three four' * (3 * n) for n in range(24)]")
    prompts = ["Go on:" + " one two three four" * (3 * n) for n in range(24)]
    counted = [server.tokens_of(prompt) for prompt in prompts]
    before = server.metrics()

    replies = kernel.value("sub_RLM(prompts, max_tokens=8, temperature=0)")

    calls = sorted(kernel.calls(), key=lambda call: call["place"])
    assert [call["prompt"] for call in calls] == prompts
    assert repr([call["response"] for call in calls]) == replies
    for call, tokens in zip(calls, counted, strict=True):
        assert tokens < call["tokens"] <= tokens + 8
    used, after = sum(call["tokens"] for call in calls), server.metrics()
    names = ("prompt_tokens_total", "generation_tokens_total")
    assert used == sum(after[name] - before[name] for name in names)
    assert kernel.value("budget()['tokens_used']") == str(used)


def test_choices_are_kept_by_the_server_in_a_batch_of_64(kernel: RecordedKernel) -> None:
    """Each call is made once: nothing had to be asked again."""
    cell = kernel.run(
        f"r = sub_RLM.map({OFF_TOPIC!r}, range(64), choices=['yes', 'no', 'é \"?\"'])\n"
        "print(len(r), set(r) <= {'yes', 'no', 'é \"?\"'})"
    )

    assert cell.text() == "64 True\n", cell.evalue
    assert len(kernel.calls()) == 64
    assert {call["verdict"] for call in kernel.calls()} == {"ok"}


def test_a_schema_is_kept_by_the_server_in_a_batch_of_64(kernel: RecordedKernel) -> None:
    """JSON with the fields that were asked for, each call made once."""
    cell = kernel.run(
        "from dataclasses import dataclass\n"
        "from typing import Literal\n"
        "@dataclass\n"
        "class Poem:\n"
        "    mood: Literal['sad', 'merry']\n"
        "    rhymes: bool\n"
        f"r = sub_RLM.map({OFF_TOPIC!r}, range(64), schema=Poem, max_tokens=32)\n"
        "print(len(r), {type(x).__name__ for x in r}, {x.mood for x in r} <= {'sad', 'merry'},"
        " {x.rhymes for x in r} <= {True, False})"
    )

    assert cell.text() == "64 {'Poem'} True True\n", cell.evalue
    assert len(kernel.calls()) == 64


def test_items_of_a_map_share_their_instruction_in_the_prefix_cache(
    kernel: RecordedKernel, server: Server
) -> None:
    """At least 80 % of all prompt tokens come out of the cache: a rate, not a time."""
    assert 295 <= server.tokens_of(INSTRUCTION) - server.tokens_of("") <= 340
    before = server.metrics()

    cell = kernel.run(
        "items = [f'import {n}: {n * 7919 % 1000} rows' for n in range(512)]\n"
        "teams = ['billing', 'shipping', 'accounts', 'operations', 'nobody']\n"
        f"r = sub_RLM.map({INSTRUCTION!r}, items, choices=teams)\n"
        "print(len(r), set(r) <= set(teams))",
        timeout=800,
    )

    assert cell.text() == "512 True\n", cell.evalue
    after = server.metrics()
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    hits, queries = (after[name] - before[name] for name in names)
    assert queries > 512 * 295
    assert hits / queries >= 0.8


def test_a_seed_is_sent_only_where_the_cell_names_one(
    kernel: RecordedKernel, server: Server
) -> None:
    """vLLM's CPU build can fail as a whole on a request that has one."""
    log = Path(server.log)

    def seeds(code: str) -> list[str]:
        begin = log.stat().st_size
        assert kernel.run(code).status == "ok"
        with log.open("rb") as file:
            file.seek(begin)
            lines = [line for line in file.read().decode().splitlines() if "SamplingParams" in line]
        return [line.partition("seed=")[2].partition(",")[0] for line in lines]

    assert seeds("sub_RLM('Say a word.', temperature=1, max_tokens=2)") == ["None"]
    assert seeds("sub_RLM('Say a word.', temperature=1, max_tokens=2, seed=7)") == ["7"]
