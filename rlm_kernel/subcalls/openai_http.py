"""Any OpenAI-compatible server, over HTTP as lean as it gets.

aiohttp with pre-encoded bodies and typed decoding costs about 0.15 ms of CPU
a call, the openai client over 2 ms: with thousands of calls from one cell
this is the difference between a busy server and a busy kernel.

A call is one request for one completion, which is not streamed: most servers
stop generating when the client goes away in either case. llama.cpp does so
only while streaming, so it is asked to stream (its ``/v1/models`` tells it
apart).
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import OPENAI_URL, EndpointSpec
from rlm_kernel.prices import Price, prices_from
from rlm_kernel.subcalls import wire
from rlm_kernel.subcalls.endpoint import EndpointError, Exchange, Reply, ToolSpec
from rlm_kernel.subcalls.sse import EventReader

if TYPE_CHECKING:
    import aiohttp

__all__ = ["OpenAIEndpoint"]

KEEPALIVE_S = 3.0
"""vLLM closes idle connections after 5 s; reusing one at that moment fails."""

CONNECT_S = 30.0
PROBE_S = 5.0
MAX_BODY = 64 << 20
"""Bytes of one reply."""

_CUT = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})


class OpenAIEndpoint:
    """A model behind an OpenAI-compatible URL.

    Parameters
    ----------
    spec
        Of kind ``openai``.
    api_key
        Sent in the header ``Authorization`` and shown nowhere; ``"none"`` sends no header.
    slots
        Requests that the server works on at once, where known.
    stream
        Whether to stream. ``None`` asks the server what it is, before the first call.
    prices
        By model; ``None`` takes those of the environment.
    """

    def __init__(
        self,
        spec: EndpointSpec,
        api_key: str,
        *,
        slots: int | None = None,
        stream: bool | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.spec = str(spec)
        self.model = spec.model
        self.slots = slots
        self.on_room: Callable[[], None] | None = None
        self._prices = prices_from() if prices is None else prices
        self.url = self._url = spec.base_url
        self._key = api_key
        self._hosted = spec.base_url == OPENAI_URL
        self._stream = False if self._hosted else stream
        self._context: int | None = None
        self._session: aiohttp.ClientSession | None = None
        self._opening: asyncio.Task[aiohttp.ClientSession] | None = None
        self._probing: asyncio.Task[bool] | None = None

    def price(self, model: str) -> Price | None:
        """See `Endpoint.price`."""
        return self._prices.get(model)

    async def complete(
        self,
        prompt: str,
        params: SubcallParams,
        *,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """See `Endpoint.complete`."""
        session = self._session or await self._open()
        stream = self._stream
        if stream is None:
            stream = await self._is_llama_cpp()
        model = params.model or self.model
        body = wire.encode_request(
            prompt, params, model=model, stream=stream, new_names=self._hosted
        )
        try:
            response = await session.post(
                self._url + "/chat/completions", data=body, allow_redirects=False
            )
            try:
                if response.status != 200:
                    raise self._refusal(response, await _read(response), model)
                if stream and response.content_type == "text/event-stream":
                    return self._reply(await _collect(response), prompt)
                return self._reply(_decode(await _read(response), self._url), prompt)
            except BaseException:
                # Releasing would keep reading a reply that nobody wants; closing cancels it.
                response.close()
                raise
            finally:
                # The end of the stream may come after [DONE]; without this the connection would
                # stay open for as long as the garbage collector likes.
                response.release()
        except (OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        except Exception as error:
            if transport := self._transport_error(error):
                raise transport from None
            raise

    async def context_limit(self) -> int | None:
        """See `Endpoint.context_limit`."""
        if self._context is None:
            await self._is_llama_cpp()
        return self._context

    async def close(self) -> None:
        """See `Endpoint.close`."""
        for task in (self._opening, self._probing):
            if task is not None and not task.done():
                task.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- session ------------------------------------------------------------------------------

    async def _open(self) -> aiohttp.ClientSession:
        # One task for all calls that come meanwhile; shielded, so that the first may be cancelled.
        if self._opening is None:
            self._opening = asyncio.create_task(self._make_session())
        return await asyncio.shield(self._opening)

    async def _make_session(self) -> aiohttp.ClientSession:
        # In a thread: the first import takes half a second, and the kernel has more to do.
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        import aiohttp

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key != "none":
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    # --- what the server is ---------------------------------------------------------------------

    async def _is_llama_cpp(self) -> bool:
        # Of all that wait for one probe, the first to go on clears the field: each keeps the task.
        probing = self._probing = self._probing or asyncio.create_task(self._probe())
        try:
            return await asyncio.shield(probing)
        finally:
            if self._probing is probing and probing.done() and self._stream is None:
                self._probing = None  # the server was not there: ask again with the next call

    async def _probe(self) -> bool:
        """Read ``/v1/models``. A server that answers anything else is an ordinary one."""
        import aiohttp

        session = self._session or await self._open()
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        cards: list[wire.ModelCard] = []
        try:
            async with session.get(
                self._url + "/models", timeout=timeout, allow_redirects=False
            ) as response:
                cards = wire.decode_models(await _read(response)).data
        except aiohttp.ClientConnectionError:
            return False
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, EndpointError):
            pass
        card = next((c for c in cards if c.id == self.model), cards[0] if len(cards) == 1 else None)
        self._context = card.context if card else None
        if self._stream is None:
            self._stream = any(c.owned_by == "llamacpp" for c in cards)
        return self._stream

    # --- replies and errors -----------------------------------------------------------------------

    def _reply(self, completion: wire.Completion, prompt: str) -> Reply:
        if completion.error is not None:
            raise self._error_in_reply(completion.error)
        usage = wire.usage_of(completion.usage)
        if not completion.choices:
            raise EndpointError(
                f"the server at {self._url} sent a completion without choices: check that it "
                "speaks the OpenAI chat protocol",
                usage=usage,
                status=200,
            )
        choice = completion.choices[0]
        text, finish = choice.message.content or "", choice.finish_reason or ""
        if finish == "abort":
            raise EndpointError(
                f"the server at {self._url} aborted the completion: try again later",
                retryable=True,
                usage=usage,
                finish=finish,
                status=200,
            )
        if not text:
            raise EndpointError(_why_empty(choice), usage=usage, finish=finish, status=200)
        return Reply(text=text, usage=usage or wire.estimated_usage(prompt, text), finish=finish)

    def _error_in_reply(self, error: wire.ErrorDetail | str) -> EndpointError:
        """The error in a reply whose status was 200: the engine failed after it was sent."""
        code = error.code if isinstance(error, wire.ErrorDetail) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        body = msgspec.json.encode({"error": error})
        return wire.refusal(status, body, {}, model=self.model, url=self._url, key=self._key)

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes, model: str) -> EndpointError:
        return wire.refusal(
            response.status, body, response.headers, model=model, url=self._url, key=self._key
        )

    def _unreachable(self, error: OSError) -> EndpointError:
        if isinstance(error, TimeoutError):
            why = "did not accept a connection in time"
        elif error.errno == errno.ECONNREFUSED:
            why = "refuses connections"
        elif isinstance(error, ConnectionError) or error.errno in _CUT:
            return self._cut()
        else:
            why = f"cannot be reached ({error.strerror or type(error).__name__})"
        return EndpointError(
            f"the server at {self._url} {why}: check that it runs and that the URL is right",
            retryable=not isinstance(error, ssl.SSLError),
        )

    def _cut(self) -> EndpointError:
        return EndpointError(
            f"the server at {self._url} cut the connection before its reply was whole: try again",
            retryable=True,
        )

    def _transport_error(self, error: Exception) -> EndpointError | None:
        """What an error of aiohttp means; ``None`` where *error* is none."""
        import aiohttp

        if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
            return self._cut()
        if isinstance(error, aiohttp.InvalidURL):
            return EndpointError(f"{self._url!r} is no URL that can be asked: check the spec")
        if isinstance(error, aiohttp.ClientError):
            return EndpointError(
                f"what the server at {self._url} sent is no HTTP reply "
                f"({type(error).__name__}): check the URL of the spec"
            )
        return None


def _why_empty(choice: wire.Choice) -> str:
    finish = choice.finish_reason or "not given"
    if choice.finish_reason == "content_filter" or choice.message.refusal:
        return f"the model refused to answer (finish reason: {finish}): change the prompt"
    if choice.message.reasoning or choice.message.reasoning_content:
        return f"the model reasoned but gave no answer (finish reason: {finish}): raise max_tokens"
    return (
        f"the model gave an empty completion (finish reason: {finish}): "
        "change the prompt, or raise max_tokens"
    )


def _decode(body: bytes, url: str) -> wire.Completion:
    try:
        return wire.decode_completion(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        what = "a web page" if body.lstrip()[:1] == b"<" else "something else than a completion"
        raise EndpointError(
            f"the server at {url} sent {what}: check that it speaks the OpenAI chat protocol",
            retryable=True,
            status=200,
        ) from None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, up to `MAX_BODY` bytes."""
    length = response.content_length
    if length is not None and length <= MAX_BODY and "Content-Encoding" not in response.headers:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY:
            raise EndpointError(
                f"the reply of {response.url} is longer than {MAX_BODY >> 20} MiB: set max_tokens",
                status=200,
            )
    return bytes(body)


async def _collect(response: aiohttp.ClientResponse) -> wire.Completion:
    """A streamed completion, put together."""
    url = str(response.url)
    reader = EventReader(MAX_BODY)
    stream = wire.StreamedCompletion()
    async for chunk in response.content.iter_any():
        for data in reader.feed(chunk):
            if data == b"[DONE]":
                return stream.whole()
            stream.add(_decode(data, url))
    if not stream.finished:
        raise EndpointError(
            f"the server at {url} ended its stream in the middle: try again", retryable=True
        )
    return stream.whole()
