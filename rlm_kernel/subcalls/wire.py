"""What OpenAI-compatible servers are sent and send, as types; their errors as sentences.

Source: the chat completions of OpenAI's API, as vLLM and llama.cpp serve it.
Fields that are not read are not declared.
"""

from __future__ import annotations

import datetime
import email.utils
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage, named_cost
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.text import estimated_tokens, replace_surrogates

__all__ = [
    "Choice",
    "Completion",
    "ErrorDetail",
    "ModelCard",
    "ModelList",
    "StreamedCompletion",
    "decode_completion",
    "decode_models",
    "encode_request",
    "estimated_usage",
    "refusal",
    "retry_after",
    "usage_of",
]

Count = Annotated[int, Meta(ge=0)]


# --- requests ---------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True


class _Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    model: str
    messages: list[_Message]
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None


_ENCODER = msgspec.json.Encoder()


def encode_request(
    prompt: str, params: SubcallParams, *, model: str, stream: bool, new_names: bool
) -> bytes:
    """Body of a chat request for one completion of *prompt*.

    *new_names* writes ``max_completion_tokens``: OpenAI's reasoning models refuse the older
    name, which in turn is the only one that some other servers know.
    """
    messages = [] if params.system is None else [_Message("system", params.system)]
    messages.append(_Message("user", prompt))
    request = _Request(
        model=model,
        messages=messages,
        temperature=params.temperature,
        max_tokens=None if new_names else params.max_tokens,
        max_completion_tokens=params.max_tokens if new_names else None,
        stop=params.stop or None,
        seed=params.seed,
        stream=stream,
        stream_options=_StreamOptions(include_usage=True) if stream else None,
    )
    try:
        return _ENCODER.encode(request)
    except UnicodeEncodeError:
        # A prompt with lone surrogates is no Unicode text and servers refuse it whole.
        clean = [_Message(m.role, replace_surrogates(m.content)) for m in messages]
        return _ENCODER.encode(msgspec.structs.replace(request, messages=clean))


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


class Choice(msgspec.Struct, frozen=True):
    """One completion of several, of which one is asked for."""

    message: _Text = _Text()
    delta: _Text = _Text()
    finish_reason: str | None = None


class ErrorDetail(msgspec.Struct, frozen=True):
    """The ``error`` object of a reply."""

    message: str | None = None
    type: str | None = None
    code: Any = None
    n_prompt_tokens: Count | None = None
    n_ctx: Count | None = None


class Completion(msgspec.Struct, frozen=True):
    """A completion, or one chunk of a streamed one, or an error with status 200."""

    choices: list[Choice] | None = None
    usage: _Usage | None = None
    error: ErrorDetail | str | None = None


