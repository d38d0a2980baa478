"""What went wrong with a request to a chat endpoint, in one sentence, and whether to ask again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.http_errors import (
    Diagnosis,
    ErrorDetail,
    Redactor,
    detail_in,
    diagnose,
    quoted,
    status_inside,
)

if TYPE_CHECKING:
    import openai

__all__ = ["FailureError", "translated"]

_KEY_HINT = "set OPENAI_API_KEY (or RLM_API_KEY) to a key that it takes"
_URL_HINT = "check that its URL is that of an OpenAI-compatible endpoint"


@dataclass
class FailureError(Exception):
    """Why one request brought no whole reply."""

    reason: str
    """Goes on from the name of the root."""

    retryable: bool = False
    wait: float | None = None
    """Seconds after which the server wants to be asked again."""


@contextlib.asynccontextmanager
async def translated(seconds: float, *, begun: bool, redact: Redactor) -> AsyncIterator[None]:
    """Bound what happens inside to *seconds*, and raise `FailureError` for what fails there.

    *begun* says whether the reply has begun: then nothing is sent again, and a
    lost connection is a reply that was cut. *redact* takes the key out of what
    the server says.
    """
    import openai

    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise FailureError(
            f"sent nothing for {round(seconds, 2):g} s; check that the server is at work",
            retryable=not begun,
        ) from None
    except openai.APIStatusError as error:
        raise _refused(error, redact) from None
    except openai.APIConnectionError as error:
        raise _unreachable(error, begun, redact) from None
    except openai.APIError as error:
        raise _broken_off(error, begun, redact) from None
    except ValueError:
        # Not JSON, not UTF-8, or JSON that is no chunk of a chat completion.
        raise FailureError(
            f"sent something that is no chat completion; {_URL_HINT}", retryable=False
        ) from None
    except Exception as error:
        # Client libraries before 2.0 let errors of the transport through while they stream.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore"):
            raise
        raise _unreachable(error, begun, redact) from None


def _unreachable(error: Exception, begun: bool, redact: Redactor) -> FailureError:
    if begun:
        return FailureError("cut the connection in the middle of its reply; try again")
    cause = error.__cause__ or error
    why = type(cause).__name__ + quoted(str(cause), redact)
    return FailureError(
        f"cannot be reached ({why}); check its URL and that it is running", retryable=True
    )


def _broken_off(error: openai.APIError, begun: bool, redact: Redactor) -> FailureError:
    """An error inside a stream whose status was 200."""
    try:
        detail = msgspec.convert(error.body, ErrorDetail)
    except msgspec.ValidationError:
        detail = ErrorDetail()
    told = diagnose(status_inside(detail), detail, {}, redact)
    advice = "try again" if told.retryable else "check its model and options"
    return FailureError(
        f"broke off with an error{quoted(error.message, redact)}; {advice}",
        retryable=told.retryable and not begun,
    )


def _refused(error: openai.APIStatusError, redact: Redactor) -> FailureError:
    response = error.response
    # The client reads the body of an error, unless the connection was closed before.
    body = response.content if response.is_stream_consumed else b""
    told = diagnose(error.status_code, detail_in(body), response.headers, redact)
    return FailureError(_reason(error.status_code, told), told.retryable, told.retry_after)


def _reason(status: int, told: Diagnosis) -> str:
    said = f"{status}{told.said}"
    match told.fault:
        case "key":
            return f"refused the key ({status}); {_KEY_HINT}"
        case "missing":
            return f"has no such model or path ({said}); check its model and URL"
        case "quota":
            return f"has no quota left for this key ({said}); {_KEY_HINT}"
        case "too_long":
            return (
                f"cannot take the conversation, which is too long for it ({said}); "
                "use a root with a longer context"
            )
        case "busy":
            return f"failed ({said}); try again later"
        case "redirect":
            return f"redirects to {told.target} ({status}); use that URL in its spec"
        case "request":
            return f"refused the request ({said}); check its model and options"
