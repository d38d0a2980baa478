"""Replies of HTTP/1.1, out of bytes that come in any pieces. Everything is bounded.

Source: RFC 9112 (HTTP/1.1), RFC 9110 (semantics).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from enum import Enum, auto

__all__ = ["NoHTTPError", "ResponseReader", "Sink", "TooLongError"]

MAX_HEAD = 64 << 10
MAX_LINE = 1 << 10
"""Bytes of the line that announces a chunk."""

Sink = Callable[[bytes], bool]
"""Takes the pieces of an event stream; True says that nothing more is needed."""


class NoHTTPError(Exception):
    """What a server sent is no HTTP reply."""


class TooLongError(Exception):
    """A reply is longer than what is taken."""


class _State(Enum):
    HEAD = auto()
    BODY = auto()
    """A number of bytes that is known."""

    TO_THE_END = auto()
    """Until the connection ends."""

    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    DONE = auto()


class ResponseReader:
    """Takes one reply out of bytes that come in any pieces.

    Parameters
    ----------
    limit
        Bytes of the body; more raise `TooLongError`.
    sink
        Gets the body of a reply with status 200 that is an event stream.
    """

    def __init__(self, limit: int, sink: Sink | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By name in lower case; of several with one name the last."""

        self.streamed = False
        self.reusable = False
        """Whether the connection may be used again after it."""

        self._limit = limit
        self._sink = sink
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._unpack: Callable[[bytes, int], bytes] | None = None

    @property
    def begun(self) -> bool:
        return bool(self._buffer or self.status)

    @property
    def body(self) -> bytes:
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed(self, data: bytes) -> bool:
        """Take *data*; whether the reply is whole.

        Raises
        ------
        NoHTTPError, TooLongError
        """
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        while data:
            if self._state is _State.DONE:
                self.reusable = False  # more than was asked for
                break
            rest = _STEPS[self._state](self, data)
            if rest is None:
                self._buffer = data
                break
            data = rest
        return self._state is _State.DONE

    def end(self) -> bool:
        """The connection ended; whether the reply is whole."""
        return self._state in (_State.DONE, _State.TO_THE_END)

    # Each step takes what it can of the data and returns the rest; None waits for more.

    def _head(self, data: bytes) -> bytes | None:
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD:
            if len(data) > MAX_HEAD:
                raise NoHTTPError("its head is too long")
            if not data.startswith(b"HTTP/1."[: len(data)]):
                raise NoHTTPError("it does not begin as one")
            return None
        lines = data[:end].decode("latin-1").split("\r\n")
        found = _STATUS.match(lines[0])
        if found is None:
            raise NoHTTPError("its first line is none")
        rest = data[end + 4 :]
        status = int(found[2])
        if 100 <= status < 200 and status != 101:
            return rest  # an interim reply; the final one follows
        self.status = status
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise NoHTTPError("a header has no colon")
            self.headers[name.lower()] = value.strip()
        self._begin_body(keeps=found[1] == "1")
        return rest

    def _begin_body(self, *, keeps: bool) -> None:
        headers = self.headers
        connection = headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (keeps or "keep-alive" in connection)
        kind = headers.get("content-type", "")
        self.streamed = self._sink is not None and kind.startswith("text/event-stream")
        self._unpack = _unpacker(headers.get("content-encoding", ""))
        if self.status in (101, 204, 304):
            self._state = _State.DONE
        elif "transfer-encoding" in headers:
            if headers["transfer-encoding"].lower() != "chunked":
                raise NoHTTPError("its transfer encoding is not known")
            self._state = _State.CHUNK_SIZE
        elif "content-length" in headers:
            length = headers["content-length"]
            if not (length.isascii() and length.isdigit() and len(length) < 16):
                raise NoHTTPError("its length is no number")
            self._left = int(length)
            if self._left > self._limit:
                raise TooLongError
            self._state = _State.BODY if self._left else _State.DONE
        else:
            self.reusable = False
            self._state = _State.TO_THE_END

    def _in_body(self, data: bytes) -> bytes:
        piece = data[: self._left]
        self._left -= len(piece)
        self._take(piece)
        if not self._left and self._state is _State.BODY:
            self._state = _State.DONE
        return data[len(piece) :]

    def _to_the_end(self, data: bytes) -> bytes:
        self._take(data)
        return b""

    def _chunk_size(self, data: bytes) -> bytes | None:
        end = data.find(b"\r\n")
        if end < 0 or end > MAX_LINE:
            if len(data) > MAX_LINE:
                raise NoHTTPError("a chunk begins with no size")
            return None
        found = _CHUNK.match(data[:end])
        if found is None:
            raise NoHTTPError("a chunk begins with no size")
        self._left = int(found[1], 16)
        self._state = _State.CHUNK if self._left else _State.TRAILER
        return data[end + 2 :]

    def _in_chunk(self, data: bytes) -> bytes:
        rest = self._in_body(data)
        if not self._left and self._state is _State.CHUNK:
            self._state = _State.CHUNK_END
        return rest

    def _chunk_end(self, data: bytes) -> bytes | None:
        if len(data) < 2:
            return None
        if not data.startswith(b"\r\n"):
            raise NoHTTPError("a chunk has another length than it says")
        self._state = _State.CHUNK_SIZE
        return data[2:]

    def _trailer(self, data: bytes) -> bytes | None:
        end = data.find(b"\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                raise NoHTTPError("its trailer is too long")
            return None
        if end == 0:
            self._state = _State.DONE
        return data[end + 2 :]

    def _take(self, piece: bytes) -> None:
        if self._unpack is not None:
            piece = self._unpack(piece, self._limit + 1)
        self._size += len(piece)
        if self.streamed and self._sink is not None:
            if self._sink(piece):
                self.reusable = False
                self._state = _State.DONE
            return
        if self._size > self._limit:
            raise TooLongError
        self._pieces.append(piece)


_STATUS = re.compile(r"HTTP/1\.([01]) ([1-5]\d\d)(?: |$)")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})[ \t]*(?:;|$)")
_STEPS: Mapping[_State, Callable[[ResponseReader, bytes], bytes | None]] = {
    _State.HEAD: ResponseReader._head,
    _State.BODY: ResponseReader._in_body,
    _State.TO_THE_END: ResponseReader._to_the_end,
    _State.CHUNK_SIZE: ResponseReader._chunk_size,
    _State.CHUNK: ResponseReader._in_chunk,
    _State.CHUNK_END: ResponseReader._chunk_end,
    _State.TRAILER: ResponseReader._trailer,
}


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes] | None:
    """Unpacks a body that came packed although nobody asked for that, as some proxies do."""
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise NoHTTPError("its encoding is not known")
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def unpack(data: bytes, most: int) -> bytes:
        try:
            return unpacking.decompress(data, most)
        except zlib.error:
            raise NoHTTPError("its body cannot be unpacked") from None

    return unpack
