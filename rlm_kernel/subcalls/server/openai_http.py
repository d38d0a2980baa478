"""Any OpenAI-compatible server as an endpoint.

A call is one request for one completion, which is not streamed: most servers
stop generating when the client goes away in either case. llama.cpp does so
only while streaming, so it is asked to stream (its ``/v1/models`` tells it
apart).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import OPENAI_URL, EndpointSpec
from rlm_kernel.prices import Price, prices_from
from rlm_kernel.subcalls.endpoint import EndpointError, Exchange, Reply, ToolSpec
from rlm_kernel.subcalls.server.connection import Connection, UnreachableError
from rlm_kernel.subcalls.server.context import TEMPLATE, ContextCheck
from rlm_kernel.subcalls.server.refusals import Refused, refusal
from rlm_kernel.subcalls.server.replies import StreamedReply, decoded, reply_of
from rlm_kernel.subcalls.server.server_kind import Capacity, ServerFacts, capacity_of, probe
from rlm_kernel.subcalls.server.structured import ServerKind
from rlm_kernel.subcalls.server.wire import RequestForm

__all__ = ["OpenAIEndpoint"]

PROBES = 3
"""Failures of the list of models after which a server is taken as it is."""

HEALTH_S = 2.0

FORMS = 32
"""Forms of requests that are kept encoded."""


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
        Whether to stream. ``None`` leaves it to what the server is.
    facts
        What the server is. ``None`` asks it, before the first call.
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
        facts: ServerFacts | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.spec = str(spec)
        self.model = spec.model
        self.url = spec.base_url
        self.slots = slots
        self.on_room: Callable[[], None] | None = None
        self._prices = prices_from() if prices is None else prices
        self._connection = Connection(spec.base_url, api_key)
        self._chat = f"{spec.base_url}/chat/completions"
        self._stream = stream
        if facts is None and spec.base_url == OPENAI_URL:
            facts = ServerFacts(kind="openai")
        self._given = facts is not None
        self._facts = facts
        self._check: ContextCheck | None = None
        self._probing: asyncio.Task[ServerFacts | None] | None = None
        self._failed_probes = 0
        self._forms: dict[tuple[int, str], RequestForm] = {}

    def price(self, model: str) -> Price | None:
        """See `Endpoint.price`."""
        return self._prices.get(model)

    @property
    def kind(self) -> ServerKind | None:
        """What the server is; ``None`` before it was asked, which `facts` does."""
        return self._facts.kind if self._facts else None

    async def facts(self) -> ServerFacts:
        """What the server says that it is; asked once. A server that is not there says nothing."""
        return self._facts or await self._learn()

    async def capacity(self) -> Capacity | None:
        """How much the server can do and does right now, asked each time.

        ``None`` where it does not say, or not within 2 s. Never raises `EndpointError`.
        """
        return await capacity_of(self._connection, (await self.facts()).kind)

    async def healthy(self) -> bool:
        """Whether the server answers now and does not say that it is in trouble.

        By ``/health``, which vLLM and llama.cpp have; of others any answer will do. Some of those
        do one thing at a time and answer nothing meanwhile: that they listen is enough.
        """
        try:
            url = f"{self._connection.root}/health"
            answer = await self._connection.get(url, seconds=HEALTH_S)
        except TimeoutError:
            answers_always = self.kind in ("vllm", "llamacpp")
            return not answers_always and await self._connection.is_accepted(seconds=HEALTH_S)
        except EndpointError:
            return False
        return answer.status < 500

    async def context_limit(self) -> int | None:
        """See `Endpoint.context_limit`."""
        return (await self.facts()).context(self.model)

    async def complete(
        self,
        prompt: str,
        params: SubcallParams,
        *,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """See `Endpoint.complete`.

        A prompt that the context cannot take is refused before it is sent; a bound on the reply
        that the context has no room for is lowered to what is left.
        """
        facts = self._facts or await self._learn()
        model = params.model or self.model
        form = self._form(params, model, facts, tools, exchanges)
        context = facts.context(model)
        # At most 4 bytes a character, and a token for each: what this lets through does fit.
        most = 4 * len(prompt) + form.size + TEMPLATE + (form.max_tokens or 0)
        if context is not None and most > context:
            check = self._check = self._check or ContextCheck(self._connection, facts.kind)
            form = await check.fitting(prompt, form, model=model, context=context)
        request = Refused(
            model=model,
            url=self.url,
            chars=len(prompt),
            reply_tokens=form.max_tokens or 0,
            tools=bool(tools),
            typed=form.typed is not None,
        )
        try:
            return await self._ask(prompt, form, request)
        except UnreachableError:
            self._forget_facts()
            raise

    async def close(self) -> None:
        """See `Endpoint.close`."""
        if self._probing is not None and not self._probing.done():
            self._probing.cancel()
        await self._connection.close()

    # --- a call -------------------------------------------------------------------------------

    def _form(
        self,
        params: SubcallParams,
        model: str,
        facts: ServerFacts,
        tools: Sequence[ToolSpec],
        exchanges: Sequence[Exchange],
    ) -> RequestForm:
        """All of the request but the prompt; the calls of a batch share it."""
        stream = facts.kind == "llamacpp" if self._stream is None else self._stream
        if tools or exchanges:
            return RequestForm(
                params,
                model=model,
                kind=facts.kind,
                stream=stream,
                tools=tools,
                exchanges=exchanges,
            )
        key = (id(params), facts.kind)
        form = self._forms.get(key)
        if form is None or form.params is not params:
            if len(self._forms) >= FORMS:
                self._forms.clear()
            form = RequestForm(params, model=model, kind=facts.kind, stream=stream)
            self._forms[key] = form  # it holds *params*, so that their id stays theirs
        return form

    async def _ask(self, prompt: str, form: RequestForm, request: Refused) -> Reply:
        connection = self._connection
        stream = StreamedReply(connection) if form.stream else None
        answer = await connection.post(self._chat, form.encode(prompt), stream)
        if answer.status != 200:
            raise refusal(
                answer.status,
                answer.body,
                answer.headers,
                request=request,
                redact=connection.redact,
            )
        if stream is not None and answer.streamed:
            completion, first = stream.whole(), stream.first_token_s
        else:
            completion, first = decoded(answer.body, self.url), None
        return reply_of(
            completion,
            prompt=prompt,
            form=form,
            request=request,
            redact=connection.redact,
            first_token_s=first,
        )

    # --- what the server is -------------------------------------------------------------------

    async def _learn(self) -> ServerFacts:
        """The server's facts, by one probe for all that wait."""
        # Of all that wait, the first to go on clears the field: each keeps the task.
        probing = self._probing = self._probing or asyncio.create_task(self._probe())
        try:
            return await asyncio.shield(probing) or ServerFacts()
        finally:
            if self._probing is probing and probing.done() and self._facts is None:
                self._probing = None  # the server was not there: ask again with the next call

    async def _probe(self) -> ServerFacts | None:
        try:
            facts = await probe(self._connection)
        except UnreachableError:
            return None
        if facts is None:
            self._failed_probes += 1
            facts = ServerFacts() if self._failed_probes >= PROBES else None
        self._facts = facts
        return facts

    def _forget_facts(self) -> None:
        """What comes back at this URL may be another server."""
        if self._given or (self._probing is not None and not self._probing.done()):
            return
        self._facts = self._check = self._probing = None
