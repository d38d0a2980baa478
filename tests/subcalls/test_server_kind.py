"""What an endpoint finds out about its server, against real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from rlm_kernel.cells import SubcallParams
from rlm_kernel.subcalls.server.connection import Connection
from rlm_kernel.subcalls.server.server_kind import Capacity, ServerFacts, probe
from tests.servers.scripted import MODEL, ScriptedServer
from tests.subcalls.conftest import endpoint_for

PLAIN = SubcallParams()

VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:cache_config_info{block_size="16",engine="0",kv_cache_max_concurrency="7.5",\
kv_cache_size_tokens="30720",note="a \\"quoted\\" one",num_gpu_blocks="1920"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_max_concurrency="7.5",\
kv_cache_size_tokens="30720",num_gpu_blocks="1920"} 1.0
"""


@pytest.mark.parametrize(
    ("owner", "kind", "streams"),
    [("vllm", "vllm", False), ("llamacpp", "llamacpp", True), ("", "other", False)],
)
async def test_a_server_says_what_it_is(owner: str, kind: str, streams: bool) -> None:
    """Its list of models does; only llama.cpp is asked to stream."""
    async with ScriptedServer(reply=lambda prompt: "yes", owned_by=owner) as server:
        endpoint = endpoint_for(server)
        assert endpoint.kind is None
        facts = await endpoint.facts()
        await endpoint.complete("a prompt", PLAIN)
        await endpoint.close()

    assert facts.kind == endpoint.kind == kind
    assert await endpoint.context_limit() == server.models[MODEL]
    assert server.requests[0].body.get("stream", False) is streams


async def test_many_calls_at_once_ask_once_what_the_server_is() -> None:
    """One probe for all, and none afterwards."""
    async with ScriptedServer(reply=lambda prompt: "yes") as server:
        endpoint = endpoint_for(server)
        await asyncio.gather(*(endpoint.complete(f"{n}", PLAIN) for n in range(20)))
        await endpoint.facts()
        await endpoint.close()

    assert server.probes == 1
    assert server.completed == 20


async def test_a_server_that_is_known_is_not_asked() -> None:
    """Whoever started it knows what it is."""
    async with ScriptedServer(reply=lambda prompt: "yes") as server:
        facts = ServerFacts(kind="vllm", contexts={MODEL: 4096})
        endpoint = endpoint_for(server, facts=facts)
        await endpoint.complete("a prompt", PLAIN)
        assert await endpoint.context_limit() == 4096
        await endpoint.close()

    assert server.probes == 0


async def test_a_server_that_went_away_is_asked_anew() -> None:
    """Another one may come back at its place."""
    async with ScriptedServer(reply=lambda prompt: "yes") as server:
        port = server.port
        endpoint = endpoint_for(server)
        await endpoint.complete("a prompt", PLAIN)
    with pytest.raises(Exception, match=r"refuses connections|cut the connection"):
        await endpoint.complete("a prompt", PLAIN)
    other = ScriptedServer(reply=lambda prompt: "yes", owned_by="vllm", models={MODEL: 99})
    await other.start(port)
    await endpoint.complete("a prompt", PLAIN)
    await endpoint.close()
    await other.close()

    assert (endpoint.kind, await endpoint.context_limit()) == ("vllm", 99)


@pytest.fixture
async def facts_from() -> Any:
    """What a server is taken for whose list of models answers so."""

    async def find(status: int, answer: Any) -> ServerFacts | None:
        async def models(request: web.Request) -> web.Response:
            if isinstance(answer, str):
                return web.Response(status=status, text=answer)
            return web.json_response(answer, status=status)

        app = web.Application()
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection = Connection(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "none")
        try:
            return await probe(connection)
        finally:
            await connection.close()
            await runner.cleanup()

    return find


async def test_an_adapter_has_the_context_of_its_base(facts_from: Any) -> None:
    """vLLM lists LoRA adapters without one."""
    cards = [
        {"id": "base", "owned_by": "vllm", "max_model_len": 4096},
        {"id": "tuned", "owned_by": "vllm", "parent": "base"},
    ]
    facts = await facts_from(200, {"data": cards})

    assert facts.context("tuned") == 4096
    assert facts.context("another") is None


@pytest.mark.parametrize(
    "answer",
    [
        {"data": [{"id": "m", "max_model_len": -5}]},
        {"data": "none"},
        {"data": [{"id": "m", "owned_by": "vllm"}, {"id": "n", "owned_by": "llamacpp"}]},
        "<html>a page</html>",
        "[" * 100_000,
    ],
)
async def test_an_odd_list_of_models_makes_an_ordinary_server(facts_from: Any, answer: Any) -> None:
    """Nothing in it stops a call."""
    facts = await facts_from(200, answer)

    assert facts.kind == "other"
    assert facts.context("m") is None


@pytest.mark.parametrize(
    ("status", "known"), [(404, True), (401, True), (503, False), (429, False)]
)
async def test_a_server_that_is_not_ready_is_asked_again(
    facts_from: Any, status: int, known: bool
) -> None:
    """503 while a model loads says nothing of what the server is; 404 does."""
    facts = await facts_from(status, "not now")

    assert (facts is not None) is known


async def test_the_capacity_of_vllm_is_that_of_all_its_engines() -> None:
    """Running and waiting requests, and what its cache holds."""
    async with ScriptedServer(owned_by="vllm", metrics=VLLM_METRICS) as server:
        endpoint = endpoint_for(server)
        capacity = await endpoint.capacity()
        await endpoint.close()

    assert capacity == Capacity(slots=15, kv_tokens=61440, running=7, waiting=2)


async def test_the_capacity_of_an_older_vllm_is_counted_from_its_blocks() -> None:
    """It names blocks and their size; numbers that are none are passed over."""
    metrics = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        'vllm:num_requests_running{engine="0"} NaN\n'
    )
    async with ScriptedServer(owned_by="vllm", metrics=metrics) as server:
        endpoint = endpoint_for(server)
        capacity = await endpoint.capacity()
        await endpoint.close()

    assert capacity == Capacity(kv_tokens=1600)


async def test_the_capacity_of_llama_cpp_is_its_slots() -> None:
    """Requests under way are told where its metrics are on."""
    metrics = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    async with ScriptedServer(owned_by="llamacpp", props={"total_slots": 4}) as server:
        endpoint = endpoint_for(server)
        quiet = await endpoint.capacity()
        server.metrics = metrics
        told = await endpoint.capacity()
        await endpoint.close()

    assert quiet == Capacity(slots=4)
    assert told == Capacity(slots=4, running=2, waiting=1)


@pytest.mark.parametrize("owner", ["vllm", "llamacpp", ""])
async def test_a_server_that_tells_nothing_has_no_capacity(owner: str) -> None:
    """Neither has one that is gone; it is no error."""
    async with ScriptedServer(owned_by=owner) as server:
        endpoint = endpoint_for(server)
        assert await endpoint.capacity() is None
    assert await endpoint.capacity() is None
    await endpoint.close()
