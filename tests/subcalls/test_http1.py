"""The HTTP client: replies of every framing, in any pieces, and connections that are kept."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import shutil
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls import http1
from rlm_kernel.subcalls.connection import Answer, Connection, UnreachableError
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.http1 import Target
from rlm_kernel.subcalls.http1_reply import NoHTTPError, ResponseReader, TooLongError

BODY = b'{"a": "\xc3\xbc"}' * 20
LIMIT = 10_000


def chunked(body: bytes, size: int, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)
    return chunks + b"0\r\n" + trailer + b"\r\n"


def plain(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join(
        [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body]
    )


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
FRAMINGS = {
    "length": plain(BODY),
    "chunks": CHUNKED + b"\r\n" + chunked(BODY, 7),
    "extensions": CHUNKED + b"\r\n" + chunked(BODY, 64, b" ;a=b", b"X-Sum: 1\r\nY: 2\r\n"),
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + plain(BODY),
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + plain(BODY),
    "gzip": plain(gzip.compress(BODY), b"Content-Encoding: gzip"),
    "deflate": plain(zlib.compress(BODY), b"Content-Encoding: deflate"),
    "no reason": plain(BODY).replace(b"200 OK", b"200"),
    "gzip in chunks": CHUNKED + b"Content-Encoding: gzip\r\n\r\n" + chunked(gzip.compress(BODY), 5),
}


def read(pieces: list[bytes], limit: int = LIMIT) -> ResponseReader:
    reader = ResponseReader(limit)
    for number, piece in enumerate(pieces, 1):
        assert reader.feed(piece) is (number == len(pieces))
    return reader


@pytest.mark.parametrize("data", FRAMINGS.values(), ids=FRAMINGS)
@given(cuts=st.lists(st.integers(1, 500), max_size=6))
def test_a_reply_is_the_same_in_whatever_pieces_it_comes(data: bytes, cuts: list[int]) -> None:
    """It is whole with its last byte, and not before; the connection can be used again."""
    places = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    reader = read([data[a:b] for a, b in itertools.pairwise(places)])

    assert (reader.status, reader.body, reader.reusable) == (200, BODY, True)


def test_a_reply_comes_whole_byte_by_byte() -> None:
    """All framings, in the smallest pieces that there are."""
    for data in FRAMINGS.values():
        assert read([bytes([byte]) for byte in data]).body == BODY


@pytest.mark.parametrize(
    ("data", "reusable"),
    [
        (plain(b"x", b"Connection: close"), False),
        (plain(b"x").replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (plain(b"x", b"Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"), True),
        (plain(b"x") + b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (plain(b""), True),
    ],
)
def test_a_connection_is_used_again_only_where_nothing_can_be_mistaken(
    data: bytes, reusable: bool
) -> None:
    """More than one reply to one request is the end of trust."""
    reader = ResponseReader(LIMIT)

    assert reader.feed(data)
    assert reader.reusable is reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 twohundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
        plain(b"not gzip", b"Content-Encoding: gzip"),
        CHUNKED + b"\r\nxyz\r\n",
        CHUNKED + b"\r\n-5\r\nabcde\r\n",
        CHUNKED + b"\r\n2\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"\r\n" + b"0" * 5000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        CHUNKED + b"\r\n0\r\nX: " + b"y" * 70_000,
    ],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    """It is not waited for what could never come."""
    with pytest.raises(NoHTTPError):
        ResponseReader(LIMIT).feed(data)


@pytest.mark.parametrize(
    "data",
    [
        plain(b"x" * (LIMIT + 1)),
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
        CHUNKED + b"\r\n" + chunked(b"x" * (LIMIT + 1), 100),
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (LIMIT + 1),
        plain(gzip.compress(b"x" * 10_000_000), b"Content-Encoding: gzip"),
    ],
)
def test_a_reply_that_is_too_long_is_an_error(data: bytes) -> None:
    """Before it is in memory, also where it was packed."""
    with pytest.raises(TooLongError):
        ResponseReader(LIMIT).feed(data)


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nas far as it goes", True),
        (plain(b"whole"), True),
        (plain(b"half")[:-1], False),
        (CHUNKED + b"\r\n2\r\nab\r\n", False),
        (b"HTTP/1.1 200 OK\r\n", False),
        (b"", False),
    ],
)
def test_the_end_of_the_connection_ends_only_a_reply_without_length(
    data: bytes, whole: bool
) -> None:
    """A half of a reply is never taken for one."""
    reader = ResponseReader(LIMIT)
    reader.feed(data)

    assert reader.end() is whole


@given(st.binary(max_size=300))
def test_any_bytes_are_a_reply_or_an_error(data: bytes) -> None:
    """Nothing else comes out of it."""
    reader = ResponseReader(100)
    try:
        reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    except (NoHTTPError, TooLongError):
        return
    assert len(reader.body) <= 100


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://h/v1", "h", "/v1"),
        ("https://h:8443/a b/ü?q=1 2", "h:8443", "/a%20b/%C3%BC?q=1%202"),
        ("http://[::1]:80/v1", "[::1]:80", "/v1"),
        ("http://bücher.example/v1", "xn--bcher-kva.example", "/v1"),
        ("http://h/a\r\nX: y", "h", "/aX:%20y"),
    ],
)
def test_a_url_becomes_host_and_path(url: str, authority: str, path: str) -> None:
    """Nothing of it can end the line that it stands in."""
    target = Target(url)

    assert (target.authority, target.path) == (authority, path)


# --- connections ----------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


async def take_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


@pytest.fixture
async def listen() -> AsyncIterator[Any]:
    """Serves each connection with a function; gives what connects there."""
    servers: list[asyncio.Server] = []
    connections: list[Connection] = []
    tasks: set[asyncio.Task[Any]] = set()

    async def start(serve: Serve, **options: Any) -> Connection:
        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(guarded, "127.0.0.1", 0, **options)
        servers.append(server)
        scheme = "https" if options.get("ssl") else "http"
        port = server.sockets[0].getsockname()[1]
        connections.append(Connection(f"{scheme}://localhost:{port}/v1", "a-key"))
        return connections[-1]

    yield start
    for connection in connections:
        await connection.close()
    for server in servers:
        server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def post(connection: Connection, body: bytes = b"{}", **options: Any) -> Answer:
    return await connection.post(f"{connection.url}/x", body, **options)


async def test_a_connection_is_kept_for_the_next_request(listen: Any) -> None:
    """One for requests one after another, one each for those at once."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while True:
            request = await take_request(reader)
            assert b"Authorization: Bearer a-key\r\n" in request
            writer.write(plain(request[-5:]))

    connection = await listen(serve)
    for _ in range(5):
        await post(connection)
    assert opened == 1
    answers = await asyncio.gather(*(post(connection, b"%05d" % n) for n in range(20)))

    assert [answer.body for answer in answers] == [b"%05d" % n for n in range(20)]
    assert 2 <= opened <= 20


