"""The endpoint against a real server: what it sends, and what it makes of every kind of reply."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.engine.budget import Usage
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from rlm_kernel.subcalls.server.replies import StreamedReply
from tests.servers.scripted import (
    MODEL,
    Cut,
    ErrorEvent,
    Garbage,
    Hang,
    Refuse,
    Say,
    ScriptedServer,
    Step,
)
from tests.subcalls.conftest import endpoint_for

KEY = "sk-proj-0123456789abcdef"
PLAIN = SubcallParams()

streamed = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


async def failure(
    step: Step, *, stream: bool = False, params: SubcallParams = PLAIN
) -> EndpointError:
    """The error that one call ends in whose server takes *step*."""
    async with ScriptedServer([step], key=KEY) as server:
        endpoint = endpoint_for(server, stream=stream, api_key=KEY)
        with pytest.raises(EndpointError) as caught:
            await endpoint.complete("a prompt", params)
        await endpoint.close()
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@streamed
async def test_a_reply_has_the_text_the_usage_of_the_server_and_the_finish(stream: bool) -> None:
    """Exact usage of this call, not an estimate."""
    async with ScriptedServer([Say("ü" * 40, finish="length")]) as server:
        endpoint = endpoint_for(server, stream=stream)
        reply = await endpoint.complete("p" * 80, PLAIN)
        await endpoint.close()

    assert reply.text == "ü" * 40
    assert reply.finish == "length"
    assert reply.usage == Usage(input_tokens=20, output_tokens=10, calls=1)


@pytest.mark.parametrize("usage", ['"prompt_tokens":1%s', '"cost":1%s,"prompt_tokens":5'])
async def test_numbers_of_a_usage_that_cannot_be_are_not_believed(usage: str) -> None:
    """One that no database can hold would end the record."""
    message = '{"choices":[{"message":{"content":"hi"}}],"usage":{%s}}'
    async with ScriptedServer([Garbage(message % usage % ("0" * 400))]) as server:
        endpoint = endpoint_for(server)
        reply = await endpoint.complete("a prompt", PLAIN)
        await endpoint.close()

    assert reply.text == "hi"
    assert 0 < reply.usage.tokens < 10
    assert reply.usage.cost == 0.0


@streamed
async def test_usage_that_a_server_does_not_give_is_estimated_and_says_so(stream: bool) -> None:
    """A missing count is not 0 tokens."""
    async with ScriptedServer([Say("four words of text", usage=False)]) as server:
        endpoint = endpoint_for(server, stream=stream)
        reply = await endpoint.complete("a prompt of six words, about", PLAIN)
        await endpoint.close()

    assert reply.usage.estimated
    assert reply.usage.input_tokens > 0
    assert reply.usage.output_tokens > 0


async def test_only_what_was_asked_for_is_sent(server: ScriptedServer) -> None:
    """Parameters left out are left to the server; the others have the protocol's names."""
    endpoint = endpoint_for(server)
    await endpoint.complete("one", PLAIN)
    params = SubcallParams(
        model=MODEL, temperature=0.0, max_tokens=5, stop=["\n"], seed=7, system="Be brief."
    )
    await endpoint.complete("two", params)
    await endpoint.close()

    bare, full = (request.body for request in server.requests)
    assert bare == {"model": MODEL, "messages": [{"role": "user", "content": "one"}]}
    assert full == {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "two"},
        ],
        "temperature": 0.0,
        "max_tokens": 5,
        "stop": ["\n"],
        "seed": 7,
    }


async def test_the_key_is_sent_in_the_header_and_nowhere_else() -> None:
    """The right key gets an answer; without a key there is no header."""
    async with ScriptedServer(["yes", "yes"], key=KEY) as server:
        endpoint = endpoint_for(server, api_key=KEY)
        await endpoint.complete("a prompt", PLAIN)
        await endpoint.close()
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        assert KEY not in str(server.requests[0].body)

        endpoint = endpoint_for(server)
        with pytest.raises(EndpointError, match="refuses the API key"):
            await endpoint.complete("a prompt", PLAIN)
        await endpoint.close()
        assert "Authorization" not in server.requests[1].headers


async def test_text_that_is_no_unicode_is_sent_with_marks_in_its_place(
    server: ScriptedServer,
) -> None:
    """A lone surrogate in P does not make a call impossible; a pair of them is a character."""
    endpoint = endpoint_for(server)
    reply = await endpoint.complete("a\ud800b \ud83d\ude00", PLAIN)
    await endpoint.close()

    assert reply.text == "re: a\ufffdb 😀"


