"""Requests to one server, with errors as sentences."""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
import time
from collections.abc import Mapping

import msgspec

from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.http1 import ChannelPool, CutError, Target
from rlm_kernel.subcalls.http1_reply import NoHTTPError, ResponseReader, Sink, TooLongError
from rlm_kernel.subcalls.refusals import Redactor

__all__ = ["Answer", "Connection", "UnreachableError"]

MAX_BODY = 64 << 20
"""Bytes of one reply."""

AT_ONCE_S = 1.0
"""A kept connection that ends within this time was closed before the request had come."""

_CUT = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class UnreachableError(EndpointError):
    """There was no server, or it went away."""


class Answer(msgspec.Struct, frozen=True):
    """What a server replied. An event stream went to the sink, and *body* is empty."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case."""

    body: bytes = b""
    streamed: bool = False


class Connection:
    """The connections to one server, kept alive between requests.

    Redirects are not followed: they would take prompts, if not the key, elsewhere.

    Parameters
    ----------
    url
        Base of the API, without a slash at its end.
    key
        Sent in the header ``Authorization``; ``"none"`` sends none.

    Raises
    ------
    UsageError
        The key cannot stand in a header.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.root = url.removesuffix("/v1")
        """Where servers have what is not of OpenAI's API, such as ``/metrics``."""

        self.redact = Redactor(key)
        self._head = "Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
        if not (key.isascii() and key.isprintable()):
            raise UsageError("the API key has characters that no key has: set it again")
        if self.redact.key:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._targets: dict[str, Target] = {}
        self._pool: ChannelPool | None = None

    async def get(self, url: str, *, seconds: float) -> Answer:
        """GET *url*, absolute. Raises `EndpointError`, and `TimeoutError` after *seconds*."""
        async with asyncio.timeout(seconds):
            return await self._request("GET", url, b"")

    async def post(self, url: str, body: bytes, sink: Sink | None = None) -> Answer:
        """POST the JSON *body* to *url*, absolute; an event stream goes to *sink*.

        Cancelling it closes the connection, by which the server knows that nobody waits.

        Raises
        ------
        UnreachableError
            The server is not there, or went away in the middle.
        EndpointError
            What came is no HTTP reply, or too long; or the URL is none.
        """
        return await self._request("POST", url, body, sink)

    async def close(self) -> None:
        """Drop all connections; requests under way fail."""
        if self._pool is not None:
            self._pool.close()

    # --- requests -----------------------------------------------------------------------------

    async def _request(
        self, method: str, url: str, body: bytes, sink: Sink | None = None
    ) -> Answer:
        target = self._targets.get(url) or self._parsed(url)
        pool = self._pool = self._pool or ChannelPool(target)
        # llama.cpp ends the connection after a stream, although it says that it keeps it: the
        # next request on it would fail.
        last = "" if sink is None else "Connection: close\r\n"
        head = (
            f"{method} {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
            f"{self._head}{last}Content-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        try:
            reader = await self._exchange(pool, head, body, sink)
        except TooLongError:
            raise EndpointError(
                f"the reply of {url} is longer than {MAX_BODY >> 20} MiB: set max_tokens",
                status=200,
            ) from None
        except NoHTTPError as error:
            raise EndpointError(
                f"what the server at {self.url} sent is no HTTP reply, because {error}: "
                "check the URL of the spec"
            ) from None
        except OSError as error:
            raise self._unreachable(error) from None
        return Answer(reader.status, reader.headers, reader.body, reader.streamed)

    async def _exchange(
        self, pool: ChannelPool, head: bytes, body: bytes, sink: Sink | None
    ) -> ResponseReader:
        """The reply, whole. Raises `OSError` and the errors of `http1`."""
        channel = await pool.take()
        used, began = channel.used, time.monotonic()
        reader = ResponseReader(MAX_BODY, sink)
        try:
            await channel.exchange(head, body, reader)
            return reader
        except CutError as error:
            if not used or error.begun or time.monotonic() - began > AT_ONCE_S:
                raise
        finally:
            pool.give(channel)
        # The server closed a kept connection just before it was used: a new one will do.
        channel = await pool.take(new=True)
        reader = ResponseReader(MAX_BODY, sink)
        try:
            await channel.exchange(head, body, reader)
            return reader
        finally:
            pool.give(channel)

    def _parsed(self, url: str) -> Target:
        try:
            target = self._targets[url] = Target(url)
        except (ValueError, UnicodeError):
            raise EndpointError(
                f"{self.url!r} is no URL that can be asked: check the spec"
            ) from None
        return target

    # --- errors -------------------------------------------------------------------------------

    def _unreachable(self, error: OSError) -> EndpointError:
        number = error.errno
        if number is None and (found := _ERRNO.search(str(error))):
            number = int(found[1])  # a name with several addresses, of which none answered
        if isinstance(error, TimeoutError):
            why = "did not accept a connection in time"
        elif number == errno.ECONNREFUSED:
            why = "refuses connections"
        elif isinstance(error, ConnectionError) or number in _CUT:
            return UnreachableError(
                f"the server at {self.url} cut the connection before its reply was whole: "
                "try again",
                retryable=True,
            )
        else:
            why = f"cannot be reached ({error.strerror or type(error).__name__})"
        return UnreachableError(
            f"the server at {self.url} {why}: check that it runs and that the URL is right",
            retryable=not isinstance(error, ssl.SSLError),
        )
