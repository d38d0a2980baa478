"""``P`` in the record: once, in chunks that are compressed each for itself.

A chunk is 1 MiB of the prompt's bytes (UTF-8 of a ``str`` with surrogates
passed, JSON of a list or dict), so that any range is read without the rest
and memory stays bounded while it is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlm_kernel.cells import PromptInfo
from rlm_kernel.record import files
from rlm_kernel.record.codec import compress, decompress
from rlm_kernel.record.fault import Fault
from rlm_kernel.text import escape_surrogates

__all__ = [
    "CHUNK",
    "PromptWriter",
    "chunks",
    "digest",
    "find",
    "forget_unfinished",
    "load",
    "text",
]

CHUNK = 1 << 20
"""Bytes."""

_LEVEL = 1
"""Of zstd: P is the largest thing that is ever written, and somebody waits for it."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that do not start a character."""


class PromptWriter:
    """Takes the bytes of one prompt, in pieces of any size. Use it as a context manager.

    Nobody sees the prompt before the end of the block, when its hash was
    found right; after an error nothing of it is left.

    It has a connection of its own: pieces may come over many ticks of an
    event loop, or be written from another thread, while events go on being
    appended and committed.

    Parameters
    ----------
    path
        Of the record, which must be open for writing until the end.
    info
        Its hash, kind and (of a ``str``) its characters are checked.

    Raises
    ------
    RecordError
        From any of its methods where the record cannot be written, and at the end of the block
        where the bytes were not those of *info*.
    """

    def __init__(self, path: Path, info: PromptInfo) -> None:
        self._path = path
        self._info = info
        # Drawn, not counted: two writers in one record need not know of each other.
        self._id = secrets.randbits(62)
        self._hash = hashlib.sha256()
        self._rest = bytearray()
        self._bytes = self._chars = self._chunks = 0
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        with files.reporting(self._path, "write a prompt to"):
            self._connection = files.connect(self._path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection = self._open_connection()
        try:
            with files.reporting(self._path, "write a prompt to"):
                if kind is None:
                    self._finish(connection)
        except BaseException as failure:
            kind = type(failure)
            raise
        finally:
            if kind is not None:
                self._discard(connection)
            self._connection = None
            connection.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append *data*. Raises `RecordError`."""
        connection = self._open_connection()
        view = memoryview(data)
        with files.reporting(self._path, "write a prompt to"):
            while view:
                taken = view[: CHUNK - len(self._rest)]
                view = view[len(taken) :]
                self._rest += taken
                if len(self._rest) == CHUNK:
                    self._store(connection)

    def _store(self, connection: sqlite3.Connection) -> None:
        chunk = bytes(self._rest)
        self._rest.clear()
        self._hash.update(chunk)
        # Each chunk is a transaction: the write lock is held for a moment, not until the end.
        connection.execute(
            "INSERT INTO prompt_chunk (prompt_id, n, start_char, bytes, zstd)"
            " VALUES (?, ?, ?, ?, ?)",
            (self._id, self._chunks, self._chars, len(chunk), compress(chunk, _LEVEL)),
        )
        self._chunks += 1
        self._bytes += len(chunk)
        self._chars += len(chunk if chunk.isascii() else chunk.translate(None, _CONTINUATION))

    def _finish(self, connection: sqlite3.Connection) -> None:
        if self._rest:
            self._store(connection)
        self._check()
        with files.transaction(connection):
            self._publish(connection)

    def _publish(self, connection: sqlite3.Connection) -> None:
        (stored,) = connection.execute(
            "SELECT count(*) FROM prompt_chunk WHERE prompt_id = ?", (self._id,)
        ).fetchone()
        if stored != self._chunks:
            raise Fault("it was closed before the prompt was written; open it again")
        info = self._info
        inserted = connection.execute(
            "INSERT INTO prompt"
            " (id, sha256, kind, chars, items, bytes, chunks, source, preview)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sha256) DO NOTHING",
            (
                *(self._id, info.sha256, info.kind, info.chars, info.items),
                *(self._bytes, self._chunks),
                *map(escape_surrogates, (info.source, info.preview)),
            ),
        ).rowcount
        if not inserted:  # it was there already, or another writer came first
            connection.execute("DELETE FROM prompt_chunk WHERE prompt_id = ?", (self._id,))

    def _check(self) -> None:
        info = self._info
        if self._hash.hexdigest() != info.sha256:
            raise Fault(
                f"its {self._bytes:,} bytes do not have the announced SHA-256 {info.sha256[:12]}…; "
                "load the prompt again"
            )
        if info.kind == "str" and self._chars != info.chars:
            raise Fault(
                f"it has {self._chars:,} characters and {info.chars:,} were announced; "
                "load the prompt again"
            )

    def _discard(self, connection: sqlite3.Connection) -> None:
        # What cannot be deleted now is invisible, and goes when the record is next opened.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("DELETE FROM prompt_chunk WHERE prompt_id = ?", (self._id,))

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise Fault("a prompt is written inside the writer's with block only; enter it")
        return self._connection


def forget_unfinished(connection: sqlite3.Connection) -> None:
    """Delete chunks that a writer left when it was killed. Only for the one who has the lock."""
    connection.execute(
        "DELETE FROM prompt_chunk WHERE prompt_id IN"
        " (SELECT DISTINCT prompt_id FROM prompt_chunk EXCEPT SELECT id FROM prompt)"
    )


def find(connection: sqlite3.Connection, sha256: str) -> tuple[int, PromptInfo]:
    """Its row's id and what is told of it. Raises `Fault` where it is not there."""
    row = connection.execute(
        "SELECT id, kind, chars, items, sha256, preview, source FROM prompt WHERE sha256 = ?",
        (sha256,),
    ).fetchone()
    if row is None:
        raise Fault(f"it holds no prompt {sha256[:12]}…; load the prompt into this record")
    return row[0], PromptInfo(*row[1:])


def chunks(
    connection: sqlite3.Connection, sha256: str, start: int = 0, stop: int | None = None
) -> Iterator[bytes]:
    """The bytes of a prompt from *start* to before *stop*, in pieces of at most `CHUNK`."""
    prompt_id, _ = find(connection, sha256)
    (size,) = connection.execute("SELECT bytes FROM prompt WHERE id = ?", (prompt_id,)).fetchone()
    stop = size if stop is None else min(stop, size)
    at = start
    while at < stop:
        n, skip = divmod(at, CHUNK)
        piece = _chunk(connection, prompt_id, n)[skip : skip + stop - at]
        yield piece
        at += len(piece)


def _chunk(connection: sqlite3.Connection, prompt_id: int, n: int) -> bytes:
    row = connection.execute(
        "SELECT bytes, zstd FROM prompt_chunk WHERE prompt_id = ? AND n = ?", (prompt_id, n)
    ).fetchone()
    if row is None or not row[0]:
        raise Fault(f"chunk {n} of a prompt is missing; load the prompt into a new record")
    return decompress(row[1], row[0])


def load(connection: sqlite3.Connection, sha256: str, kind: str | None = None) -> Any:
    """The prompt as a Python value; *kind* is how its bytes are read, as stored if not given."""
    _, info = find(connection, sha256)
    decoded = b"".join(chunks(connection, sha256)).decode("utf-8", "surrogatepass")
    # Not msgspec: JSON of a list may hold escapes of lone surrogates, which only this one reads.
    return decoded if (kind or info.kind) == "str" else json.loads(decoded)


def text(connection: sqlite3.Connection, sha256: str, start: int, stop: int) -> str:
    """Characters ``[start, stop)`` of a prompt of kind ``str``, reading only their chunks."""
    prompt_id, _ = find(connection, sha256)
    rows = connection.execute(
        "SELECT n, start_char FROM prompt_chunk WHERE prompt_id = ? AND start_char < ? AND n >="
        " (SELECT coalesce(max(n), 0) FROM prompt_chunk WHERE prompt_id = ? AND start_char <= ?)"
        " ORDER BY n",
        (prompt_id, stop, prompt_id, start),
    ).fetchall()
    if not rows or start >= stop:
        return ""
    data = b"".join(_chunk(connection, prompt_id, n) for n, _ in rows)
    # A chunk may begin inside a character, which then counts to the chunk where it starts.
    first = len(data) - len(data.lstrip(_CONTINUATION))
    last = rows[-1][0]
    ending = b"" if _is_last(connection, prompt_id, last) else _tail(connection, prompt_id, last)
    decoded = (data[first:] + ending).decode("utf-8", "surrogatepass")
    return decoded[start - rows[0][1] : stop - rows[0][1]]


def _is_last(connection: sqlite3.Connection, prompt_id: int, n: int) -> bool:
    row = connection.execute(
        "SELECT 1 FROM prompt_chunk WHERE prompt_id = ? AND n = ?", (prompt_id, n + 1)
    ).fetchone()
    return row is None


def _tail(connection: sqlite3.Connection, prompt_id: int, n: int) -> bytes:
    """The bytes at the start of the next chunk that end the last character of chunk *n*."""
    head = _chunk(connection, prompt_id, n + 1)[:3]
    return head[: len(head) - len(head.lstrip(_CONTINUATION))]


def digest(connection: sqlite3.Connection, sha256: str) -> str:
    """SHA-256 of what is stored under *sha256*."""
    found = hashlib.sha256()
    for chunk in chunks(connection, sha256):
        found.update(chunk)
    return found.hexdigest()