@pytest.mark.parametrize(
    ("step", "says", "retryable"),
    [
        (Refuse(401, f"Incorrect API key provided: {KEY}"), "set OPENAI_API_KEY", False),
        (Refuse(403), "set OPENAI_API_KEY", False),
        (Refuse(404, "The model `m` does not exist"), "has no model 'scripted'", False),
        (Refuse(400, "temperature must be below 2"), "temperature must be below 2", False),
        (Refuse(400, f"bad header {KEY}\nand more"), "bad header *** and more", False),
        (Refuse(413), "pass smaller pieces", False),
        (Refuse(408), "try again later", True),
        (Refuse(409), "try again later", True),
        (Refuse(429, "slow down"), "too many requests (429: slow down)", True),
        (Refuse(500), "is in trouble", True),
        (Refuse(502, page="<html>Bad gateway</html>"), "is in trouble (502)", True),
        (Refuse(503), "is in trouble", True),
        (Refuse(302, headers={"Location": "https://h/v1"}), "redirects to https://h/v1", False),
        (Cut(), "cut the connection before its reply was whole", True),
        (Garbage(), "something else than a completion", True),
        (Garbage("<html>Welcome</html>"), "a web page", True),
        (Garbage("[1, 2]"), "something else than a completion", True),
        (Garbage('{"choices": []}'), "without choices", False),
        (Garbage('{"choices": [{"message": 3}]}'), "something else than a completion", True),
        (ErrorEvent("the engine died"), "the engine died", True),
        (Say("", finish="length"), "empty completion (finish reason: length)", False),
        (Say("", finish="length", reasoning="hm"), "reasoned but gave no answer", False),
        (Say("", finish="content_filter"), "refused to answer", False),
        (Say("half of an ans", finish="content_filter"), "reason: content_filter", False),
        (Say("", refusal="I can't help with that."), "refused to answer", False),
        (Say("", finish="stop"), "empty completion (finish reason: stop)", False),
        (Say("", finish=""), "empty completion (finish reason: not given)", False),
        (Say(" \n\t\u2003", finish="stop"), "empty completion (finish reason: stop)", False),
        (Say("\n\n", finish="length", reasoning="hm"), "reasoned but gave no answer", False),
        (Say("half of an ans", finish="abort"), "aborted the completion", True),
    ],
)
async def test_a_failure_says_what_happened_and_whether_to_try_again(
    step: Step, says: str, retryable: bool
) -> None:
    """One sentence each, without the key, never an empty text in place of an error."""
    error = await failure(step)

    assert says in error.reason
    assert error.retryable is retryable


@pytest.mark.parametrize(
    ("step", "says", "retryable"),
    [
        (Refuse(401), "set OPENAI_API_KEY", False),
        (Cut("half"), "cut the connection", True),
        (Garbage(text="half"), "something else than a completion", True),
        (ErrorEvent(text="half"), "the engine died", True),
        (Say("", finish="length"), "empty completion (finish reason: length)", False),
        (Say("\n" * 40, finish="length"), "empty completion (finish reason: length)", False),
        (Say("", finish="length", reasoning="hm"), "reasoned but gave no answer", False),
        (Say("half of an ans", finish="content_filter"), "refused to answer", False),
        (Say("", refusal="I can't help with that."), "refused to answer", False),
        (Say("half of an ans", finish="abort"), "aborted the completion", True),
    ],
)
async def test_a_stream_fails_like_a_plain_reply(step: Step, says: str, retryable: bool) -> None:
    """A half of an answer is none."""
    error = await failure(step, stream=True)

    assert says in error.reason
    assert error.retryable is retryable


