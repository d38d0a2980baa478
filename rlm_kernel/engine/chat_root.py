"""A root behind any OpenAI-compatible endpoint, streamed.

Retries are our own, so that they are bounded, honour ``Retry-After`` and can
be told of in the error; the client library's are switched off. Only requests
that brought no token yet are sent again.

Durations are seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from rlm_kernel.config import OPENAI_URL, api_key_for, parse_root_spec
from rlm_kernel.engine.budget import Usage, named_cost
from rlm_kernel.engine.chat_errors import FailureError, translated
from rlm_kernel.engine.root_protocol import Message, RootStream
from rlm_kernel.errors import RootError
from rlm_kernel.http_errors import Redactor, checked_key
from rlm_kernel.prices import Price, prices_from
from rlm_kernel.text import CHARS_PER_TOKEN

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream
    from openai.types.chat import ChatCompletionChunk

__all__ = ["ChatRoot"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
MODELS_TIMEOUT = 5.0
AFTERMATH = 5.0
"""For the usage, after the text has ended."""

LONGEST_WAIT = 60.0
"""Before a request is sent again, whatever ``Retry-After`` says."""

ESTIMATE_MARGIN = 1.5
"""A prompt may have so many times the tokens that its characters make one expect."""


class ChatRoot:
    """A chat model.

    Parameters
    ----------
    model, base_url
        As in the spec ``openai:MODEL@URL``; without URL, OpenAI or ``OPENAI_BASE_URL``.
    api_key
        Where ``None``, the key of the environment. It is sent and never shown; one that cannot
        stand in a header is a `UsageError`.
    temperature, max_tokens
        Of each reply; ``None`` leaves them to the server.
    timeout
        To the first token of a reply, however often the request is sent and whatever is waited
        between. Long, because a long conversation takes time to read.
    idle_timeout
        Between two pieces of a reply.
    retries
        Times that a request is sent again where it failed before its first token: connection
        errors, 408, 409, 425, 429, and 5xx.
    backoff
        First wait before that; doubled with each.
    max_chars
        Characters of a reply, thoughts included. A root that goes on is cut, finish ``length``.
    context_limit
        Tokens; ``None`` asks the server, which may not say.
    extra
        Further fields of the request's body.
    prices
        By model; ``None`` takes those of the environment.
    """

    sampled = True

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout: float = 600.0,
        idle_timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 0.5,
        max_chars: int = 200_000,
        context_limit: int | None = None,
        extra: Mapping[str, Any] | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        spec = parse_root_spec(f"openai:{model}@{base_url}" if base_url else f"openai:{model}")
        self.name = str(spec)
        self.model = spec.model
        self.base_url = spec.base_url
        self._api_key = api_key_for(spec) if api_key is None else checked_key(api_key)
        self.redact = Redactor(self._api_key)
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.idle_timeout = idle_timeout
        self.retries = retries
        self.backoff = backoff
        self.max_chars = max_chars
        self.context_limit = context_limit
        self.extra = dict(extra or {})
        self.price = (prices_from() if prices is None else prices).get(self.model)
        self._client: AsyncOpenAI | None = None
        self._asked_limit = context_limit is not None or self.base_url == OPENAI_URL
        self._running_usage = self.base_url != OPENAI_URL
        """Whether to ask for usage with every piece: it makes the usage of a cut reply exact."""

    def propose(
        self, messages: Sequence[Message], *, attempt: int = 1, max_tokens: int | None = None
    ) -> RootStream:
        return _ChatStream(self, tuple(messages), max_tokens)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def client(self) -> AsyncOpenAI:
        """The client of the running event loop, made at the first use."""
        if self._client is None:
            import openai

            self._client = openai.AsyncOpenAI(
                api_key=self._api_key,
                base_url=self.base_url,
                max_retries=0,
                timeout=openai.Timeout(self.timeout, connect=CONNECT_TIMEOUT),
                # A redirect would take the conversation elsewhere.
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
        return self._client

    def body(self, messages: Sequence[Message], most: int | None = None) -> dict[str, Any]:
        """The request, without what the client adds. *most* tokens are there for its reply."""
        options: dict[str, Any] = {"include_usage": True}
        if self._running_usage:
            options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "stream": True,
            "stream_options": options,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        bound = self._bound(messages, most)
        if bound is not None:
            # OpenAI's reasoning models refuse the older name, which most other servers want.
            hosted = self.base_url == OPENAI_URL
            body["max_completion_tokens" if hosted else "max_tokens"] = bound
        if self.extra:
            body["extra_body"] = self.extra
        return body

    def _bound(self, messages: Sequence[Message], most: int | None) -> int | None:
        """Tokens of a reply to ask for; ``None`` leaves them to the server."""
        if most is None:
            return self.max_tokens
        if self.context_limit is not None:
            # Servers refuse a request whose bound does not fit beside its prompt. Without one
            # they end the reply there themselves, which is less than the budget has.
            fits = self.context_limit - int(_tokens(messages) * ESTIMATE_MARGIN)
            if fits < most:
                return self.max_tokens
        return most if self.max_tokens is None else min(most, self.max_tokens)

    def plain_usage(self) -> bool:
        """Ask for usage at the end only, from now on. False where that was so already."""
        was, self._running_usage = self._running_usage, False
        return was

    async def learn_limit(self) -> None:
        """Ask the server once for the model's context length. It need not know."""
        if self._asked_limit:
            return
        self._asked_limit = True
        import openai

        try:
            async with asyncio.timeout(MODELS_TIMEOUT):
                page = await self.client().models.list()
        except (openai.OpenAIError, TimeoutError, ValueError) as error:
            log.debug("%s does not list its models: %s", self.name, type(error).__name__)
            return
        for model in page.data or ():
            limit = (model.model_extra or {}).get("max_model_len")
            if model.id == self.model and isinstance(limit, int):
                self.context_limit = limit


