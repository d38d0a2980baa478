"""Whether and when a request that failed is sent again, by the scheduler.

This serves the endpoints that send one request for a call and fail with it: the embedded model,
and one that a program brings. A fleet, which every spec of a server is, sends again by itself, with
servers to choose from and to wait for (`rlm_kernel.subcalls.fleet.journey`); its errors are final
here.
"""

from __future__ import annotations

import random

import msgspec

from rlm_kernel.subcalls.endpoint import EndpointError

__all__ = ["Retry"]


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """When a request that failed is sent again, if the failure may pass."""

    attempts: int = 3
    """Requests in all."""

    base_s: float = 0.5
    """Wait before the second request; doubled before each further one, with jitter."""

    longest_s: float = 60.0
    """A server that asks for a longer wait is not waited for."""

    def wait(self, error: EndpointError, attempt: int, sent: int) -> float:
        """Seconds until the next attempt.

        Parameters
        ----------
        error
            How the last one failed.
        attempt
            Its number, from 1.
        sent
            Requests so far: an endpoint with several servers sends more than one in an attempt.

        Raises
        ------
        EndpointError
            There is no next one.
        """
        if not error.retryable:
            raise error
        if attempt >= self.attempts:
            raise _final(error, f"({sent} attempts)")
        wait = self._seconds(attempt, error.retry_after)
        if wait > self.longest_s:
            raise _final(error, f"(it asks to wait {wait:,.0f} s)")
        return wait

    def _seconds(self, attempt: int, asked: float | None) -> float:
        if asked is not None:
            return asked
        grown: float = self.base_s * 2 ** (attempt - 1)
        return min(self.longest_s, grown) * random.uniform(0.5, 1)


def _final(error: EndpointError, why: str) -> EndpointError:
    return EndpointError(f"{error.reason} {why}", finish=error.finish, server=error.server)
