"""The file of a record: its name, its connection, its one writer, and what can go wrong with it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from rlm_kernel.errors import RecordError
from rlm_kernel.record.fault import Fault

__all__ = [
    "LONG_LOG_PAGES",
    "LogMover",
    "WriterLock",
    "connect",
    "connect_read_only",
    "new_path",
    "real",
    "remove",
    "reporting",
    "tidy",
    "transaction",
]

BUSY_S = 2.0
"""Seconds to wait for another program that writes the file at this moment."""

CHECKPOINT_PAGES = 4000
"""Of 4 KiB. Moving the log into the file costs an fsync: seldom, but before it slows readers."""

LONG_LOG_PAGES = 16_000
"""What `LogMover` leaves a commit to do: where events never cease, the log has an end that no
move beside the commits reaches."""

MOVE_BYTES = 8 << 20
"""What `LogMover` lets be written between two moves, less than the log is long with its pages."""


def new_path() -> Path:
    """A name not taken yet among the records that belong to no notebook.

    Raises
    ------
    RecordError
        Their folder cannot be made.
    """
    from jupyter_core.paths import jupyter_data_dir

    folder = Path(jupyter_data_dir()) / "rlm" / "records"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RecordError(
            f"cannot make the folder {folder} for the record: {error.strerror}; "
            "set JUPYTER_DATA_DIR to a folder that can be written"
        ) from error
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return folder / f"{date}-{secrets.token_hex(4)}.rlm.sqlite"


def real(path: Path) -> Path:
    """*path* with symbolic links followed: one lock for all names of a record."""
    return Path(os.path.realpath(path))  # Path.resolve raises where links form a loop


def connect(path: Path, *, checkpoint_pages: int = CHECKPOINT_PAGES) -> sqlite3.Connection:
    """A connection that writes; makes the file where there is none. Autocommit.

    Its commits move the log into the file when it has so many pages. It may change threads,
    but is for one at a time.
    """
    connection = _connect(path, "rwc")
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that only reads, beside whoever writes."""
    connection = _connect(path, "ro")
    try:
        connection.execute("PRAGMA user_version").fetchone()
    except BaseException as error:
        connection.close()
        # Reading a log needs a file beside it. On a medium that takes none the record is at
        # rest, unless a log lies there, which would then be left out.
        refused = _primary(error) in ("SQLITE_CANTOPEN", "SQLITE_READONLY")
        if not refused or _beside(path, "-wal").exists():
            raise
        return _connect(path, "ro", "&immutable=1")
    return connection


def tidy(path: Path) -> None:
    """Let SQLite remove the empty log that a reader made beside a record at rest.

    One that may write removes it when the last closes, one that only reads does not. A log that
    holds something is left to the next writer: a reader does not change a record.
    """
    log = _beside(path, "-wal")
    with contextlib.suppress(OSError, sqlite3.Error):
        if log.stat().st_size == 0:
            with contextlib.closing(_connect(path, "rw")) as connection:
                connection.execute("PRAGMA user_version").fetchone()


def _connect(path: Path, mode: str, more: str = "") -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}{more}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing; begun as a writer, so that it cannot fail half-way as one."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has done it already after some errors, such as a full disk.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def remove(path: Path) -> None:
    """Delete a record that could not be made, with the files beside it."""
    for name in (path, _beside(path, "-wal"), _beside(path, "-shm"), _beside(path, "-journal")):
        with contextlib.suppress(OSError):
            name.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class LogMover:
    """Moves the log of a record into its file now and then, in a thread of its own.

    SQLite would do it within a commit, which then waits for two fsyncs: on a busy disk that
    holds the event loop up for seconds. What is written meanwhile goes on into the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0
        self._thread: threading.Thread | None = None

    def wrote(self, size: int) -> None:
        """About *size* bytes more were committed."""
        self._written += size
        if self._written >= MOVE_BYTES and (self._thread is None or not self._thread.is_alive()):
            self._written = 0
            self._thread = threading.Thread(target=self._move, name="rlm-record", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the move that is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _move(self) -> None:
        # A failure loses nothing: the log is kept, and the next move takes its part as well.
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(_connect(self._path, "rw")) as connection,
        ):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


class WriterLock:
    """Held by the one process that writes a record; ends with it, however that ends.

    It is an flock on a file of its own, ``NAME-lock``:

    - Not a row or SQLite's exclusive mode: the former outlives a killed process, the latter
      shuts readers out.
    - Not on the record itself: closing any descriptor of a file drops all POSIX locks that the
      process has on it, among them those that SQLite relies on.
    - Not a POSIX lock: two records in one process would not notice each other.

    Raises
    ------
    Fault
        Somebody has it.
    OSError
        The file cannot be made.
    """

    def __init__(self, record: Path) -> None:
        self._path = _beside(record, "-lock")
        self._descriptor = self._acquire()
        _held.add(self)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                    return descriptor
            except BlockingIOError:
                raise Fault(self._refusal(descriptor)) from None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """False where its last owner removed the file between our opening and locking it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _refusal(self, descriptor: int) -> str:
        owner = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        process = f"process {owner}" if owner.isdigit() else "another process"
        return f"{process} is writing it; shut that kernel down or choose another record"

    def release(self) -> None:
        """Let go of it. A second call does nothing."""
        if self._descriptor < 0:
            return
        # Removed while still locked: whoever opens the name from now on makes a new file.
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.forget()

    def forget(self) -> None:
        """Close the descriptor only."""
        _held.discard(self)
        os.close(self._descriptor)
        self._descriptor = -1


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child shares the lock, and would keep it after its parent was killed.
    for lock in tuple(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)

_REMEDIES = {
    "SQLITE_FULL": "make room on the disk and try again",
    "SQLITE_NOTADB": "choose another file",
    "SQLITE_CORRUPT": "copy the file away and save what is left with sqlite3's .recover",
    "SQLITE_READONLY": "make it writable or choose another record",
    "SQLITE_CANTOPEN": "check that the file and its folder exist and may be opened",
    "SQLITE_BUSY": "close the program that is writing it and try again",
    "SQLITE_LOCKED": "close the program that is writing it and try again",
    "SQLITE_IOERR": "check the disk and its limits, and try again",
}


@contextlib.contextmanager
def reporting(path: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite and the system say into one sentence about the record at *path*."""
    try:
        yield
    except sqlite3.Error as error:
        remedy = _REMEDIES.get(_primary(error), "open it again")
        raise RecordError(f"cannot {doing} the record {path}: {error}; {remedy}") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RecordError(
            f"cannot {doing} the record {path}: {reason}; choose another place for it"
        ) from error
    except Fault as error:
        raise RecordError(f"cannot {doing} the record {path}: {error}") from None


def _primary(error: BaseException) -> str:
    """The first two words of SQLite's extended name, such as ``SQLITE_IOERR``; else empty."""
    name: str = getattr(error, "sqlite_errorname", "") or ""
    return "_".join(name.split("_")[:2])
