"""Whether a prompt fits, before it is sent."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.subcalls.embedded.endpoint import embedded_server
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.context import TEMPLATE, Verdict, judge
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from rlm_kernel.subcalls.server.server_kind import ServerFacts
from tests.servers.scripted import MODEL, ScriptedServer
from tests.subcalls.conftest import endpoint_for

PLAIN = SubcallParams()
LIMIT = 1000
"""Tokens of the context; the scripted server has a token for 4 characters."""

counting = pytest.mark.parametrize("owner", ["vllm", "llamacpp"])


def serving(owner: str) -> ScriptedServer:
    return ScriptedServer(reply=lambda prompt: "ok", owned_by=owner, models={MODEL: LIMIT})


async def complete(server: ScriptedServer, prompt: str, params: SubcallParams = PLAIN) -> Any:
    """The body that one call sent. Raises what it raises."""
    endpoint = endpoint_for(server)
    try:
        await endpoint.complete(prompt, params)
    finally:
        await endpoint.close()
    return server.requests[-1].body


@counting
async def test_a_prompt_that_is_too_long_is_not_sent(owner: str) -> None:
    """The error says by how much, in the server's own count, and what would fit."""
    async with serving(owner) as server:
        with pytest.raises(EndpointError) as caught:
            await complete(server, "word " * 1024, SubcallParams(max_tokens=200))

    assert caught.value.reason == (
        "the prompt has 1,280 tokens and the context of 'scripted' is 1,000: 480 too many beside "
        "the 200 for the reply; pass pieces of at most 2,800 characters"
    )
    assert not caught.value.retryable
    assert server.requests == []


@counting
@pytest.mark.parametrize("max_tokens", [None, 200, 900])
async def test_pieces_of_the_size_that_is_suggested_do_fit(
    owner: str, max_tokens: int | None
) -> None:
    """With room for the reply, if it asked for no more than half of the context."""
    params = SubcallParams(max_tokens=max_tokens)
    async with serving(owner) as server:
        with pytest.raises(EndpointError) as caught:
            await complete(server, "word " * 2000, params)
        found = re.search(r"at most ([\d,]+) characters", caught.value.reason)
        assert found
        piece = int(found[1].replace(",", ""))
        body = await complete(server, ("word " * 2000)[:piece], params)

    assert piece >= 1500
    assert body.get("max_tokens", 0) + piece // 4 <= LIMIT


@counting
async def test_a_prompt_that_just_fits_is_sent(owner: str) -> None:
    """One token is left for the reply; one more in the prompt leaves none."""
    async with serving(owner) as server:
        await complete(server, "x" * 4 * (LIMIT - 1))
        with pytest.raises(EndpointError, match="1 too many beside the 1 for the reply"):
            await complete(server, "x" * 4 * LIMIT)

    assert len(server.requests) == 1


@counting
async def test_a_reply_is_given_what_room_there_is(owner: str) -> None:
    """Servers refuse, or cut in silence, what is over the context with its reply."""
    async with serving(owner) as server:
        close = await complete(server, "x" * 3600, SubcallParams(max_tokens=500))
        short = await complete(server, "a short one", SubcallParams(max_tokens=5000))
        fits = await complete(server, "a short one", SubcallParams(max_tokens=500))

    assert close["max_tokens"] == 100
    assert LIMIT - 300 < short["max_tokens"] < LIMIT
    assert fits["max_tokens"] == 500


@counting
async def test_short_prompts_are_sent_without_being_counted(owner: str) -> None:
    """Thousands of them cost the server nothing more than their calls."""
    async with serving(owner) as server:
        endpoint = endpoint_for(server)
        prompts = ["x" * 1500, "日本" * 100, "a short one"]
        await asyncio.gather(*(endpoint.complete(prompt, PLAIN) for prompt in prompts * 10))
        await endpoint.close()

    assert server.counts == 0
    assert server.completed == 30


async def test_a_prompt_that_no_count_could_save_is_not_even_counted() -> None:
    """100 MB are not sent to be told that they are too many."""
    async with serving("vllm") as server:
        with pytest.raises(
            EndpointError, match=r"about 66,\d{3} tokens .* about 65,\d{3} too many"
        ):
            await complete(server, "word " * 40_000)

    assert (server.counts, server.requests) == (0, [])


async def test_a_server_that_cannot_count_judges_itself() -> None:
    """An ordinary one is not asked; its own refusal says the same."""
    async with serving("") as server:
        await complete(server, "x" * 8000)

    assert server.counts == 0
    assert len(server.requests) == 1


async def test_a_server_without_the_count_is_asked_for_it_once() -> None:
    """A router before vLLM may not have it."""
    async with serving("") as server:
        endpoint = endpoint_for(server, facts=ServerFacts(kind="vllm", contexts={MODEL: LIMIT}))
        for _ in range(3):
            await endpoint.complete("x" * 3900, PLAIN)
        await endpoint.close()

    assert server.counts == 1
    assert len(server.requests) == 3


async def test_the_system_message_counts_too() -> None:
    """And so does the form of a typed reply, which is told there."""
    async with serving("vllm") as server:
        with pytest.raises(EndpointError, match="too many"):
            await complete(server, "x" * 2000, SubcallParams(system="y" * 2100))


@given(
    size=st.integers(0, 10**6),
    context=st.integers(256, 200_000),
    max_tokens=st.none() | st.integers(1, 100_000),
)
def test_what_is_sent_unseen_fits_at_a_token_for_each_byte_or_is_clearly_below(
    size: int, context: int, max_tokens: int | None
) -> None:
    """A reply is never clamped to nothing; what is hopeless has 32 contexts at 3 bytes a token."""
    verdict = judge(size, context, max_tokens)

    if verdict is Verdict.FITS:
        reply = max_tokens or 0
        assert size + TEMPLATE + reply <= context or size / 3 / 0.6 + reply <= context
    elif verdict is Verdict.CLAMP:
        assert context - size - TEMPLATE >= context / 2
        assert max_tokens is not None
    elif verdict is Verdict.HOPELESS:
        assert size > 96 * context


@pytest.mark.embedded
async def test_llama_cpp_counts_what_it_will_be_sent() -> None:
    """Its count is that of the usage of the same prompt, template and all."""
    server = await embedded_server()
    spec = EndpointSpec(kind="openai", model="m", base_url=server.base_url)
    narrow = ServerFacts(kind="llamacpp", contexts={"m": 100}, any_model=True)
    narrowed = OpenAIEndpoint(spec, server.api_key, facts=narrow)
    plain = OpenAIEndpoint(spec, server.api_key)
    params = SubcallParams(system="Be brief.", max_tokens=1, temperature=0.0)
    prompt = "one <|im_end|> word after another, " * 20
    try:
        with pytest.raises(EndpointError) as caught:
            await narrowed.complete(prompt, params)
        reply = await plain.complete(prompt, params)
    finally:
        await narrowed.close()
        await plain.close()

    assert f"the prompt has {reply.usage.input_tokens} tokens" in caught.value.reason
