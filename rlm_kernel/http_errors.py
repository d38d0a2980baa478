"""What OpenAI-compatible servers say when they do not answer, told apart, without keys.

Roots and sub-calls ask with different HTTP clients and say different things about it: the rules
are one.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

from rlm_kernel.errors import UsageError
from rlm_kernel.text import replace_surrogates

__all__ = [
    "Diagnosis",
    "ErrorDetail",
    "Fault",
    "Redactor",
    "checked_key",
    "detail_in",
    "diagnose",
    "quoted",
    "retry_after",
    "status_inside",
]

LONGEST_QUOTE = 300
"""Characters of a server's own words in an error."""

_PART = 8
"""Characters of a key that are enough to be hidden: servers repeat keys with their middle cut."""

_RETRYABLE = frozenset({408, 409, 425, 429})
_TOO_LONG = re.compile(
    r"context.?(?:length|size|window)|too many tokens|prompt is too long|exceed_context",
    re.IGNORECASE,
)

Count = Annotated[int, Meta(ge=0)]

Fault = Literal["key", "missing", "too_long", "quota", "busy", "redirect", "request"]
"""``missing``: no such model or path. ``busy``: the same request may succeed later. ``request``:
it will not."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The ``error`` object of a reply."""

    message: str | None = None
    type: str | None = None
    code: Any = None
    n_prompt_tokens: Count | None = None
    n_ctx: Count | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply that is no answer stands for."""

    fault: Fault
    said: str = ""
    """The server's own words for the inside of parentheses, a colon before them; may be empty."""

    target: str = ""
    """Where a redirect goes."""

    retry_after: float | None = None
    """Seconds that the server asks to wait."""

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.fault == "busy"


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


def checked_key(key: str) -> str:
    """*key*, which can stand in a header. Raises `UsageError`, which does not show it, else."""
    if not (key.isascii() and key.isprintable()):
        raise UsageError("the API key has characters that no key has: set it again")
    return key


def diagnose(
    status: int, detail: ErrorDetail, headers: Mapping[str, str], redact: Redactor
) -> Diagnosis:
    """What a reply of *status* (not 2xx) stands for. *headers* are found by names in lower case."""
    if status in (401, 403):
        # Not quoted: servers repeat parts of the key here.
        return Diagnosis(fault="key")
    if 300 <= status < 400:
        target = redact(headers.get("location", "another address"))[:200]
        return Diagnosis(fault="redirect", target=" ".join(target.split()))
    said = quoted(detail.message or "", redact)
    fault = _fault(status, f"{detail.type or ''} {detail.code or ''}", said)
    wait = retry_after(headers) if fault == "busy" else None
    return Diagnosis(fault=fault, said=said, retry_after=wait)


def _fault(status: int, kind: str, said: str) -> Fault:
    if status == 404:
        return "missing"
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(f"{kind} {said}")):
        return "too_long"
    if "insufficient_quota" in kind:
        return "quota"
    return "busy" if status in _RETRYABLE or status >= 500 else "request"


def detail_in(body: bytes) -> ErrorDetail:
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


def status_inside(detail: ErrorDetail) -> int:
    """The status of an error that came after status 200: the engine failed behind the server."""
    code = detail.code
    return code if isinstance(code, int) and 400 <= code < 600 else 500


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


def quoted(text: str, redact: Redactor) -> str:
    """What a server said, for the inside of parentheses: one line, short, without the key."""
    text = replace_surrogates(text[: 100 * LONGEST_QUOTE])
    text = " ".join(redact(text).split())
    if not text:
        return ""
    return f": {text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + '…'}"


class _ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail | str | None = None
    message: str | None = None
    detail: Any = None


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


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
