"""What a model is to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage
from rlm_kernel.errors import SubcallError
from rlm_kernel.prices import Price

__all__ = [
    "CutShortError",
    "Endpoint",
    "EndpointError",
    "Exchange",
    "Reply",
    "ToolSpec",
    "ToolUse",
]


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model of a sub-call may use."""

    name: str
    description: str
    parameters: str
    """JSON Schema of its arguments, an object, as text."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The model asks for a tool."""

    use_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it: perhaps none."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a sub-call with tools: what the model asked for and what it was given."""

    text: str
    uses: list[ToolUse]
    results: list[str]
    """One for each use."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One completion: a text, never empty, or tools that the model asks for."""

    text: str
    usage: Usage
    finish: str = ""
    """Why it ended, in the server's word: ``stop``, ``length`` …"""

    uses: list[ToolUse] = []
    attempts: int = 1
    """Requests that the endpoint sent for it: more than 1 where servers failed over."""

    server: str = ""
    """URL of the server that replied, where the endpoint has several."""

    first_token_s: float | None = None
    """Seconds from being sent to the first text, where it was streamed."""

    trouble: list[str] = []
    """Why the attempts before the last one failed."""


class EndpointError(SubcallError):
    """One request to an endpoint failed.

    Parameters
    ----------
    reason
        One sentence, without a key.
    retryable
        Whether the same request may succeed later.
    retry_after
        Seconds that the server asked to wait.
    usage
        What the server counted although it gave no answer.
    finish
        Why the completion ended, where there was one.
    status
        HTTP status of the reply; 0 where none came, or none that is HTTP.
    attempts
        Requests that the endpoint sent, of which the last failed with *reason*.
    server
        URL of the server that failed last, where the endpoint has several.
    trouble
        Why the attempts before the last one failed.
    """

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool = False,
        retry_after: float | None = None,
        usage: Usage | None = None,
        finish: str = "",
        status: int = 0,
        attempts: int = 1,
        server: str = "",
        trouble: Sequence[str] = (),
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.retry_after = retry_after
        self.usage = usage
        self.finish = finish
        self.status = status
        self.attempts = attempts
        self.server = server
        self.trouble = list(trouble)


class CutShortError(EndpointError):
    """The call was cancelled: the cause of the `asyncio.CancelledError` that `Endpoint.complete`
    raises, where the endpoint sends more than one request for a call.

    Parameters
    ----------
    usage, trouble
        Of the requests that had failed before.
    attempts
        Requests that were sent, the one under way among them.
    server
        URL of the server that was asked last, where the endpoint has several.
    under_way
        Whether there was a request whose reply was not waited for.
    """

    def __init__(
        self,
        *,
        usage: Usage | None,
        attempts: int,
        server: str,
        trouble: Sequence[str],
        under_way: bool,
    ) -> None:
        super().__init__(
            "the call was cancelled",
            usage=usage,
            attempts=attempts,
            server=server,
            trouble=trouble,
        )
        self.under_way = under_way


class Endpoint(Protocol):
    """A model that completes prompts."""

    @property
    def spec(self) -> str:
        """Its spec, without a key."""

    @property
    def model(self) -> str:
        """The model that is asked where the call names none."""

    @property
    def slots(self) -> int | None:
        """Requests that it is worth sending at once, which may change; ``None`` where that is not
        known."""

    on_room: Callable[[], None] | None
    """Set by the scheduler for as long as it has calls for this endpoint, which may not be closed
    meanwhile; called when `slots` has grown."""

    def price(self, model: str) -> Price | None:
        """What the tokens of *model* cost, where that is known."""

    async def complete(
        self,
        prompt: str,
        params: SubcallParams,
        *,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """One request for one completion; cancelling it ends it on the server too.

        *exchanges* are the rounds so far of a call that has *tools*. Raises `EndpointError`,
        and `UsageError` where the endpoint cannot be had at all. What a cancelled call met before
        may be told by a `CutShortError`, as the cause of the cancellation.
        """

    async def context_limit(self) -> int | None:
        """Tokens of prompt and completion together; ``None`` where the server does not say."""

    async def close(self) -> None:
        """Drop its connections. It may not be asked any more."""
