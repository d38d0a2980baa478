"""Servers that ``jupyter rlm serve`` started: listed, found, and asked in all forms."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import parse_sub_spec
from rlm_kernel.subcalls.endpoint import Exchange, ToolSpec, ToolUse
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from tests.vllm.conftest import RecordedKernel
from tests.vllm.servers import MODEL, Machine, Server, until

LOOK_UP = ToolSpec(
    name="look_up",
    description="The year in which a ship was built.",
    parameters='{"type": "object", "properties": {"ship": {"type": "string"}}}',
)


@pytest.fixture
async def endpoint(server: Server) -> AsyncIterator[OpenAIEndpoint]:
    endpoint = OpenAIEndpoint(parse_sub_spec(server.spec), "none")
    yield endpoint
    await endpoint.close()


def test_a_kernel_finds_the_only_server_by_itself(
    server: Server, kernel_with: Callable[..., RecordedKernel]
) -> None:
    """No model was chosen anywhere."""
    kernel = kernel_with()

    cell = kernel.run("print(sub_RLM('Say a word.', max_tokens=2) != '')")

    assert cell.text() == "True\n", cell.evalue
    assert [call["model"] for call in kernel.calls()] == [MODEL]


def test_a_cell_names_the_model_alone(
    server: Server, kernel_with: Callable[..., RecordedKernel]
) -> None:
    """``vllm:MODEL`` is the server that has it, wherever it listens."""
    kernel = kernel_with(RLM_SUB="openai:none@http://127.0.0.1:9/v1")

    cell = kernel.run(f"print(sub_RLM('Say a word.', model='vllm:{MODEL}', max_tokens=2) != '')")

    assert cell.text() == "True\n", cell.evalue


def test_a_model_that_is_not_served_is_told_with_those_that_are(
    server: Server, kernel_with: Callable[..., RecordedKernel]
) -> None:
    kernel = kernel_with()

    cell = kernel.run("sub_RLM('Say a word.', model='vllm:Qwen/Qwen3-8B')")

    assert cell.status == "error"
    assert "Qwen/Qwen3-8B" in cell.evalue
    assert MODEL in cell.evalue


def test_servers_shows_how_busy_the_server_is(
    kernel: RecordedKernel, machine: Machine, server: Server
) -> None:
    """Model, requests and KV cache while a batch is under way; the table has all of it."""

    def listed() -> dict[str, object]:
        done = machine.command("servers", "--json")
        assert done.returncode == 0, done.stderr
        reports: list[dict[str, object]] = json.loads(done.stdout)
        return next(report for report in reports if report["name"] == server.name)

    assert (listed()["model"], listed()["running"]) == (MODEL, 0)
    request = kernel.send("r = sub_RLM(['Tell a story about ships.'] * 200, max_tokens=200)")
    try:
        until(lambda: server.metric("num_requests_running") > 0, "the server is not busy")
        busy = listed()
        assert isinstance(busy["running"], int)
        assert busy["running"] > 0
        assert isinstance(busy["kv_cache_used"], float)
        assert 0 < busy["kv_cache_used"] <= 1
        assert isinstance(busy["prefix_hit_rate"], float)
        assert 0 < busy["prefix_hit_rate"] <= 1
        table = machine.command("servers").stdout
    finally:
        kernel.interrupt()
        kernel.collect(request)
    line = next(line for line in table.splitlines() if line.startswith(server.name))
    assert line.split()[1:4] == [MODEL, server.url, "CPU"]
    assert line.count("%") == 2


async def test_tools_are_accepted(endpoint: OpenAIEndpoint) -> None:
    """The model may call one or not: that the request is understood is the claim."""
    reply = await endpoint.complete(
        "When was the Vasa built? Use look_up.", SubcallParams(max_tokens=24), tools=[LOOK_UP]
    )

    assert reply.text or reply.uses


async def test_results_of_tools_are_accepted(endpoint: OpenAIEndpoint) -> None:
    """A round in which the model asked for a tool, and what it was given."""
    use = ToolUse(use_id="call-1", name="look_up", arguments='{"ship": "Vasa"}')
    exchange = Exchange(text="", uses=[use], results=["1627"])

    reply = await endpoint.complete(
        "When was the Vasa built?",
        SubcallParams(max_tokens=24),
        tools=[LOOK_UP],
        exchanges=[exchange],
    )

    assert reply.text or reply.uses