async def test_a_large_request_arrives_whole(listen: Any) -> None:
    """Larger than the buffers of the system."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await take_request(reader)
        writer.write(plain(b"%d" % request.count(b"x" * 1000)))

    connection = await listen(serve, limit=1 << 26)
    answer = await post(connection, b"x" * 10_000_000)

    assert answer.body == b"10000"


async def test_a_connection_that_idled_too_long_is_not_used_again(
    listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed, too, so that the server has it no more."""
    monkeypatch.setattr(http1, "KEEPALIVE_S", 0.0)
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        mine = ended[-1]
        await take_request(reader)
        writer.write(plain(b"ok"))
        await reader.read()
        mine.set()

    connection = await listen(serve)
    await post(connection)
    async with asyncio.timeout(20):
        await ended[0].wait()
    await post(connection)

    assert len(ended) == 2


async def test_a_kept_connection_that_ends_with_the_request_is_replaced(listen: Any) -> None:
    """The server closed it just before; nothing of a reply had come."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await take_request(reader)
        writer.write(plain(b"%d" % opened))
        await take_request(reader)  # not answered

    connection = await listen(serve)

    assert (await post(connection)).body == b"1"
    assert (await post(connection)).body == b"2"
    assert opened == 2


async def test_a_new_connection_that_ends_is_an_error(listen: Any) -> None:
    """There is no reason to think that another would do better."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await take_request(reader)

    connection = await listen(serve)
    with pytest.raises(UnreachableError, match="cut the connection"):
        await post(connection)

    assert opened == 1


async def test_a_reply_before_the_request_was_read_ends_the_connection(listen: Any) -> None:
    """The rest of the request would be taken for the next one."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    connection = await listen(serve)
    for _ in range(2):
        assert (await post(connection, b"x" * 20_000_000)).status == 413

    assert opened == 2


async def test_closing_fails_the_requests_under_way(listen: Any) -> None:
    """None of them waits for ever."""
    arrived = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take_request(reader)
        arrived.set()
        await reader.read()

    connection = await listen(serve)
    under_way = asyncio.create_task(post(connection))
    await arrived.wait()
    await connection.close()
    with pytest.raises(UnreachableError):
        await under_way


async def test_what_the_reader_of_a_stream_raises_ends_the_request(listen: Any) -> None:
    """The server sees that nobody reads any more."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n")
        writer.write(b"data: x\n\n")
        await reader.read()
        gone.set()

    def sink(piece: bytes) -> bool:
        raise EndpointError(f"no use for {piece!r}")

    connection = await listen(serve)
    with pytest.raises(EndpointError, match="no use for"):
        await post(connection, sink=sink)
    async with asyncio.timeout(20):
        await gone.wait()


async def test_a_certificate_that_nobody_trusts_is_an_error_and_not_tried_again(
    listen: Any, tmp_path: Path
) -> None:
    """The key is not sent."""
    context = _self_signed(tmp_path)
    asked = False

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = bool(await reader.read(1))

    connection = await listen(serve, ssl=context)
    with pytest.raises(UnreachableError) as caught:
        await post(connection)

    assert not caught.value.retryable
    assert not asked


async def test_tls_with_a_trusted_certificate_works(
    listen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the environment names it, which is how companies trust their own."""
    context = _self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await take_request(reader)
            writer.write(plain(b"secret"))

    connection = await listen(serve, ssl=context)

    assert [(await post(connection)).body for _ in range(3)] == [b"secret"] * 3


def _self_signed(folder: Path) -> ssl.SSLContext:
    """A context for a server, with ``cert.pem`` in *folder*."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


async def test_a_name_with_several_addresses_that_all_refuse_is_told_as_one(
    unused_tcp_port: int,
) -> None:
    """``localhost`` has two, and the system's error for both has no number."""
    connection = Connection(f"http://localhost:{unused_tcp_port}/v1", "none")
    with pytest.raises(UnreachableError, match="refuses connections"):
        await post(connection)


@pytest.mark.parametrize("url", ["http://h:99999/v1", "ftp://h/v1", "http:///v1", "http://[::1/v1"])
async def test_what_is_no_url_is_an_error(url: str) -> None:
    """Before anything is asked."""
    with pytest.raises(EndpointError, match="is no URL"):
        await post(Connection(url, "none"))


def test_a_key_that_would_end_its_header_is_refused() -> None:
    """It would be a header of its own; the message does not show it."""
    with pytest.raises(UsageError, match="characters that no key has") as caught:
        Connection("http://h/v1", "abc\r\nX: y")
    assert "abc" not in str(caught.value)
