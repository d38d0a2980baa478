"""A server that repeats the key, wherever it can: it comes through to nobody."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.http_errors import Redactor
from rlm_kernel.subcalls.endpoint import EndpointError, ToolSpec
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

KEY = "sk-proj-01+23/45=6789abcdefXYZ"
PARTS = {KEY[start : start + 8] for start in range(len(KEY) - 7)}
PLAIN = SubcallParams()


class Parrot:
    """A server that answers every chat request with *answer*, and notes what came."""

    def __init__(self) -> None:
        self.answer: Callable[[], web.Response] = web.Response
        self.requests: list[tuple[str, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, request.headers.get("Authorization")))
        return self.answer()


@pytest.fixture
async def parrots() -> AsyncIterator[list[Parrot]]:
    """Two of them."""
    made, runners = [Parrot(), Parrot()], []
    for parrot in made:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", parrot.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        parrot.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        runners.append(runner)
    yield made
    for runner in runners:
        await runner.cleanup()


async def told(parrot: Parrot, *, stream: bool = False) -> str:
    """All that a call's error or reply says."""
    spec = EndpointSpec(kind="openai", model="m", base_url=parrot.url)
    endpoint = OpenAIEndpoint(spec, KEY, stream=stream)
    try:
        reply = await endpoint.complete("a prompt", PLAIN)
    except EndpointError as error:
        return repr((str(error), error.args, vars(error), error.__context__, error.__cause__))
    finally:
        await endpoint.close()
    return repr(reply)


def error(message: str, status: int = 400, **more: Any) -> Callable[[], web.Response]:
    detail = {"message": message, **more}
    return lambda: web.json_response({"error": detail}, status=status)


def completion(**choice: Any) -> Callable[[], web.Response]:
    return lambda: web.json_response({"choices": [choice]})


def redirect() -> web.Response:
    return web.Response(status=307, headers={"Location": f"https://h/v1?key={quote(KEY, safe='')}"})


def event_stream() -> web.Response:
    event = json.dumps({"error": {"message": f"bad key {KEY}", "code": 500}})
    return web.Response(text=f"data: {event}\n\n", content_type="text/event-stream")


ANSWERS = {
    "message": error(f"bad key {KEY}"),
    "its parts": error(f"bad key {KEY[:12]}...{KEY[-9:]}"),
    "over lines": error(f"bad\n  {KEY}\n"),
    "url form": error(f"bad key {quote(KEY, safe='')}"),
    "base64": error(base64.b64encode(KEY.encode()).decode()),
    "inside base64": error(base64.b64encode(f"user:{KEY}!".encode()).decode()),
    "type and code": error("bad", type=KEY, code=KEY),
    "401": error(f"Incorrect API key provided: {KEY}", 401),
    "404": error(f"no model for {KEY}", 404),
    "429": error(f"too many from {KEY}", 429),
    "500": error(f"died of {KEY}", 500),
    "text as error": lambda: web.json_response({"error": KEY}, status=400),
    "detail": lambda: web.json_response({"detail": [{"msg": KEY}]}, status=422),
    "header": lambda: web.Response(status=429, headers={"Retry-After": KEY}),
    "redirect": redirect,
    "error with 200": lambda: web.json_response({"error": {"message": KEY}}),
    "finish reason": completion(message={"content": ""}, finish_reason=KEY),
    "refusal": completion(message={"refusal": KEY}, finish_reason="stop"),
    "reply": completion(message={"content": f"your key is {KEY}"}, finish_reason=KEY),
    "no json": lambda: web.Response(text=KEY),
    "page": lambda: web.Response(text=f"<html>{KEY}</html>", status=502),
    "content type": lambda: web.Response(text="{", headers={"Content-Type": KEY}),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_key_that_a_server_repeats_is_not_passed_on(
    parrots: list[Parrot], answer: Callable[[], web.Response]
) -> None:
    """Nor any eight characters of it in sequence."""
    parrots[0].answer = answer
    said = await told(parrots[0])

    assert parrots[0].requests[-1] == ("/v1/chat/completions", f"Bearer {KEY}")
    assert not [part for part in PARTS if part in said], said
    for shift in range(3):
        inner = base64.b64encode(b"\0" * shift + KEY.encode()).decode()[4:-4]
        assert inner not in said


async def test_a_key_in_an_event_of_a_stream_is_not_passed_on(parrots: list[Parrot]) -> None:
    """The error came after status 200."""
    parrots[0].answer = event_stream
    said = await told(parrots[0], stream=True)

    assert "bad key ***" in said
    assert not [part for part in PARTS if part in said]


async def test_a_key_in_what_a_tool_is_to_do_is_not_passed_on(parrots: list[Parrot]) -> None:
    """It would go to the worker."""
    call = {"id": KEY, "function": {"name": KEY, "arguments": json.dumps({"key": KEY})}}
    parrots[0].answer = completion(message={"tool_calls": [call]}, finish_reason="tool_calls")
    spec = EndpointSpec(kind="openai", model="m", base_url=parrots[0].url)
    endpoint = OpenAIEndpoint(spec, KEY)
    tool = ToolSpec(name="t", description="", parameters="{}")
    reply = await endpoint.complete("a prompt", PLAIN, tools=[tool])
    await endpoint.close()

    assert reply.uses[0].arguments == '{"key": "***"}'
    assert KEY not in repr(reply)


async def test_a_redirect_takes_neither_key_nor_prompt_to_another_server(
    parrots: list[Parrot],
) -> None:
    """The other server hears nothing at all."""
    first, other = parrots
    first.answer = lambda: web.Response(status=308, headers={"Location": other.url})
    said = await told(first)

    assert "redirects to" in said
    assert other.requests == []


NO_STARS = st.characters(exclude_characters="*", exclude_categories=("Cs",))


@given(st.text(NO_STARS, min_size=1), st.text(NO_STARS), st.text(NO_STARS))
def test_no_text_keeps_a_key(key: str, before: str, after: str) -> None:
    """Whatever stands around it."""
    assert key == "none" or key not in Redactor(key)(f"{before}{key}{after}")


def test_a_text_without_the_key_stays_as_it_is() -> None:
    """And so does any text where there is no key."""
    text = "this model's context is too short"

    assert Redactor(KEY)(text) == text
    assert Redactor("none")("none") == "none"
    assert Redactor("")(text) == text
