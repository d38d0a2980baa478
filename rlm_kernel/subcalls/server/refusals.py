"""What servers say when they do not answer, as sentences without keys."""

from __future__ import annotations

import base64
import datetime
import email.utils
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.text import LEAST_CHARS_PER_TOKEN

__all__ = ["ErrorDetail", "Redactor", "Refused", "over_context", "refusal", "retry_after"]

LONGEST_QUOTE = 300
"""Characters of a server's own words in an error."""

_PART = 8
"""Characters of a key that are enough to be hidden: servers repeat keys with their middle cut."""

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
_AT_LEAST = re.compile(r"at least [\d,]+ (?:input|prompt) tokens", re.IGNORECASE)
_NO_TOOLS = re.compile(
    r"tool.{0,60}(?:requires?|support|enable|--jinja|must be set)|support.{0,20}tool",
    re.IGNORECASE | re.DOTALL,
)

_NO_FORM = re.compile(r"grammar|schema|guided|structured|response_format", re.IGNORECASE)

Count = Annotated[int, Meta(ge=0)]


class ErrorDetail(msgspec.Struct, frozen=True):
    """The ``error`` object of a reply."""

    message: str | None = None
    type: str | None = None
    code: Any = None
    n_prompt_tokens: Count | None = None
    n_ctx: Count | None = None


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


class Redactor:
    """Takes a key out of what a server says, also where it is in part or in other writing.

    Parameters
    ----------
    key
        The secret; ``"none"`` and an empty one hide nothing.
    """

    def __init__(self, key: str) -> None:
        self.key = "" if key == "none" else key
        self._pattern: re.Pattern[str] | None = None

    def __call__(self, text: str) -> str:
        if not self.key:
            return text
        if self._pattern is None:
            # Longest first: of alternatives, the first that matches is taken.
            parts = sorted(set(_writings(self.key)), key=len, reverse=True)
            self._pattern = re.compile(f"(?:{'|'.join(map(re.escape, parts))})+")
        return self._pattern.sub("***", text)


def _writings(key: str) -> Iterator[str]:
    """*key*, its parts, and how URLs and base64 write it."""
    yield key
    yield quote(key, safe="")
    for start in range(len(key) - _PART + 1):
        yield key[start : start + _PART]
    for shift in range(3):
        # Where the key is in the middle of what was encoded, it has one of three forms; the
        # characters at both ends hold bits of its neighbours.
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * shift + key.encode()).decode().rstrip("=")
            inner = text[(0, 2, 3)[shift] : len(text) - 1]
            for start in range(len(inner) - _PART + 1):
                yield inner[start : start + _PART]


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: Any = None


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


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
    error = _refusal(status, body, headers, request, redact)
    error.status = status
    return error


def _refusal(
    status: int, body: bytes, headers: Mapping[str, str], request: Refused, redact: Redactor
) -> EndpointError:
    detail = _error_detail(body)
    said = _quote(detail.message or "", redact)
    kind = f"{detail.type or ''} {detail.code or ''}"
    where = f"the server at {request.url}"
    if status in (401, 403):
        # Not quoted: servers repeat parts of the key here.
        return EndpointError(
            f"{where} refuses the API key ({status}): set OPENAI_API_KEY or RLM_API_KEY to one "
            "that it accepts"
        )
    if status == 404:
        return EndpointError(
            f"{where} has no model {request.model!r} or no such path (404{said}): check model and "
            "URL of the spec"
        )
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(f"{kind} {said}")):
        return EndpointError(_too_long(detail, said, request))
    if status == 429 and "insufficient_quota" in kind:
        return EndpointError(
            f"the quota of the account at {request.url} is used up (429{said}): add to it"
        )
    if request.tools and status in (400, 422, 500, 501) and _NO_TOOLS.search(said):
        return EndpointError(
            f"{where} takes no tools ({status}{said}): start it with tools, which for vLLM is "
            "--enable-auto-tool-choice with --tool-call-parser, or make the call without"
        )
    if request.typed and status in (400, 422, 500) and _NO_FORM.search(said):
        return EndpointError(
            f"{where} cannot keep to the form that was asked for ({status}{said}): "
            "change choices or schema"
        )
    if status in _RETRYABLE or status >= 500:
        trouble = "has too many requests" if status == 429 else "is in trouble"
        return EndpointError(
            f"{where} {trouble} ({status}{said}): try again later",
            retryable=True,
            retry_after=retry_after(headers),
        )
    if 300 <= status < 400:
        target = redact(headers.get("location", "another address"))[:200]
        return EndpointError(f"{where} redirects to {target} ({status}): use that URL in the spec")
    return EndpointError(f"{where} refuses the request ({status}{said}): change its parameters")


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


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait (RFC 9110, 10.2.3: a number or a date)."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text):
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
    return max(0.0, (at - datetime.datetime.now(datetime.UTC)).total_seconds())


def _error_detail(body: bytes) -> ErrorDetail:
    """The error in *body*; empty where it is no JSON, such as the page of a proxy."""
    try:
        parsed = _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ErrorDetail()
    if isinstance(parsed.error, ErrorDetail):
        return parsed.error
    text = parsed.error or parsed.message
    if text is None and parsed.detail is not None:
        text = parsed.detail if isinstance(parsed.detail, str) else repr(parsed.detail)
    return ErrorDetail(message=text)


def _quote(text: str, redact: Redactor) -> str:
    """What a server said, for the inside of parentheses: one line, short, without the key."""
    text = " ".join(redact(text[: 100 * LONGEST_QUOTE]).split())
    if not text:
        return ""
    return f": {text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + '…'}"


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