class _ModelMeta(msgspec.Struct, frozen=True):
    n_ctx: Count | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of ``/v1/models``."""

    id: str = ""
    owned_by: str | None = None
    max_model_len: Count | None = None
    context_length: Count | None = None
    context_window: Count | None = None
    meta: _ModelMeta | None = None

    @property
    def context(self) -> int | None:
        """Context in tokens, under the name that vLLM, llama.cpp or a hosted API gives it."""
        in_meta = self.meta.n_ctx if self.meta else None
        return self.max_model_len or in_meta or self.context_length or self.context_window


class ModelList(msgspec.Struct, frozen=True):
    """The reply of ``/v1/models``."""

    data: list[ModelCard] = []


decode_completion = msgspec.json.Decoder(Completion).decode
decode_models = msgspec.json.Decoder(ModelList).decode


class StreamedCompletion:
    """Puts the chunks of one streamed completion together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning = ""
        self._finish: str | None = None
        self._usage: _Usage | None = None
        self._error: ErrorDetail | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the completion itself ended, or failed."""
        return self._finish is not None or self._error is not None

    def add(self, chunk: Completion) -> None:
        self._usage = chunk.usage or self._usage
        self._error = chunk.error or self._error
        for choice in chunk.choices or ():
            delta = choice.delta
            self._text.append(delta.content or "")
            self._reasoning = delta.reasoning or delta.reasoning_content or self._reasoning
            self._finish = choice.finish_reason or self._finish

    def whole(self) -> Completion:
        """The completion as if it had not been streamed."""
        message = _Text(content="".join(self._text), reasoning=self._reasoning)
        choices = [Choice(message=message, finish_reason=self._finish)]
        return Completion(choices=choices, usage=self._usage, error=self._error)


def usage_of(usage: _Usage | None) -> Usage | None:
    """What the server counted; ``None`` where it counted nothing."""
    if usage is None or not (usage.prompt_tokens or usage.completion_tokens):
        return None
    details = usage.prompt_tokens_details
    return Usage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        calls=1,
        cost=named_cost(usage.cost),
    )


def estimated_usage(prompt: str, text: str) -> Usage:
    """Usage where the server gives none, marked as estimated."""
    return Usage(
        input_tokens=estimated_tokens(prompt),
        output_tokens=estimated_tokens(text),
        calls=1,
        estimated=True,
    )


# --- errors -----------------------------------------------------------------------------------


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: Any = None


_decode_error = msgspec.json.Decoder(_ErrorBody).decode

_RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_HAS_LIMIT = re.compile(
    r"(?:context (?:length|size|window)|max_model_len)\D{0,40}?(\d[\d,]*)", re.IGNORECASE
)
_HAS_PROMPT = re.compile(
    r"(\d[\d,]*) (?:input tokens|prompt tokens|in the messages|in your prompt)"
    r"|(?:resulted in|request \(|prompt contains(?: at least)?) ?(\d[\d,]*)",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"context.?(?:length|size|window)|too many tokens|prompt is too long|exceed_context",
    re.IGNORECASE,
)


def refusal(
    status: int, body: bytes, headers: Mapping[str, str], *, model: str, url: str, key: str
) -> EndpointError:
    """The error that a reply of *status* (not 200) stands for. *key* is kept out of it."""
    error = _refusal(status, body, headers, model=model, url=url, key=key)
    error.status = status
    return error


def _refusal(
    status: int, body: bytes, headers: Mapping[str, str], *, model: str, url: str, key: str
) -> EndpointError:
    detail = _error_detail(body)
    said = _quote(detail.message or "", key)
    kind = f"{detail.type or ''} {detail.code or ''}"
    where = f"the server at {url}"
    if status in (401, 403):
        # Not quoted: servers repeat parts of the key here.
        return EndpointError(
            f"{where} refuses the API key ({status}): set OPENAI_API_KEY or RLM_API_KEY to one "
            "that it accepts"
        )
    if status == 404:
        return EndpointError(
            f"{where} has no model {model!r} or no such path (404{said}): check model and URL of "
            "the spec"
        )
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(f"{kind} {said}")):
        return EndpointError(_too_long(detail, said, model))
    if status == 429 and "insufficient_quota" in kind:
        return EndpointError(f"the quota of the account at {url} is used up (429{said}): add to it")
    if status in _RETRYABLE or status >= 500:
        trouble = "has too many requests" if status == 429 else "is in trouble"
        return EndpointError(
            f"{where} {trouble} ({status}{said}): try again later",
            retryable=True,
            retry_after=retry_after(headers),
        )
    if 300 <= status < 400:
        target = headers.get("Location", "another address")[:200]
        return EndpointError(f"{where} redirects to {target} ({status}): use that URL in the spec")
    return EndpointError(f"{where} refuses the request ({status}{said}): change its parameters")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait (RFC 9110, 10.2.3: a number or a date)."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text):
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
    return max(0.0, (at - datetime.datetime.now(datetime.UTC)).total_seconds())


def _error_detail(body: bytes) -> ErrorDetail:
    """The error in *body*; empty where it is no JSON, such as the page of a proxy."""
    try:
        parsed = _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorDetail()
    if isinstance(parsed.error, ErrorDetail):
        return parsed.error
    text = parsed.error or parsed.message
    if text is None and parsed.detail is not None:
        text = parsed.detail if isinstance(parsed.detail, str) else repr(parsed.detail)
    return ErrorDetail(message=text)


def _quote(text: str, key: str) -> str:
    """What a server said, for the inside of parentheses: one line, short, without the key."""
    if key and key != "none":
        text = text.replace(key, "***")
    text = " ".join(text.split())
    if not text:
        return ""
    return f": {text if len(text) <= 300 else text[:297] + '…'}"


def _too_long(detail: ErrorDetail, said: str, model: str) -> str:
    limit, used = detail.n_ctx, detail.n_prompt_tokens
    if limit is None and (found := _HAS_LIMIT.search(said)):
        limit = _number(found[1])
    if used is None and (found := _HAS_PROMPT.search(said)):
        used = _number(found[1] or found[2])
    if limit and used and used >= limit:
        return (
            f"the prompt has {used:,} tokens and the context of {model!r} is {limit:,}: "
            f"pass pieces that are at least {used - limit + 1:,} tokens shorter"
        )
    return f"the prompt is too long for {model!r}{said}: pass smaller pieces"


def _number(digits: str) -> int:
    return int(digits.replace(",", ""))
