"""The way of one call through the servers of a fleet, where the first one failed.

This decides how often a fleet sends a call again, also one of a single server. For endpoints that
are no fleet the scheduler does (`rlm_kernel.subcalls.scheduling.retry`), which adds nothing here.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.engine.budget import Usage
from rlm_kernel.subcalls.endpoint import CutShortError, EndpointError, Reply

if TYPE_CHECKING:
    from rlm_kernel.subcalls.fleet.member import Member

__all__ = ["LONGEST_REST_S", "Journey", "is_busy"]

FAILED = 3
"""Replies that are failures, after which the call itself is held to be the cause."""

UNANSWERED = 5
"""Requests without a reply."""

REFUSED = 8
"""Replies that the server has too many requests."""

LONGEST_REST_S = 60.0
"""A server that asks for a longer wait is not waited for."""

_LONGEST_PAUSE_S = 8.0


def is_busy(error: EndpointError) -> bool:
    """Whether the server would not take the request for now."""
    return error.retryable and error.status in (429, 503)


class Journey:
    """What one call met so far.

    Parameters
    ----------
    pause_s
        Before the call is sent to the same server again, the first time; doubled after each.
    """

    __slots__ = (
        "_answered",
        "_pause_s",
        "_refused",
        "_under_way",
        "_usage",
        "at",
        "attempts",
        "avoid",
        "trouble",
    )

    def __init__(self, pause_s: float) -> None:
        self.attempts = 0
        self.trouble: list[str] = []
        self.avoid: set[Member] = set()
        """Where it failed, until it failed everywhere."""
        self.at: Member | None = None
        """Where it is, or was last."""
        self._under_way = False
        self._usage: Usage | None = None
        self._answered = 0
        self._refused = 0
        self._pause_s = pause_s

    def board(self, member: Member) -> None:
        """A request is sent to *member*."""
        self.at = member
        self._under_way = True

    def add(self, member: Member, error: EndpointError) -> None:
        """Another request failed."""
        self._under_way = False
        self.attempts += error.attempts
        self.trouble += [*error.trouble, error.reason]
        self.avoid.add(member)
        if error.usage is not None:
            self._usage = error.usage if self._usage is None else self._usage + error.usage
        if is_busy(error):
            self._refused += 1
        elif error.status:
            self._answered += 1

    @property
    def over(self) -> bool:
        """Whether it was tried often enough."""
        unanswered = len(self.trouble) - self._answered - self._refused
        return self._answered >= FAILED or self._refused >= REFUSED or unanswered >= UNANSWERED

    def pause(self) -> float:
        """Seconds until the next request, which goes where one failed."""
        grown: float = self._pause_s * 2 ** (len(self.trouble) - 1)
        return min(_LONGEST_PAUSE_S, grown) * random.uniform(0.5, 1)

    def reply(self, reply: Reply, server: str) -> Reply:
        """*reply*, with what came before it."""
        return msgspec.structs.replace(
            reply,
            usage=reply.usage if self._usage is None else self._usage + reply.usage,
            attempts=self.attempts + reply.attempts,
            trouble=[*self.trouble, *reply.trouble],
            server=server,
        )

    def cut_short(self, server: str) -> CutShortError:
        """What a call met that is cancelled now."""
        return CutShortError(
            usage=self._usage,
            attempts=self.attempts + self._under_way,
            server=server,
            trouble=self.trouble,
            under_way=self._under_way,
        )

    def error(
        self, reason: str, *, server: str, last: EndpointError | None = None
    ) -> EndpointError:
        """Why the call failed in the end, which may be with the *last* request.

        It is not to be sent again: that was tried here.
        """
        return EndpointError(
            reason,
            usage=self._usage,
            finish=last.finish if last else "",
            status=last.status if last else 0,
            attempts=self.attempts,
            server=server,
            trouble=self.trouble[:-1] if last else self.trouble,
        )