class _ChatStream:
    """One reply; see `RootStream`."""

    def __init__(self, root: ChatRoot, messages: Sequence[Message], max_tokens: int | None) -> None:
        self._root = root
        self._messages = messages
        self._max_tokens = max_tokens
        self._counted: Usage | None = None
        self._accepted = False
        self._deltas = 0
        self._chars = 0
        self._began = time.monotonic()
        self._seconds = 0.0
        self.finish = ""
        self._pieces = self._reply()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        try:
            return await anext(self._pieces)
        finally:
            self._seconds = time.monotonic() - self._began

    async def aclose(self) -> None:
        await self._pieces.aclose()

    @property
    def usage(self) -> Usage:
        """As the server counted, or from the text and its deltas where it did not."""
        if not self._accepted:
            return Usage()
        if self._counted is not None:
            return msgspec.structs.replace(self._counted, seconds=self._seconds)
        return Usage(
            input_tokens=_tokens(self._messages),
            output_tokens=self._said(),
            calls=1,
            seconds=self._seconds,
            estimated=True,
        )

    async def _reply(self) -> AsyncGenerator[str, None]:
        # The import takes a second or more, in which the event loop would answer nobody.
        await asyncio.to_thread(importlib.import_module, "openai")
        await self._root.learn_limit()
        sent, deadline = 0, time.monotonic() + self._root.timeout
        while True:
            sent += 1
            request = self._request(deadline)
            try:
                async for piece in request:
                    yield piece
                return
            except FailureError as failure:
                wait = _wait(self._root.backoff, sent, failure.wait)
                late = time.monotonic() + wait >= deadline
                if self._deltas or not failure.retryable or late or sent > self._root.retries:
                    times = f" (sent {sent} times)" if sent > 1 else ""
                    raise RootError(f"the root {self._root.name} {failure.reason}{times}") from None
                log.warning(
                    "the root %s %s; sending again in %.1f s",
                    self._root.name,
                    failure.reason,
                    wait,
                )
            finally:
                await request.aclose()
            await asyncio.sleep(wait)

    async def _request(self, deadline: float) -> AsyncGenerator[str, None]:
        """Send one request and yield its text, which begins before *deadline*. Raises
        `FailureError` only."""
        stream: AsyncStream[ChatCompletionChunk] | None = None
        root = self._root
        try:
            async with translated(_left(deadline), begun=False, redact=root.redact):
                stream = await self._open()
            self._accepted = True
            while not self.finish:
                begun = self._deltas > 0
                limit = root.idle_timeout if begun else _left(deadline)
                async with translated(limit, begun=begun, redact=root.redact):
                    chunk = await anext(stream, None)
                    text = "" if chunk is None else self._take(chunk)
                if chunk is None:
                    break
                if text:
                    yield text
                if self._is_long():
                    self.finish = "length"
                    return
            await self._take_usage(stream)
            if not self._deltas and not self.finish:
                raise FailureError(
                    "ended its stream without a reply; check that its URL is that of an "
                    "OpenAI-compatible endpoint"
                )
        finally:
            if stream is not None:
                await stream.close()

    async def _open(self) -> AsyncStream[ChatCompletionChunk]:
        import openai

        create: Any = self._root.client().chat.completions.create
        try:
            stream: AsyncStream[ChatCompletionChunk] = await create(
                **self._root.body(self._messages, self._max_tokens)
            )
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            # A strict server that does not know vLLM's extension of the stream's options.
            if "continuous_usage_stats" not in str(error) or not self._root.plain_usage():
                raise
            stream = await create(**self._root.body(self._messages, self._max_tokens))
        return stream

    def _is_long(self) -> bool:
        """Whether to cut the reply: not every server keeps to the bound of the request."""
        if self._max_tokens is not None and self._said() >= self._max_tokens:
            return True
        return self._chars >= self._root.max_chars

    def _said(self) -> int:
        """Tokens of the reply so far, thoughts included."""
        if self._counted is not None and self._counted.output_tokens:
            return self._counted.output_tokens
        # A delta has a token or more.
        return max(self._deltas, int(self._chars / CHARS_PER_TOKEN))

    def _take(self, chunk: ChatCompletionChunk) -> str:
        """Text of one chunk; thoughts are counted and dropped. The client does not check what
        it decodes: a chunk of another shape is a ``ValueError`` here."""
        try:
            self._count(chunk)
            if not chunk.choices:
                return ""
            choice = chunk.choices[0]
            self.finish = choice.finish_reason or self.finish
            text = choice.delta.content or ""
            more = choice.delta.model_extra or {}
            thought = more.get("reasoning_content") or more.get("reasoning") or ""
            self._chars += len(text) + len(thought)
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError("no chunk of a chat completion") from error
        self._deltas += bool(text or thought)
        return text

    def _count(self, chunk: ChatCompletionChunk) -> None:
        """Keep the usage of *chunk*; where every chunk has one, it is that of the reply so far."""
        if chunk.usage is None:
            return
        details = chunk.usage.prompt_tokens_details
        counted = Usage(
            input_tokens=int(chunk.usage.prompt_tokens),
            output_tokens=int(chunk.usage.completion_tokens),
            cached_tokens=int(details.cached_tokens or 0) if details else 0,
            calls=1,
            cost=named_cost((chunk.usage.model_extra or {}).get("cost")),
        )
        if counted.is_countable:
            self._counted = counted

    async def _take_usage(self, stream: AsyncStream[ChatCompletionChunk]) -> None:
        """What comes after the end of the reply: its usage, and nothing that could fail it."""
        root = self._root
        try:
            async with translated(AFTERMATH, begun=True, redact=root.redact):
                async for chunk in stream:
                    self._take(chunk)
        except FailureError as failure:
            log.debug("the root %s %s after its reply", root.name, failure.reason)


def _tokens(messages: Sequence[Message]) -> int:
    """Tokens of *messages*, estimated."""
    return int(sum(len(message.content) for message in messages) / CHARS_PER_TOKEN)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _wait(backoff: float, sent: int, asked: float | None) -> float:
    if asked is not None:
        return min(asked, LONGEST_WAIT)
    return float(min(backoff * 2 ** (sent - 1), LONGEST_WAIT) * random.uniform(0.75, 1.25))
