"""What a model is to the scheduler."""

from __future__ import annotations

from typing import Protocol

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage
from rlm_kernel.errors import SubcallError
from rlm_kernel.prices import Price

__all__ = ["Endpoint", "EndpointError", "Reply"]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, never empty."""

    text: str
    usage: Usage
    finish: str = ""
    """Why it ended, in the server's word: ``stop``, ``length`` …"""


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
    """

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool = False,
        retry_after: float | None = None,
        usage: Usage | None = None,
        finish: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.retry_after = retry_after
        self.usage = usage
        self.finish = finish


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
        """Requests that it works on at once; ``None`` where that is not known."""

    def price(self, model: str) -> Price | None:
        """What the tokens of *model* cost, where that is known."""

    async def complete(self, prompt: str, params: SubcallParams) -> Reply:
        """One request for one completion; cancelling it ends it on the server too.

        Raises `EndpointError`, and `UsageError` where the endpoint cannot be had at all.
        """

    async def context_limit(self) -> int | None:
        """Tokens of prompt and completion together; ``None`` where the server does not say."""

    async def close(self) -> None:
        """Drop its connections. It may not be asked any more."""
