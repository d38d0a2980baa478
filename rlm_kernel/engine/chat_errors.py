"""What went wrong with a request to a chat endpoint, in one sentence, and whether to ask again."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

__all__ = ["FailureError", "translated"]

LONGEST_MESSAGE = 300
"""Characters of a server's own words in an error."""

_RETRYABLE = frozenset({408, 409, 425, 429})
_TOO_LONG = re.compile(r"context[ _](?:length|size|window)|maximum context|too long", re.IGNORECASE)
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
async def translated(
    seconds: float, *, begun: bool, redact: Callable[[str], str]
) -> AsyncIterator[None]:
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
        raise _unreachable(error, begun) from None
    except openai.APIError as error:
        # Inside a stream whose status was 200: the engine behind the server failed.
        said = redact(error.message)[:LONGEST_MESSAGE]
        raise FailureError(f"broke off with an error: {said}", retryable=not begun) from None
    except ValueError:
        # Not JSON, not UTF-8, or JSON that is no chunk of a chat completion.
        raise FailureError(
            f"sent something that is no chat completion; {_URL_HINT}", retryable=False
        ) from None
    except Exception as error:
        # Client libraries before 2.0 let errors of the transport through while they stream.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore"):
            raise
        raise _unreachable(error, begun) from None


def _unreachable(error: Exception, begun: bool) -> FailureError:
    if begun:
        return FailureError("cut the connection in the middle of its reply; try again")
    cause = error.__cause__ or error
    why = f"{type(cause).__name__}: {cause}".rstrip(": ")
    return FailureError(
        f"cannot be reached ({why[:LONGEST_MESSAGE]}); check its URL and that it is running",
        retryable=True,
    )


def _refused(error: object, redact: Callable[[str], str]) -> FailureError:
    import openai

    assert isinstance(error, openai.APIStatusError)
    status = error.status_code
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    said = f": {redact(str(said))[:LONGEST_MESSAGE]}" if said else ""
    if status in (401, 403):
        return FailureError(f"refused the key ({status}); {_KEY_HINT}")
    if status == 404:
        return FailureError(f"has no such model or path (404{said}); check its model and URL")
    if error.code == "insufficient_quota":
        return FailureError(f"has no quota left for this key ({status}{said}); {_KEY_HINT}")
    if _TOO_LONG.search(said):
        return FailureError(
            f"cannot take the conversation, which is too long for it ({status}{said}); "
            "use a root with a longer context"
        )
    if status in _RETRYABLE or status >= 500:
        wait = _seconds(error.response.headers.get("retry-after"))
        return FailureError(f"failed ({status}{said}); try again later", True, wait)
    return FailureError(f"refused the request ({status}{said}); check its model and options")


def _seconds(text: str | None) -> float | None:
    """``Retry-After`` in seconds; its form as a date is left to our own backoff."""
    try:
        return max(float(text), 0.0) if text else None
    except ValueError:
        return None
