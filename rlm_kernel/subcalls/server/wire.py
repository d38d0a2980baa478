"""What OpenAI-compatible servers are sent and send, as types.

Source: the chat completions of OpenAI's API, as vLLM and llama.cpp serve it.
Fields that are not read are not declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage, named_cost
from rlm_kernel.http_errors import ErrorDetail
from rlm_kernel.subcalls.endpoint import Exchange, ToolSpec
from rlm_kernel.subcalls.server.structured import ServerKind, TypedForm, typed_form
from rlm_kernel.subcalls.server.tool_wire import Message, ToolAsked, ToolOffer, offers, rounds
from rlm_kernel.text import estimated_tokens, replace_surrogates

__all__ = [
    "Choice",
    "Completion",
    "RequestForm",
    "StreamedCompletion",
    "decode_completion",
    "estimated_usage",
    "usage_of",
]

Count = Annotated[int, Meta(ge=0)]


# --- requests ---------------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True


class _Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    model: str
    messages: list[Message]
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    tools: list[ToolOffer] = []
    response_format: msgspec.Raw | None = None
    structured_outputs: msgspec.Raw | None = None
    grammar: str | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None


_ENCODER = msgspec.json.Encoder()
_GAP = b"\0"
"""Stands for the prompt; no JSON text holds this byte."""


class RequestForm:
    """All of a chat request but its prompt, encoded once for all calls that share it.

    Parameters
    ----------
    params, model, kind, stream
        As they are sent: names of fields depend on the *kind* of server.
    tools, exchanges
        See `Endpoint.complete`.

    Raises
    ------
    EndpointError
        Choices, schema or tools are none that can be sent.
    """

    __slots__ = ("_head", "_messages", "_request", "_tail", "params", "size", "typed")

    def __init__(
        self,
        params: SubcallParams,
        *,
        model: str,
        kind: ServerKind,
        stream: bool,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> None:
        self.params = params
        self.typed = typed = typed_form(params, kind, tools=bool(tools))
        system = _system_text(params.system, typed)
        self._messages = [] if system is None else [Message("system", replace_surrogates(system))]
        self._messages += [Message("user", msgspec.Raw(_GAP)), *rounds(exchanges)]
        max_tokens = params.max_tokens
        if max_tokens is None and typed is not None:
            max_tokens = typed.most
        # OpenAI's reasoning models refuse the older name of the limit, which in turn is the only
        # one that some other servers know.
        new_names = kind == "openai"
        self._request = _Request(
            model=model,
            messages=self._messages,
            temperature=params.temperature,
            max_tokens=None if new_names else max_tokens,
            max_completion_tokens=max_tokens if new_names else None,
            stop=[replace_surrogates(text) for text in params.stop or ()] or None,
            seed=params.seed,
            tools=offers(tools),
            response_format=typed.response_format if typed else None,
            structured_outputs=typed.structured_outputs if typed else None,
            grammar=typed.grammar if typed else None,
            stream=stream,
            stream_options=_StreamOptions(include_usage=True) if stream else None,
        )
        self._head, self._tail = _ENCODER.encode(self._request).split(_GAP)
        self.size = len(self._head) + len(self._tail)
        """Bytes without the prompt; the model is shown about as many."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens that the reply may have."""
        return self._request.max_tokens or self._request.max_completion_tokens

    def encode(self, prompt: str) -> bytes:
        """Body of the request for one completion of *prompt*."""
        return self._head + _encoded_text(prompt) + self._tail

    def limited(self, max_tokens: int) -> RequestForm:
        """This, with another bound on the reply."""
        form = object.__new__(RequestForm)
        form.params, form.typed, form._messages = self.params, self.typed, self._messages
        name = "max_tokens" if self._request.max_tokens else "max_completion_tokens"
        form._request = msgspec.structs.replace(self._request, **{name: max_tokens})
        form._head, form._tail = _ENCODER.encode(form._request).split(_GAP)
        form.size = len(form._head) + len(form._tail)
        return form

    def conversation(self, prompt: str) -> list[Message]:
        """The messages that the model is shown."""
        text = msgspec.Raw(_encoded_text(prompt))
        return [
            Message("user", text) if isinstance(message.content, msgspec.Raw) else message
            for message in self._messages
        ]

    @property
    def stream(self) -> bool:
        return self._request.stream

    @property
    def offered(self) -> list[ToolOffer]:
        return self._request.tools


def _system_text(system: str | None, typed: TypedForm | None) -> str | None:
    # In the system message it is part of the prefix that all calls share.
    if typed is None:
        return system
    return f"{system}\n\n{typed.instruction}" if system else typed.instruction


def _encoded_text(text: str) -> bytes:
    try:
        return _ENCODER.encode(text)
    except UnicodeEncodeError:
        # A prompt with lone surrogates is no Unicode text and servers refuse it whole.
        return _ENCODER.encode(replace_surrogates(text))


# --- replies ----------------------------------------------------------------------------------


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    cost: Any = None
    """US dollars, from OpenRouter."""


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolAsked] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One completion of several, of which one is asked for."""

    message: _Text = _Text()
    delta: _Text = _Text()
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """A completion, or one chunk of a streamed one, or an error with status 200."""

    choices: list[Choice] | None = None
    usage: _Usage | None = None
    error: ErrorDetail | str | None = None


decode_completion = msgspec.json.Decoder(Completion).decode


class StreamedCompletion:
    """Puts the chunks of one streamed completion together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._asked: list[ToolAsked] = []
        self._reasoning = ""
        self._refusal = ""
        self._finish: str | None = None
        self._usage: _Usage | None = None
        self._error: ErrorDetail | str | None = None

    @property
    def begun(self) -> bool:
        """Whether the model has said anything."""
        return bool(self._text or self._asked or self._reasoning)

    @property
    def finished(self) -> bool:
        """Whether the completion itself ended, or failed."""
        return self._finish is not None or self._error is not None

    def add(self, chunk: Completion) -> None:
        self._usage = chunk.usage or self._usage
        self._error = chunk.error or self._error
        for choice in chunk.choices or ():
            delta = choice.delta
            if delta.content:
                self._text.append(delta.content)
            if delta.tool_calls:
                self._asked += delta.tool_calls
            self._reasoning = delta.reasoning or delta.reasoning_content or self._reasoning
            self._refusal = delta.refusal or self._refusal
            self._finish = choice.finish_reason or self._finish

    def whole(self) -> Completion:
        """The completion as if it had not been streamed."""
        message = _Text(
            content="".join(self._text),
            reasoning=self._reasoning,
            refusal=self._refusal,
            tool_calls=self._asked,
        )
        choices = [Choice(message=message, finish_reason=self._finish)]
        return Completion(choices=choices, usage=self._usage, error=self._error)


def usage_of(usage: _Usage | None) -> Usage | None:
    """What the server counted; ``None`` where it counted nothing, or sent what is no count."""
    if usage is None or not (usage.prompt_tokens or usage.completion_tokens):
        return None
    details = usage.prompt_tokens_details
    counted = Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        calls=1,
        cost=named_cost(usage.cost),
    )
    return counted if counted.is_countable else None


def estimated_usage(prompt: str, text: str) -> Usage:
    """Usage where the server gives none, marked as estimated."""
    return Usage(
        input_tokens=estimated_tokens(prompt),
        output_tokens=estimated_tokens(text),
        calls=1,
        estimated=True,
    )
