"""The record itself: events appended, committed, read back."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import Event, RunState, Stored, SubcallEnded, SubcallStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import files, prompts, schema, verification
from rlm_kernel.record.codec import compress, decompress, pack, unpack, unpack_text
from rlm_kernel.record.fault import Fault

__all__ = ["Record", "RunSummary"]

_BLOB_LEVEL = 3
_PAGE = 256
"""Rows fetched at once. A cursor left open instead would keep the log from being folded in."""

# In a temporary table: it is cheap to make, of no use to others, and needs no memory of ours.
_INDEX = (
    """
    CREATE TEMP TABLE IF NOT EXISTS by_key (
        key BLOB NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (key, seq)
    ) WITHOUT ROWID
    """,
    # What is there already came with a call that was interrupted before it could say so.
    """
    INSERT OR IGNORE INTO temp.by_key (key, seq)
    SELECT key, seq FROM asked WHERE seq > :after AND seq <= :last ORDER BY key, seq
    """,
)

_REPLY = """
    SELECT s.seq, e.seq, e.body
    FROM temp.by_key AS asked
    JOIN event AS s ON s.seq = asked.seq
    JOIN event AS e ON e.call_id = s.call_id AND e.run_id = s.run_id AND e.kind = 'SubcallEnded'
    WHERE asked.key = :key AND asked.seq > :after
        AND e.seq <= :until AND json_extract(e.body, '$.ok')
        AND NOT EXISTS (
            SELECT 1 FROM event AS j
            WHERE j.call_id = s.call_id AND j.run_id = s.run_id AND j.kind = 'SubcallJudged'
                AND j.seq <= :until AND NOT json_extract(j.body, '$.ok')
        )
    ORDER BY asked.seq
    LIMIT 1
"""

_Row = tuple[int, str, float, str, int | None, str | None, int | None, str]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run, at a glance."""

    id: str
    parent: str
    """Id of the run whose sub-call it answers; empty for the first of a tree."""

    query: str
    state: RunState
    """Where it is; of a run that a crash cut short, where it was."""

    started: float
    """Seconds since the epoch."""

    ended: float | None
    """Seconds since the epoch; ``None`` where it has no end."""

    turns: int
    tokens: int
    """Input and output, of the root and all sub-calls below."""

    subcalls: int
    response: str
    """The answer as text."""