async def test_the_time_to_the_first_token_is_told_where_it_was_streamed() -> None:
    """It is over when the first text comes, however long the rest takes; reasoning is text."""
    gate = asyncio.Event()
    steps = [Say("a longer text", chunk=4, gate=gate, gate_at=4, reasoning="hm"), Say("plain")]
    async with ScriptedServer(steps) as server:
        endpoint, plain = endpoint_for(server, stream=True), endpoint_for(server, stream=False)
        began = time.monotonic()
        call = asyncio.create_task(endpoint.complete("a prompt", PLAIN))
        await server.until(lambda s: s.active == 1)
        gate.set()
        reply = await call
        whole = time.monotonic() - began
        assert (await plain.complete("a prompt", PLAIN)).first_token_s is None
        await endpoint.close()
        await plain.close()

    assert reply.first_token_s is not None
    assert 0 < reply.first_token_s <= whole


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    """The call goes out on a new one; nothing is lost, and no attempt is counted."""
    async with ScriptedServer(reply=lambda prompt: "yes") as server:
        port = server.port
        endpoint = endpoint_for(server)
        await endpoint.complete("a prompt", PLAIN)
    again = ScriptedServer(reply=lambda prompt: "yes")
    await again.start(port)
    reply = await endpoint.complete("a prompt", PLAIN)
    await endpoint.close()
    await again.close()

    assert reply.text == "yes"


async def test_the_first_token_may_come_together_with_the_end() -> None:
    """A short reply is often one packet."""
    async with ScriptedServer() as server:
        endpoint = endpoint_for(server)
        reply = StreamedReply(endpoint._connection)
        text = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
        assert reply(text + b"data: [DONE]\n\n")
        await endpoint.close()

    assert reply.first_token_s is not None
    assert reply.whole().choices


async def test_an_empty_completion_still_cost_something() -> None:
    """The server's count comes with the error, so that it can be booked."""
    error = await failure(Say("", finish="stop"))

    assert error.usage == Usage(input_tokens=2, calls=1)
    assert error.finish == "stop"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("7", 7.0), ("1.5", 1.5), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None)),
        *(("", None), (f"1 Jan {'9' * 20} 00:00:00 GMT", None)),
    ],
)
async def test_the_wait_that_a_server_asks_for_is_read(header: str, seconds: float | None) -> None:
    """Retry-After is a number of seconds or a date; a date that is past is no wait."""
    error = await failure(Refuse(429, headers={"Retry-After": header}))

    assert error.retry_after == seconds


TOO_LONG = {
    "vllm": "This model's maximum context length is 4096 tokens. However, your request has 5000 "
    "input tokens. Please reduce the length of the input messages.",
    "vllm-0.32": "You passed 5000 input tokens and requested 1 output tokens. However, the "
    "model's context length is only 4096 tokens.",
    "vllm-older": "This model's maximum context length is 4096 tokens. However, you requested "
    "5100 tokens (5000 in the messages, 100 in the completion).",
    "openai": "This model's maximum context length is 4,096 tokens. However, your messages "
    "resulted in 5,000 tokens.",
    "llama.cpp": "request (5000 tokens) exceeds the available context size (4096 tokens), try "
    "increasing it",
}


@pytest.mark.parametrize("message", TOO_LONG.values(), ids=TOO_LONG)
async def test_a_prompt_over_the_context_says_by_how_many_tokens(message: str) -> None:
    """However the server words it."""
    error = await failure(Refuse(400, message))

    assert error.reason == (
        "the prompt has 5,000 tokens and the context of 'scripted' is 4,096: "
        "905 too many beside the 1 for the reply; pass pieces of at most 5 characters"
    )


async def test_a_server_that_stops_counting_gives_only_the_least() -> None:
    """vLLM does. What is said to fit is by an estimate then."""
    message = (
        "This model's maximum context length is 2048 tokens. However, your prompt contains at "
        "least 2049 input tokens, which exceeds this limit even without any output tokens."
    )
    async with ScriptedServer([Refuse(400, message)]) as server:
        endpoint = endpoint_for(server)
        with pytest.raises(EndpointError) as caught:
            await endpoint.complete("word " * 3000, PLAIN)
        await endpoint.close()

    assert caught.value.reason == (
        "the prompt has at least 2,049 tokens and the context of 'scripted' is 2,048: at least 2 "
        "too many beside the 1 for the reply; pass pieces of at most 4,100 characters"
    )


async def test_a_prompt_over_the_context_is_told_without_numbers_too() -> None:
    """Where the server gives none, the error is still about the prompt's length."""
    error = await failure(Refuse(400, "context_length_exceeded"))

    assert "the prompt is too long for 'scripted'" in error.reason


