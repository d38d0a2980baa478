"""Whether a record is what it should be: everything that was derived is derived again."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator

import msgspec

from rlm_kernel.engine.events import Event, RunStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import prompts
from rlm_kernel.record.codec import Fetch, decompress, unpack

__all__ = ["verify"]

_UNREADABLE = (RecordError, msgspec.DecodeError, UnicodeDecodeError)

_Check = Callable[[sqlite3.Connection, Fetch], Iterator[str]]


def verify(connection: sqlite3.Connection, fetch: Fetch) -> list[str]:
    """A sentence for each thing that is wrong with the record, or under way in it.

    The file is looked at as it is at one moment, whatever is written meanwhile.
    """
    connection.execute("BEGIN")
    try:
        return [problem for check in _CHECKS for problem in _problems(check, connection, fetch)]
    finally:
        connection.execute("ROLLBACK")


def _problems(check: _Check, connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    try:
        yield from check(connection, fetch)
    except sqlite3.DatabaseError as error:
        yield f"the file is damaged: {error}"


def _file(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    for (found,) in connection.execute("PRAGMA quick_check"):
        if found != "ok":
            yield f"the file is damaged: {found}"


def _events(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    expected = 1
    for seq, *columns, body in connection.execute(
        "SELECT seq, kind, turn, call_id, tokens, body FROM event ORDER BY seq"
    ):
        if seq != expected:
            yield f"events {expected} to {seq - 1} are missing"
        expected = seq + 1
        try:
            event = unpack(body, fetch)
        except _UNREADABLE as error:
            yield f"event {seq} cannot be read: {error}"
            continue
        if columns != _columns(event):
            yield f"event {seq} and its columns disagree"


def _columns(event: Event) -> list[object]:
    usage = getattr(event, "usage", None)
    return [
        type(event).__name__,
        getattr(event, "turn", None),
        getattr(event, "call_id", None),
        None if usage is None else usage.tokens,
    ]


def _blobs(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    for sha256, size, zstd in connection.execute("SELECT sha256, bytes, zstd FROM blob"):
        try:
            found = hashlib.sha256(decompress(zstd, size)).hexdigest()
        except RecordError as error:
            yield f"text {sha256[:12]}… cannot be read: {error}"
            continue
        if found != sha256:
            yield f"text {sha256[:12]}… is not the one that its hash names"


def _prompts(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    for (sha256,) in connection.execute("SELECT sha256 FROM prompt ORDER BY id").fetchall():
        try:
            found = prompts.digest(connection, sha256)
        except RecordError as error:
            yield f"prompt {sha256[:12]}… cannot be read: {error}"
            continue
        if found != sha256:
            yield f"prompt {sha256[:12]}… is not the one that its hash names"
    (unfinished,) = connection.execute(
        "SELECT count(DISTINCT prompt_id) FROM prompt_chunk"
        " WHERE prompt_id NOT IN (SELECT id FROM prompt)"
    ).fetchone()
    if unfinished:
        yield f"the writing of {_counted(unfinished, 'prompt')} is under way"


def _prompts_of_runs(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    """Only of first runs: the prompt of a child run is that of its sub-call."""
    for run_id, body in connection.execute(
        "SELECT run_id, body FROM event WHERE kind = 'RunStarted' AND call_id IS NULL ORDER BY seq"
    ):
        try:
            event = unpack(body, fetch)
        except _UNREADABLE:  # said already
            continue
        if isinstance(event, RunStarted) and not event.parent_call_id:
            question = "SELECT 1 FROM prompt WHERE sha256 = ?"
            if connection.execute(question, (event.prompt.sha256,)).fetchone() is None:
                yield f"the prompt of run {run_id} is not in the record"


def _runs(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    for run_id, state, started, ended in connection.execute(
        "SELECT run_id, (SELECT state FROM runs WHERE run = run_id),"
        " sum(kind = 'RunStarted'), sum(kind = 'RunEnded') FROM event"
        " WHERE kind IN ('RunStarted', 'RunEnded') AND call_id IS NULL"
        " GROUP BY run_id ORDER BY min(seq)"
    ):
        if started == 1 and not ended:
            yield f"run {run_id} is under way: {state}"
        elif started != 1 or ended != 1:
            yield f"run {run_id} has {_counted(started, 'start')} and {_counted(ended, 'end')}"


def _cells(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    for run_id, turn, started, ended in connection.execute(
        "SELECT run_id, turn, sum(kind = 'TurnExecuting') AS started,"
        " sum(kind = 'TurnExecuted') AS ended"
        " FROM event WHERE kind IN ('TurnExecuting', 'TurnExecuted') AND call_id IS NULL"
        " GROUP BY run_id, turn HAVING started <> ended ORDER BY min(seq)"
    ):
        if started == ended + 1:
            yield f"the cell of turn {turn} of run {run_id} is under way"
        else:
            yield (
                f"the cell of turn {turn} of run {run_id} has {_counted(started, 'start')}"
                f" and {_counted(ended, 'end')}"
            )


def _subcalls(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    """One sentence for all that are under way in a run: there may be thousands."""
    under_way: dict[str, list[str]] = {}
    for run_id, call_id, started, ended in connection.execute(
        "SELECT run_id, call_id, sum(kind = 'SubcallStarted') AS started,"
        " sum(kind = 'SubcallEnded') AS ended FROM event WHERE call_id IS NOT NULL"
        " GROUP BY call_id, run_id HAVING started <> 1 OR ended <> 1 ORDER BY min(seq)"
    ):
        if started == 1 and not ended:
            under_way.setdefault(run_id, []).append(call_id)
        else:
            ends = _counted(ended, "end")
            yield f"sub-call {call_id} has {_counted(started, 'start')} and {ends}"
    for run_id, calls in under_way.items():
        where = f"of run {run_id}" if run_id else "outside any run"
        more = ", …" if len(calls) > 3 else ""
        many = "sub-call is" if len(calls) == 1 else "sub-calls are"
        yield f"{len(calls):,} {many} under way {where}: {', '.join(calls[:3])}{more}"


def _asked(connection: sqlite3.Connection, fetch: Fetch) -> Iterator[str]:
    """Every key in its place, and no other. Records of version 1 have none."""
    if connection.execute("PRAGMA user_version").fetchone()[0] < 2:
        return
    there = connection.execute("SELECT lower(hex(key)), seq FROM asked ORDER BY seq").fetchall()
    expected = connection.execute(
        "SELECT json_extract(body, '$.key') AS key, seq FROM event"
        " WHERE kind = 'SubcallStarted' AND json_valid(body) AND key <> '' ORDER BY seq"
    ).fetchall()
    if there != expected:
        yield "the table asked does not hold what the events say"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_CHECKS: tuple[_Check, ...] = (
    _file,
    _events,
    _blobs,
    _prompts,
    _prompts_of_runs,
    _runs,
    _cells,
    _subcalls,
    _asked,
)
