"""A real HTTP server that speaks the chat-completions protocol from a script.

It stands for the other party: a root model or a sub-model behind an
OpenAI-compatible endpoint, with the faults that such servers have. Requests
are answered from ``script``, in order; when that is used up, by ``reply``.

    async with ScriptedServer([Say("```repl\\nFinal = 1\\n```")]) as server:
        root = ChatRoot("scripted", base_url=server.base_url, api_key="any")

Streaming (``"stream": true``) and plain completions are both served, with
usage, as is ``/v1/models`` with ``max_model_len``. There is no latency but
what a step asks for. `serve_in_thread` is for tests that are not async;
``python -m tests.servers.scripted --port 8000`` runs it as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

MODEL = "scripted"
CONTEXT = 32_768


def count_tokens(text: str) -> int:
    """Tokens of *text* in this server's usage: one per 4 characters begun."""
    return -(-len(text) // 4)


@dataclass(frozen=True)
class Say:
    """Reply with a text, streamed in pieces of *chunk* characters."""

    text: str
    chunk: int = 16
    finish: str = "stop"
    usage: bool = True
    """False: this server gives no usage, whatever it is asked."""

    cost: float | None = None
    """US dollars that the usage names."""

    reasoning: str = ""
    """Streamed before the text, as ``reasoning_content``."""

    gate: asyncio.Event | None = None
    """Waited for before the first piece."""

    gate_at: int = 0
    """Characters to stream before the wait for *gate*."""

    refusal: str = ""
    """The model's own words where it refuses, as OpenAI sends them."""


@dataclass(frozen=True)
class AskTools:
    """Ask for tools: names and arguments, which are text as the model wrote it."""

    uses: tuple[tuple[str, str], ...]
    text: str = ""
    chunk: int = 16
    finish: str = "tool_calls"
    ids: bool = True
    """False: this server gives the uses no ids."""

    numbered: bool = True
    """False: this server gives the parts of a stream no index."""

    usage: bool = True
    cost: float | None = None
    reasoning: str = ""
    refusal: str = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [
            {
                **({"id": f"use-{number}"} if self.ids else {}),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(self.uses)
        ]


@dataclass(frozen=True)
class Refuse:
    """Reply with an HTTP error."""

    status: int
    message: str = "refused by the script"
    headers: dict[str, str] = field(default_factory=dict)
    page: str = ""
    """An HTML page instead of a JSON error, as proxies send it."""


@dataclass(frozen=True)
class Hang:
    """Take the request and say nothing, after *text* was streamed. Ends when the client goes."""

    text: str = ""


@dataclass(frozen=True)
class Cut:
    """Drop the connection in the middle: after *text*, without an end."""

    text: str = ""


@dataclass(frozen=True)
class Garbage:
    """Reply with something that is no JSON, after *text* was streamed."""

    body: str = '{"choices": [{"delta"'
    text: str = ""


@dataclass(frozen=True)
class ErrorEvent:
    """An error inside a stream whose status was 200, after *text*."""

    message: str = "the engine died"
    text: str = ""


@dataclass(frozen=True)
class Ramble:
    """Stream *text* over and over, for ever."""

    text: str = "and then again, "


Step = Say | AskTools | Refuse | Hang | Cut | Garbage | ErrorEvent | Ramble
Reply = Callable[[str], "str | Step | Awaitable[str | Step]"]


@dataclass(frozen=True)
class Request:
    """A chat request that came in."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def messages(self) -> list[dict[str, str]]:
        return list(self.body["messages"])

    @property
    def prompt(self) -> str:
        """Content of the last message."""
        return str(self.body["messages"][-1]["content"])


class ScriptedServer:
    """See the module. All counters may be read at any time.

    Parameters
    ----------
    script
        Steps, or texts to `Say`, one per request.
    reply
        Answers the requests after those: gets the last message's content.
    models
        Name to context length in tokens; other names get 404.
    key
        Where set, requests with another bearer token get 401.
    owned_by
        What the list of models says of the server: ``vllm``, ``llamacpp``. Those count tokens,
        too; each with its own protocol. Empty: an ordinary server, which does not.
    metrics, props
        What ``/metrics`` and ``/props`` answer; 404 where ``None``.
    """

    def __init__(
        self,
        script: Iterable[Step | str] = (),
        *,
        reply: Reply | None = None,
        models: dict[str, int] | None = None,
        key: str = "",
        owned_by: str = "",
        metrics: str | None = None,
        props: dict[str, Any] | None = None,
    ) -> None:
        self.script: deque[Step | str] = deque(script)
        self.reply = reply
        self.models = {MODEL: CONTEXT} if models is None else models
        self.key = key
        self.owned_by = owned_by
        self.metrics = metrics
        self.props = props
        self.probes = 0
        """Requests for the list of models."""
        self.counts = 0
        """Requests to count tokens."""
        self.looks = 0
        """Requests for its health."""
        self.well = True
        """What it says of its health."""
        self.requests: list[Request] = []
        self.active = 0
        """Chat requests under way."""
        self.peak = 0
        """Most chat requests that were under way at once."""
        self.completed = 0
        """Chat requests that were answered to the end, errors included."""
        self.cancelled = 0
        """Chat requests whose client went away first."""
        self.port = 0
        self._waiters: set[asyncio.Event] = set()
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self, port: int = 0) -> None:
        """Listen on 127.0.0.1, on a free port unless one is named."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/props", self._props)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/apply-template", self._template)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", port))
        await web.SockSite(self._runner, self._listening).start()
        self.port = self._listening.getsockname()[1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._accept_no_more()
            await self._runner.cleanup()
            self._runner = None

    async def _accept_no_more(self) -> None:
        """A connection that asyncio has accepted, and not yet handed on, when its server is closed
        stays open for ever: clients that were cancelled while they connected leave such ones."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening = None
        for _ in range(3):  # the turns that it takes to hand one on
            await asyncio.sleep(0)

    async def until(self, true: Callable[[ScriptedServer], bool], seconds: float = 20) -> None:
        """Wait until *true* of this server, which is asked after every change of a counter."""
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            async with asyncio.timeout(seconds):
                while not true(self):
                    changed.clear()
                    await changed.wait()
        finally:
            self._waiters.discard(changed)

    # --- HTTP ---------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        self.probes += 1
        owner = {"owned_by": self.owned_by} if self.owned_by else {}
        data = [
            {"id": name, "object": "model", "max_model_len": context, **owner}
            for name, context in self.models.items()
        ]
        return web.json_response({"object": "list", "data": data})

    async def _health(self, request: web.Request) -> web.Response:
        self.looks += 1
        self._tell()
        return web.Response(status=200 if self.well else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _props(self, request: web.Request) -> web.Response:
        if self.props is None:
            raise web.HTTPNotFound
        return web.json_response(self.props)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.counts += 1
        body = await request.json()
        if self.owned_by == "vllm":
            count = sum(count_tokens(message["content"]) for message in body["messages"])
            return web.json_response({"count": count, "max_model_len": CONTEXT, "tokens": []})
        if self.owned_by == "llamacpp":
            return web.json_response({"tokens": [1] * count_tokens(body["content"])})
        raise web.HTTPNotFound

    async def _template(self, request: web.Request) -> web.Response:
        if self.owned_by != "llamacpp":
            raise web.HTTPNotFound
        messages = (await request.json())["messages"]
        return web.json_response({"prompt": "".join(message["content"] for message in messages)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(Request(body, dict(request.headers)))
        self.active += 1
        self.peak = max(self.peak, self.active)
        self._tell()
        gone = True
        try:
            response = await self._answer(request, body)
            gone = False
            return response
        finally:
            self.active -= 1
            self.completed += not gone
            self.cancelled += gone
            self._tell()

    def _tell(self) -> None:
        for changed in self._waiters:
            changed.set()

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(Refuse(401, "Incorrect API key provided"))
        if body.get("model") not in self.models:
            return _error(Refuse(404, f"The model {body.get('model')!r} does not exist"))
        step = await self._next(str(body["messages"][-1]["content"]))
        if isinstance(step, Refuse):
            return _error(step)
        if body.get("stream"):
            return await self._stream(request, body, step)
        return await self._plain(request, body, step)

    async def _next(self, prompt: str) -> Step:
        if self.script:
            said: Any = self.script.popleft()
        elif self.reply is not None:
            said = self.reply(prompt)
            if inspect.isawaitable(said):
                said = await said
        else:
            said = Refuse(500, "the script is at its end")
        return Say(said) if isinstance(said, str) else said

    async def _plain(
        self, request: web.Request, body: dict[str, Any], step: Step
    ) -> web.StreamResponse:
        if isinstance(step, Say | AskTools):
            if isinstance(step, Say) and step.gate is not None:
                await step.gate.wait()
            return web.json_response(_completion(body, step))
        if isinstance(step, Garbage):
            return web.Response(text=step.body, content_type="application/json")
        if isinstance(step, ErrorEvent):
            return web.json_response({"error": {"message": step.message}})
        if isinstance(step, Cut):
            response = web.StreamResponse(headers={"Content-Length": "100000"})
            await response.prepare(request)
            await response.write(b'{"choices": [')
            _drop(request)
            return response
        await asyncio.Event().wait()
        raise AssertionError

    async def _stream(
        self, request: web.Request, body: dict[str, Any], step: Step
    ) -> web.StreamResponse:
        if isinstance(step, Hang) and not step.text:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in _events(body, step):
            await response.write(b"data: " + event + b"\n\n")
        if isinstance(step, Hang):
            await asyncio.Event().wait()
        if isinstance(step, Cut):
            _drop(request)
        else:
            await response.write_eof()
        return response


async def _events(body: dict[str, Any], step: Step) -> AsyncIterator[bytes]:
    if isinstance(step, Ramble):
        while True:
            yield _delta(body, content=step.text)
            await asyncio.sleep(0)
    assert not isinstance(step, Refuse)
    if isinstance(step, Say):
        for piece in _pieces(step.reasoning, step.chunk):
            yield _delta(body, reasoning_content=piece)
    sent = 0
    for piece in _pieces(step.text, getattr(step, "chunk", 16)):
        if isinstance(step, Say) and step.gate is not None and sent >= step.gate_at:
            await step.gate.wait()
        yield _delta(body, content=piece)
        sent += len(piece)
    if isinstance(step, Garbage):
        yield step.body.encode()
    elif isinstance(step, ErrorEvent):
        yield json.dumps({"error": {"message": step.message, "code": 500}}).encode()
    elif isinstance(step, Say | AskTools):
        if isinstance(step, AskTools):
            for event in _tool_events(body, step):
                yield event
        if step.refusal:
            yield _delta(body, refusal=step.refusal)
        yield _chunk(body, [{"index": 0, "delta": {}, "finish_reason": step.finish}])
        if step.usage and (body.get("stream_options") or {}).get("include_usage"):
            yield _chunk(body, [], usage=_usage(body, step))
        yield b"[DONE]"


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def _tool_events(body: dict[str, Any], step: AskTools) -> Iterator[bytes]:
    """The name first, then the arguments in pieces, as OpenAI and vLLM stream them."""
    for number, call in enumerate(step.calls):
        index = {"index": number} if step.numbered else {}
        arguments = call["function"]["arguments"]
        first = {**index, **call, "function": {**call["function"], "arguments": ""}}
        yield _delta(body, tool_calls=[first])
        for piece in _pieces(arguments, step.chunk):
            yield _delta(body, tool_calls=[{**index, "function": {"arguments": piece}}])


def _delta(body: dict[str, Any], **delta: Any) -> bytes:
    return _chunk(body, [{"index": 0, "delta": delta, "finish_reason": None}])


def _chunk(body: dict[str, Any], choices: list[Any], **more: Any) -> bytes:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
    return json.dumps({**head, "choices": choices, **more}).encode()


def _completion(body: dict[str, Any], step: Say | AskTools) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": step.text}
    if step.refusal:
        message["refusal"] = step.refusal
    if isinstance(step, AskTools):
        message["tool_calls"] = step.calls
    if step.reasoning:
        message["reasoning_content"] = step.reasoning
    whole: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": step.finish}],
    }
    if step.usage:
        whole["usage"] = _usage(body, step)
    return whole


def _usage(body: dict[str, Any], step: Say | AskTools) -> dict[str, float]:
    asked = sum(count_tokens(str(m["content"])) for m in body["messages"])
    said = count_tokens(step.reasoning + step.text)
    usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    return usage if step.cost is None else {**usage, "cost": step.cost}


def _error(step: Refuse) -> web.Response:
    if step.page:
        return web.Response(
            status=step.status, text=step.page, content_type="text/html", headers=step.headers
        )
    error = {"message": step.message, "type": "error", "code": step.status}
    return web.json_response({"error": error}, status=step.status, headers=step.headers)


def _drop(request: web.Request) -> None:
    transport = request.transport
    if transport is not None:
        transport.abort()


@contextlib.contextmanager
def serve_in_thread(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serve from a thread with its own event loop, for code that blocks."""
    up = threading.Event()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with server:
            up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    if not up.wait(20):
        raise RuntimeError("the scripted server did not start")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
        loop.close()


async def _main(port: int, text: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = ScriptedServer(reply=lambda prompt: text)
        await server.start(port)
        stack.push_async_callback(server.close)
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer every chat request with one text.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--text", default="ok")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(options.port, options.text))
