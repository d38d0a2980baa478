"""The connections to a server: kept, replaced, ended; TLS; URLs and keys that cannot be."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.connection import Answer, Connection, UnreachableError


def plain(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join(
        [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body]
    )


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

    async def start(serve: Any, **options: Any) -> Connection:
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
    await connection.close()


@pytest.mark.parametrize("url", ["http://h:99999/v1", "ftp://h/v1", "http:///v1", "http://[::1/v1"])
async def test_what_is_no_url_is_an_error(url: str) -> None:
    """Before anything is asked."""
    connection = Connection(url, "none")
    with pytest.raises(EndpointError, match="is no URL"):
        await post(connection)
    await connection.close()


def test_a_key_that_would_end_its_header_is_refused() -> None:
    """It would be a header of its own; the message does not show it."""
    with pytest.raises(UsageError, match="characters that no key has") as caught:
        Connection("http://h/v1", "abc\r\nX: y")
    assert "abc" not in str(caught.value)
