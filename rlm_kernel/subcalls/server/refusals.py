"""What a sub-call says of a server that did not answer: one sentence without keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from rlm_kernel.http_errors import Diagnosis, ErrorDetail, Redactor, detail_in, diagnose
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.text import LEAST_CHARS_PER_TOKEN

__all__ = ["Refused", "over_context", "refusal", "refusal_of"]

_HAS_LIMIT = re.compile(
    r"(?:context (?:length|size|window)|max_model_len)\D{0,40}?(\d[\d,]*)", re.IGNORECASE
)
_HAS_PROMPT = re.compile(
    r"(\d[\d,]*) (?:input tokens|prompt tokens|in the messages|in your prompt)"
    r"|(?:resulted in|request \(|prompt contains(?: at least)?) ?(\d[\d,]*)",
    re.IGNORECASE,
)
_AT_LEAST = re.compile(r"at least [\d,]+ (?:input|prompt) tokens", re.IGNORECASE)
_NO_TOOLS = re.compile(
    r"tool.{0,60}(?:requires?|support|enable|--jinja|must be set)|support.{0,20}tool",
    re.IGNORECASE | re.DOTALL,
)
_NO_FORM = re.compile(r"grammar|schema|guided|structured|response_format", re.IGNORECASE)


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The request that was refused, as far as the error speaks of it."""

    model: str
    url: str
    chars: int = 0
    """Of its prompt."""

    reply_tokens: int = 0
    """That were asked for."""

    tools: bool = False
    typed: bool = False


def refusal(
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    *,
    request: Refused,
    redact: Redactor,
) -> EndpointError:
    """The error that a reply of *status* (not 200) to *request* stands for.

    *headers* have their names in lower case.
    """
    return refusal_of(status, detail_in(body), headers, request=request, redact=redact)


def refusal_of(
    status: int,
    detail: ErrorDetail,
    headers: Mapping[str, str],
    *,
    request: Refused,
    redact: Redactor,
) -> EndpointError:
    """As `refusal`, of an error that was read already."""
    told = diagnose(status, detail, headers, redact)
    reason = _unable(status, told, request)
    if reason is not None:
        return EndpointError(reason, status=status)
    return EndpointError(
        _reason(status, told, detail, request),
        retryable=told.retryable,
        retry_after=told.retry_after,
        status=status,
    )


def _unable(status: int, told: Diagnosis, request: Refused) -> str | None:
    """Why the server cannot do what this request asks for beside a reply; ``None`` if it can."""
    said, where = told.said, f"the server at {request.url}"
    if told.fault not in ("busy", "request") or status not in (400, 422, 500, 501):
        return None
    if request.tools and _NO_TOOLS.search(said):
        return (
            f"{where} takes no tools ({status}{said}): start it with tools, which for vLLM is "
            "--enable-auto-tool-choice with --tool-call-parser, or make the call without"
        )
    if request.typed and status != 501 and _NO_FORM.search(said):
        return (
            f"{where} cannot keep to the form that was asked for ({status}{said}): "
            "change choices or schema"
        )
    return None


def _reason(status: int, told: Diagnosis, detail: ErrorDetail, request: Refused) -> str:
    said, where = told.said, f"the server at {request.url}"
    match told.fault:
        case "key":
            return (
                f"{where} refuses the API key ({status}): set OPENAI_API_KEY or RLM_API_KEY to "
                "one that it accepts"
            )
        case "missing":
            return (
                f"{where} has no model {request.model!r} or no such path ({status}{said}): "
                "check model and URL of the spec"
            )
        case "too_long":
            return _too_long(detail, said, request)
        case "quota":
            return (
                f"the quota of the account at {request.url} is used up ({status}{said}): add to it"
            )
        case "busy":
            trouble = "has too many requests" if status == 429 else "is in trouble"
            return f"{where} {trouble} ({status}{said}): try again later"
        case "redirect":
            return f"{where} redirects to {told.target} ({status}): use that URL in the spec"
        case "request":
            return f"{where} refuses the request ({status}{said}): change its parameters"


def over_context(model: str, *, used: int, limit: int, reply: int, chars: int, about: str) -> str:
    """Why a prompt of *used* tokens and *chars* characters does not fit, and what would.

    *reply* are the tokens asked for, 0 where the call leaves that open; *about* stands before
    numbers that are not exact.
    """
    room = min(reply, limit // 2) or 1
    likely = max(used, chars // LEAST_CHARS_PER_TOKEN) if about else used
    piece = _piece(likely, limit, reply, chars)
    advice = f"at most {piece:,} characters" if piece else "fewer characters"
    return (
        f"the prompt has {about}{used:,} tokens and the context of {model!r} is {limit:,}: "
        f"{about}{used + room - limit:,} too many beside the {room:,} for the reply; "
        f"pass pieces of {advice}"
    )


def _piece(used: int, limit: int, reply: int, chars: int) -> int:
    """Characters of a piece that fits, by the tokens of this prompt, rounded down.

    A tenth is left free: other pieces have more tokens in as many characters.
    """
    room = limit - (min(reply, limit // 2) or min(512, limit // 4))
    piece = int(chars * room / max(used, 1) * 0.9)
    digits = max(len(str(piece)) - 2, 0)
    unit: int = 10**digits
    return piece // unit * unit


def _too_long(detail: ErrorDetail, said: str, request: Refused) -> str:
    limit, used = detail.n_ctx, detail.n_prompt_tokens
    if limit is None and (found := _HAS_LIMIT.search(said)):
        limit = _number(found[1])
    if used is None and (found := _HAS_PROMPT.search(said)):
        used = _number(found[1] or found[2])
    if limit and used and used >= limit:
        return over_context(
            request.model,
            used=used,
            limit=limit,
            reply=request.reply_tokens,
            chars=request.chars,
            # vLLM stops counting where it is too much.
            about="at least " if _AT_LEAST.search(said) else "",
        )
    return f"the prompt is too long for {request.model!r}{said}: pass smaller pieces"


def _number(digits: str) -> int:
    return int(digits.replace(",", ""))