async def test_a_server_that_is_not_there_is_worth_another_try() -> None:
    """Connection refused: perhaps it is just starting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    spec = EndpointSpec(kind="openai", model="m", base_url=f"http://127.0.0.1:{port}/v1")
    endpoint = OpenAIEndpoint(spec, "none")
    with pytest.raises(EndpointError) as caught:
        await endpoint.complete("a prompt", PLAIN)
    await endpoint.close()

    assert "refuses connections" in caught.value.reason
    assert caught.value.retryable


async def test_all_calls_to_a_server_that_is_not_there_say_so_and_may_be_repeated() -> None:
    """They share one probe, and none of them is left with what another made of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    spec = EndpointSpec(kind="openai", model="m", base_url=f"http://127.0.0.1:{port}/v1")
    endpoint = OpenAIEndpoint(spec, "none")
    calls = [endpoint.complete(f"prompt {n}", PLAIN) for n in range(8)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert await endpoint.context_limit() is None
    await endpoint.close()

    for error in errors:
        assert isinstance(error, EndpointError), repr(error)
        assert error.retryable
        assert "refuses connections" in error.reason


@streamed
async def test_cancelling_a_call_ends_it_on_the_server(stream: bool) -> None:
    """The connection is closed, not kept until the reply has come."""
    async with ScriptedServer([Hang("half" if stream else "")]) as server:
        endpoint = endpoint_for(server, stream=stream)
        call = asyncio.create_task(endpoint.complete("a prompt", PLAIN))
        await server.until(lambda s: s.active == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        await server.until(lambda s: s.cancelled == 1 and not s.active)
        await endpoint.close()


async def test_cancelling_the_first_call_leaves_the_others_alone(server: ScriptedServer) -> None:
    """The session and the probe that all wait for belong to none of them."""
    endpoint = endpoint_for(server, stream=None)
    first, second = (asyncio.create_task(endpoint.complete("x", PLAIN)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()

    assert (await second).text == "re: x"
    assert first.cancelled()
    await endpoint.close()


async def test_the_context_limit_is_what_the_server_says(server: ScriptedServer) -> None:
    """From ``/v1/models``, for the model that is asked."""
    server.models = {"other": 99, MODEL: 4096}
    endpoint = endpoint_for(server, stream=None)

    assert await endpoint.context_limit() == 4096
    await endpoint.close()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    """Serves one handler for all paths; gives its endpoint."""
    runners: list[web.AppRunner] = []
    endpoints: list[OpenAIEndpoint] = []

    async def start(handler: Handler) -> OpenAIEndpoint:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        endpoints.append(
            OpenAIEndpoint(EndpointSpec(kind="openai", model="m", base_url=url), "none")
        )
        return endpoints[-1]

    yield start
    for endpoint in endpoints:
        await endpoint.close()
    for runner in runners:
        await runner.cleanup()


async def test_llama_cpp_is_told_by_its_list_of_models_and_asked_to_stream(serve: Any) -> None:
    """Only while streaming does it notice that its client went away."""
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            card = {"id": "x.gguf", "owned_by": "llamacpp", "meta": {"n_ctx": 2048}}
            return web.json_response({"data": [card]})
        bodies.append(await request.json())
        events = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
        return web.Response(body=events + b"data: [DONE]\n\n", content_type="text/event-stream")

    endpoint = await serve(handler)

    assert (await endpoint.complete("a prompt", PLAIN)).text == "hi"
    assert bodies[0]["stream"] is True
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert await endpoint.context_limit() == 2048


async def test_a_server_without_a_list_of_models_is_an_ordinary_one(serve: Any) -> None:
    """The probe may fail in any way; the call is made in any case."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.Response(text="<html>nothing here</html>", status=404)
        assert "stream" not in await request.json()
        return web.json_response({"choices": [{"message": {"content": "hi"}}]})

    endpoint = await serve(handler)

    assert (await endpoint.complete("a prompt", PLAIN)).text == "hi"
    assert await endpoint.context_limit() is None


async def test_a_redirect_takes_the_key_nowhere(serve: Any) -> None:
    """It is an error, not followed."""
    paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    endpoint = await serve(handler)
    with pytest.raises(EndpointError, match="redirects to /elsewhere"):
        await endpoint.complete("a prompt", PLAIN)

    assert "/elsewhere" not in paths


async def test_a_reply_without_end_is_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the kernel is bounded whatever a server sends."""
    monkeypatch.setattr("rlm_kernel.subcalls.server.connection.MAX_BODY", 1 << 20)

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": []})
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    endpoint = await serve(handler)
    with pytest.raises(EndpointError, match="longer than 1 MiB"):
        await endpoint.complete("a prompt", PLAIN)
