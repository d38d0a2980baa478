"""HTTP to one server, as lean as it gets, with errors as sentences.

aiohttp with pre-encoded bodies costs about 0.15 ms of CPU a request, the openai client over 2 ms:
with thousands of calls from one cell this is the difference between a busy server and a busy
kernel.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import io
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.http_errors import Redactor, checked_key
from rlm_kernel.subcalls.endpoint import EndpointError

if TYPE_CHECKING:
    import aiohttp
    import yarl

__all__ = ["Answer", "Connection", "Sink", "UnreachableError"]

KEEPALIVE_S = 3.0
"""vLLM closes idle connections after 5 s; reusing one at that moment fails."""

CONNECT_S = 30.0
MAX_BODY = 64 << 20
"""Bytes of one reply."""

LARGE = 1 << 20
"""Bytes of a request from which on it is written piece by piece, so that the loop goes on."""

_CUT = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})

Sink = Callable[[bytes], bool]
"""Takes the pieces of an event stream; True says that nothing more is needed."""


class UnreachableError(EndpointError):
    """There was no server, or it went away."""


class Answer(msgspec.Struct, frozen=True):
    """What a server replied. An event stream went to the sink, and *body* is empty."""

    status: int
    headers: Mapping[str, str]
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

        self.redact = Redactor(checked_key(key))
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.redact.key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._urls: dict[str, yarl.URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._opening: asyncio.Task[aiohttp.ClientSession] | None = None

    async def get(self, url: str, *, seconds: float) -> Answer:
        """GET *url*, absolute. Raises `EndpointError`, and `TimeoutError` after *seconds*."""
        async with asyncio.timeout(seconds):
            return await self._request("GET", url, None, None)

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

    async def is_accepted(self, *, seconds: float) -> bool:
        """Whether the server takes a connection within *seconds*; it is sent nothing."""
        url = self._urls.get(self.url) or self._parsed(self.url)
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(url.host, url.port)
        except OSError:  # a TimeoutError is one
            return False
        writer.close()
        return True

    async def close(self) -> None:
        """Drop all connections."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- requests -----------------------------------------------------------------------------

    async def _request(
        self, method: str, url: str, body: bytes | None, sink: Sink | None
    ) -> Answer:
        session = self._session or await self._open()
        try:
            try:
                return await self._exchange(session, method, url, body, sink)
            except OSError as error:
                if not _is_unsent(error):
                    raise
            # The server closed a kept connection just before it was used: a new one will do.
            return await self._exchange(session, method, url, body, sink)
        except (OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        except EndpointError:
            raise
        except Exception as error:
            if transport := self._transport_error(error):
                raise transport from None
            raise

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: bytes | None,
        sink: Sink | None,
    ) -> Answer:
        response = await session.request(
            method,
            self._urls.get(url) or self._parsed(url),
            data=body if body is None or len(body) < LARGE else io.BytesIO(body),
            # llama.cpp ends the connection after a stream, although it says that it keeps it: the
            # next request on it would fail.
            headers=None if sink is None else {"Connection": "close"},
            allow_redirects=False,
        )
        try:
            if sink is not None and response.content_type == "text/event-stream":
                await self._pour(response, sink)
                return Answer(response.status, response.headers, streamed=True)
            return Answer(response.status, response.headers, await self._read(response))
        except BaseException:
            # Releasing would keep reading a reply that nobody wants; closing cancels it.
            response.close()
            raise
        finally:
            # The end of the stream may come after [DONE]; without this the connection would stay
            # open for as long as the garbage collector likes.
            response.release()

    def _parsed(self, url: str) -> yarl.URL:
        import yarl

        try:
            parsed = yarl.URL(url)
        except ValueError:
            raise self._no_url() from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise self._no_url()
        self._urls[url] = parsed
        return parsed

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The whole body, up to `MAX_BODY` bytes."""
        length = response.content_length
        if length is not None and length <= MAX_BODY and "Content-Encoding" not in response.headers:
            return await response.read()
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_BODY:
                raise EndpointError(
                    f"the reply of {response.url} is longer than {MAX_BODY >> 20} MiB: "
                    "set max_tokens",
                    status=response.status,
                )
        return bytes(body)

    async def _pour(self, response: aiohttp.ClientResponse, sink: Sink) -> None:
        async for chunk in response.content.iter_any():
            if sink(chunk):
                return

    # --- session ------------------------------------------------------------------------------

    async def _open(self) -> aiohttp.ClientSession:
        # One task for all calls that come meanwhile; shielded, so that the first may be cancelled.
        if self._opening is None:
            self._opening = asyncio.create_task(self._make_session())
        return await asyncio.shield(self._opening)

    async def _make_session(self) -> aiohttp.ClientSession:
        # In threads: the first import takes half a second, the certificates of all authorities a
        # twentieth for each server, and the kernel has more to do.
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        secure = self.url.lower().startswith("https:")
        trusted = await asyncio.to_thread(ssl.create_default_context) if secure else True
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=self._headers,
            skip_auto_headers=("Accept", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    # --- errors -------------------------------------------------------------------------------

    def _unreachable(self, error: OSError) -> EndpointError:
        if isinstance(error, TimeoutError):
            why = "did not accept a connection in time"
        elif error.errno == errno.ECONNREFUSED:
            why = "refuses connections"
        elif isinstance(error, ConnectionError) or error.errno in _CUT or _is_unsent(error):
            return self.cut()
        else:
            why = f"cannot be reached ({error.strerror or type(error).__name__})"
        return UnreachableError(
            f"the server at {self.url} {why}: check that it runs and that the URL is right",
            retryable=not isinstance(error, ssl.SSLError),
        )

    def cut(self) -> EndpointError:
        """The error for a reply that is not whole."""
        return UnreachableError(
            f"the server at {self.url} cut the connection before its reply was whole: try again",
            retryable=True,
        )

    def _no_url(self) -> EndpointError:
        return EndpointError(f"{self.url!r} is no URL that can be asked: check the spec")

    def _transport_error(self, error: Exception) -> EndpointError | None:
        """What an error of aiohttp means; ``None`` where *error* is none."""
        import aiohttp

        if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
            return self.cut()
        if isinstance(error, aiohttp.InvalidURL):
            return self._no_url()
        if isinstance(error, aiohttp.ClientError):
            return EndpointError(
                f"what the server at {self.url} sent is no HTTP reply "
                f"({type(error).__name__}): check the URL of the spec"
            )
        return None


def _is_unsent(error: OSError) -> bool:
    """Whether the request could not be written, because the connection was closed before."""
    return error.errno is None and isinstance(error.__cause__, ConnectionError)