class Record:
    """A durable log of events in one SQLite file; see `rlm_kernel.record` for its contract.

    Made by `open` or `read`. For one thread at a time. Every method raises
    `RecordError` where the file cannot be read or written.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, lock: files.WriterLock | None
    ) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = connection
        self._lock = lock
        self._events: list[_Row] = []
        self._blobs: dict[str, bytes] = {}
        self._asked: list[tuple[int, bytes]] = []
        self._indexed = 0
        """The last event whose key is in the index of this connection."""
        self._interrupted = False
        self._size = 0
        """Characters of the events that are not committed yet."""
        self._log_mover = files.LogMover(path)
        # Not asked of a record that is only read: it may be damaged just there.
        self._last = 0 if lock is None else self.last_seq()

    @classmethod
    def open(cls, path: Path | None = None) -> Record:
        """Open the record at *path* for writing; make it where there is none.

        Parameters
        ----------
        path
            ``None`` makes a new record in Jupyter's data folder.

        Raises
        ------
        RecordError
            The file is no record, of a newer version, not writable, in a folder that does not
            exist, or being written by another process. It is as it was then.
        """
        path = files.new_path() if path is None else files.real(path)
        with files.reporting(path, "open"), contextlib.ExitStack() as undo:
            if not path.parent.is_dir():
                raise Fault(f"the folder {path.parent} does not exist; make it first")
            lock = files.WriterLock(path)
            undo.callback(lock.release)
            connection = _prepared(path)
            undo.callback(connection.close)
            record = cls(path, connection, lock)
            undo.pop_all()
            return record

    @classmethod
    def read(cls, path: Path) -> Record:
        """Open the record at *path* for reading only, also while another process writes it.

        Raises
        ------
        RecordError
            There is none, it is no record, or of a newer version.
        """
        path = files.real(path)
        with files.reporting(path, "open"), contextlib.ExitStack() as undo:
            if not path.is_file():
                raise Fault("there is no such file; check its name")
            connection = files.connect_read_only(path)
            undo.callback(connection.close)
            if not schema.check(connection):
                raise Fault("it is empty; choose another file")
            record = cls(path, connection, None)
            undo.pop_all()
            return record

    def close(self) -> None:
        """Commit what was appended and let go of the file. A second call does nothing.

        Raises
        ------
        RecordError
            The commit failed; the file is closed all the same.
        """
        connection, lock = self._connection, self._lock
        if connection is None:
            return
        try:
            self.commit()
        finally:
            self._connection = None
            self._log_mover.close()
            connection.close()
            if lock is None:
                files.tidy(self.path)
            else:
                lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- writing --------------------------------------------------------------------------

    def append(self, run_id: str, event: Event, *, at: float | None = None) -> Stored:
        """Take *event* as the next one. It is in the file once `commit` has returned.

        Parameters
        ----------
        run_id
            Empty for what happens outside any run.
        at
            Seconds since the epoch; now where not given.
        """
        self._check_writable()
        at = time.time() if at is None else at
        body, blobs = pack(event)
        self._last += 1
        turn = getattr(event, "turn", None)
        usage: Usage | None = getattr(event, "usage", None)
        tokens = None if usage is None else usage.input_tokens + usage.output_tokens
        call_id = getattr(event, "call_id", None)
        kind = type(event).__name__
        self._events.append((self._last, run_id, at, kind, turn, call_id, tokens, body))
        self._size += len(body)
        if blobs:
            self._blobs.update(blobs)
            self._size += sum(map(len, blobs.values()))
        if isinstance(event, SubcallStarted) and event.key:
            self._asked.append((self._last, bytes.fromhex(event.key)))
        return Stored(self._last, run_id, at, event)

    def commit(self) -> None:
        """Write all that was appended, in one transaction.

        What it wrote outlives the process, however that ends.

        Raises
        ------
        RecordError
            Nothing of it was written, such as on a full disk. The events are kept, and the next
            commit tries them again.
        """
        if self._interrupted:
            written = self.last_seq()
            self._events = [row for row in self._events if row[0] > written]
            self._asked = [row for row in self._asked if row[0] > written]
        if not self._events:
            return
        # An exception from outside, such as a KeyboardInterrupt, may come after the commit.
        self._interrupted = True
        with self._using("write to") as connection, files.transaction(connection):
            for sha256, data in self._blobs.items():
                _insert_blob(connection, sha256, data)
            connection.executemany(
                "INSERT INTO event (seq, run_id, at_s, kind, turn, call_id, tokens, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                self._events,
            )
            connection.executemany("INSERT INTO asked (seq, key) VALUES (?, ?)", self._asked)
        self._events.clear()
        self._blobs.clear()
        self._asked.clear()
        self._log_mover.wrote(self._size)
        self._size = 0
        self._interrupted = False

    # --- the prompt -----------------------------------------------------------------------

    def has_prompt(self, sha256: str) -> bool:
        """Whether the prompt is here, whole."""
        question = "SELECT 1 FROM prompt WHERE sha256 = ?"
        with self._using("read") as connection:
            return connection.execute(question, (sha256,)).fetchone() is not None

    def prompt_writer(self, info: PromptInfo) -> prompts.PromptWriter:
        """A context manager whose ``write(bytes)`` takes the prompt piece by piece."""
        self._check_writable()
        return prompts.PromptWriter(self.path, info)

    def prompt_info(self, sha256: str) -> PromptInfo:
        """What can be told of the prompt without showing it."""
        with self._using("read") as connection:
            return prompts.find(connection, sha256)[1]

    def prompt_chunks(
        self, sha256: str, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """The prompt's bytes from *start* to before *stop*, at most 1 MiB at a time.

        UTF-8 (surrogates passed) of a ``str``, JSON of a list or dict.
        """
        with self._using("read") as connection:
            yield from prompts.chunks(connection, sha256, start, stop)

    def read_prompt(
        self, sha256: str, kind: Literal["str", "list", "dict"] | None = None
    ) -> str | list[Any] | dict[str, Any]:
        """The prompt as it was in the REPL.

        A text and a list may have the same hash, where the one is the JSON of the other: *kind*
        says which is meant. Without it, it is the one that was stored first.
        """
        with self._using("read") as connection:
            found: str | list[Any] | dict[str, Any] = prompts.load(connection, sha256, kind)
            return found

    def prompt_text(self, sha256: str, start: int, stop: int) -> str:
        """Characters ``[start, stop)`` of a prompt of kind ``str``, reading no more than needed."""
        with self._using("read") as connection:
            return prompts.text(connection, sha256, start, stop)

    # --- reading --------------------------------------------------------------------------

    def events(self, run_id: str | None = None, after_seq: int = 0) -> Iterator[Stored]:
        """Committed events in order, of one run or of all; also such as come while it goes on.

        A damaged event raises `RecordError`; start again after its number to read the rest.
        """
        while rows := self._page(run_id, after_seq):
            for seq, run, at, body in rows:
                yield Stored(seq, run, at, self._event(seq, body))
                after_seq = seq

    def _page(self, run_id: str | None, after_seq: int) -> list[tuple[int, str, float, str]]:
        one_run = "" if run_id is None else "AND run_id = :run"
        with self._using("read") as connection:
            return connection.execute(
                "SELECT seq, run_id, at_s, body FROM event"
                f" WHERE seq > :after {one_run} ORDER BY seq LIMIT {_PAGE}",
                {"after": after_seq, "run": run_id},
            ).fetchall()

    def _event(self, seq: int, body: str) -> Event:
        try:
            return unpack(body, self.blob)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"event {seq} of the record {self.path} cannot be read ({error}); "
                "read on after it, verify() says what else is damaged"
            ) from error

    def runs(self) -> list[RunSummary]:
        """All runs, child runs too, in the order in which they started."""
        with self._using("read") as connection:
            rows = connection.execute(
                "SELECT run, parent, query, state, started_s, ended_s, turns, tokens, subcalls,"
                " coalesce(response, '') FROM runs ORDER BY seq"
            ).fetchall()
        return [self._summary(row) for row in rows]

    def _summary(self, row: tuple[Any, ...]) -> RunSummary:
        run, parent, query, state, started, ended, turns, tokens, subcalls, response = row
        return RunSummary(
            id=run,
            parent=parent,
            query=unpack_text(query, self.blob),
            state=state,
            started=started,
            ended=ended,
            turns=turns,
            tokens=tokens,
            subcalls=subcalls,
            response=unpack_text(response, self.blob),
        )

    def blob(self, sha256: str) -> bytes:
        """The bytes that ``rlm:blob:SHA256`` in the body of an event refers to."""
        question = "SELECT bytes, zstd FROM blob WHERE sha256 = ?"
        with self._using("read") as connection:
            row = connection.execute(question, (sha256,)).fetchone()
            if row is None:
                raise Fault(f"the text {sha256[:12]}… is missing; verify() says what else is")
            return decompress(row[1], row[0])

    def index_replies(self) -> int:
        """Let `reply` find what was recorded so far.

        Returns the number of the last event; 0 where there is nothing to be found.
        """
        last = self.last_seq()
        with self._using("read") as connection:
            for statement in _INDEX:
                connection.execute(statement, {"after": self._indexed, "last": last})
            (found,) = connection.execute("SELECT EXISTS (SELECT 1 FROM temp.by_key)").fetchone()
        self._indexed = last
        return last if found else 0

    def reply(self, key: str, after_seq: int, until_seq: int) -> tuple[int, SubcallEnded] | None:
        """The next reply to what has this key, of those that `index_replies` saw; before it the
        number of its `SubcallStarted`.

        Calls that failed are passed over, and those whose reply was found to be no value of its
        typed sub-task.

        Parameters
        ----------
        key
            Of the `SubcallStarted`.
        after_seq
            It started later than that: 0, or the number that the reply before it came with.
        until_seq
            What was recorded later does not count.
        """
        asked = {"key": bytes.fromhex(key), "after": after_seq, "until": until_seq}
        with self._using("read") as connection:
            row = connection.execute(_REPLY, asked).fetchone()
        if row is None:
            return None
        started, ended, body = row
        event = self._event(ended, body)
        return (started, event) if isinstance(event, SubcallEnded) else None

    def last_seq(self) -> int:
        """Number of the last committed event; 0 where there is none."""
        with self._using("read") as connection:
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
            return int(last)

    def verify(self) -> list[str]:
        """What is not as it should be, a sentence each; empty where all is well.

        Every hash is derived again, every event decoded. What has a start and no end is
        reported as under way: of a record that nobody writes, it was cut short.
        """
        with self._using("read") as connection:
            return verification.verify(connection, self.blob)

    def _check_writable(self) -> None:
        if self._lock is None or self._connection is None:
            raise RecordError(f"the record {self.path} is not open for writing; open it again")

    @contextlib.contextmanager
    def _using(self, doing: str) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            raise RecordError(f"the record {self.path} is closed; open it again")
        with files.reporting(self.path, doing):
            yield self._connection


def _prepared(path: Path) -> sqlite3.Connection:
    """A connection to the record at *path*, of the newest version and found to be writable."""
    is_new = not path.exists()
    if not is_new:
        # Asked without the means to write: what is no record of ours is not touched at all.
        with contextlib.closing(files.connect_read_only(path)) as probe:
            schema.check(probe)
    with contextlib.ExitStack() as undo:
        if is_new:
            undo.callback(files.remove, path)
        connection = files.connect(path, checkpoint_pages=files.LONG_LOG_PAGES)
        undo.callback(connection.close)
        connection.execute("PRAGMA journal_mode = WAL")
        schema.migrate(connection, schema.check(connection))
        with files.transaction(connection):
            prompts.forget_unfinished(connection)
        undo.pop_all()
        return connection


def _insert_blob(connection: sqlite3.Connection, sha256: str, data: bytes) -> None:
    # Asked first: to find it there costs a hundredth of compressing it.
    if connection.execute("SELECT 1 FROM blob WHERE sha256 = ?", (sha256,)).fetchone() is None:
        connection.execute(
            "INSERT INTO blob (sha256, bytes, zstd) VALUES (?, ?, ?)",
            (sha256, len(data), compress(data, _BLOB_LEVEL)),
        )
