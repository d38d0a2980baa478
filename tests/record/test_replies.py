"""Records of the first version are migrated, and its sub-calls read as before."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rlm_kernel import load_record
from rlm_kernel.engine.events import SubcallEnded, SubcallJudged, SubcallStarted
from rlm_kernel.record import Record, schema
from tests.record import samples
from tests.record.samples import RUN


@pytest.fixture
def first_version(path: Path) -> Path:
    """A record as version 1 wrote it: with every field of a sub-call, and without `asked`."""
    raw = sqlite3.connect(path)
    for statement in schema.MIGRATIONS[0]:
        raw.execute(statement)
    raw.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
    raw.execute("PRAGMA user_version = 1")
    for seq, event in enumerate(samples.subcall("call-1"), start=1):
        kind = type(event).__name__
        body = msgspec.json.encode({"event": kind} | msgspec.structs.asdict(event))
        turn, usage = getattr(event, "turn", None), getattr(event, "usage", None)
        tokens = None if usage is None else usage.tokens
        row = (seq, RUN, 1.0, kind, turn, "call-1", tokens, body.decode())
        raw.execute("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    raw.commit()
    raw.close()
    return path


def rows(path: Path) -> list[tuple[object, ...]]:
    raw = sqlite3.connect(path)
    found = raw.execute(
        "SELECT call, state, response, error, attempts, batch, place, child_run, cached, queued_s,"
        " first_token_s, server, trouble, task, verdict, retry_of FROM subcalls"
    ).fetchall()
    raw.close()
    return found


def test_a_record_of_version_1_is_read_as_it_is(first_version: Path) -> None:
    before = first_version.read_bytes()
    with load_record(first_version) as record:
        assert [stored.event for stored in record.events()] == list(samples.subcall("call-1"))
        assert record.verify() == []
    assert first_version.read_bytes() == before


def test_a_record_of_version_1_is_migrated_when_it_is_written(first_version: Path) -> None:
    with Record.open(first_version) as record:
        for event in samples.subcall("call-2"):
            record.append(RUN, event)
        record.commit()
        assert record.index_replies() == 0
        assert record.verify() == []

    one, two = rows(first_version)
    assert one[1:] == two[1:]
    assert one == (
        *("call-1", "done", "48213", "", 1, "b1", 0, "", 0, 0.0, None, "", "[]"),
        *(None, None, ""),
    )


def test_the_view_shows_how_a_sub_call_went(record: Record) -> None:
    start, end = samples.subcall("call-1")
    assert isinstance(start, SubcallStarted)
    assert isinstance(end, SubcallEnded)
    params = msgspec.structs.replace(start.params, task="label")
    events = [
        msgspec.structs.replace(start, params=params, queued_s=0.5, retry_of="call-0", index=3),
        msgspec.structs.replace(
            end, attempts=2, server="http://a/v1", first_token_s=0.25, trouble=["b is down"]
        ),
        SubcallJudged(call_id="call-1", task="label", ok=False, reason="no choice"),
        SubcallStarted(call_id="call-2", kind="llm", prompt="x", model="m"),
        SubcallEnded(call_id="call-2", ok=True, response="y", attempts=0, cached=True),
        SubcallJudged(call_id="call-2", task="label", ok=True),
    ]
    for event in events:
        record.append(RUN, event)
    record.commit()

    one, two = rows(record.path)
    assert one[4:] == (
        *(2, "b1", 3, "", 0, 0.5, 0.25, "http://a/v1", '["b is down"]'),
        *("label", "no choice", "call-0"),
    )
    assert two[4:] == (0, "", 0, "", 1, 0.0, None, "", "[]", None, "ok", "")


def ask(record: Record, call_id: str, key: str, text: str) -> None:
    record.append(RUN, SubcallStarted(call_id=call_id, kind="llm", prompt="x", model="m", key=key))
    record.append(RUN, SubcallEnded(call_id=call_id, ok=True, response=text))


def test_replies_are_found_in_the_order_in_which_their_calls_started(record: Record) -> None:
    """Whichever of them ended first."""
    key = "ab" * 16
    for number in (1, 2):
        record.append(
            RUN, SubcallStarted(call_id=f"{number}", kind="llm", prompt="x", model="m", key=key)
        )
    for number in (2, 1):
        record.append(RUN, SubcallEnded(call_id=f"{number}", ok=True, response=f"r{number}"))
    record.commit()
    assert record.index_replies() == 4
    ask(record, "3", "cd" * 16, samples.LONG)
    record.commit()
    assert record.reply("cd" * 16, 0, record.last_seq()) is None
    assert record.index_replies() == 6

    def texts(key: str, until: int) -> list[str]:
        found, texts = record.reply(key, 0, until), []
        while found is not None:
            started, reply = found
            texts.append(reply.response)
            found = record.reply(key, started, until)
        return texts

    assert texts(key, record.last_seq()) == ["r1", "r2"]
    assert texts(key, 3) == ["r2"]
    assert texts("cd" * 16, record.last_seq()) == [samples.LONG]
    assert texts("ef" * 16, record.last_seq()) == []


def test_an_interrupt_while_replies_are_indexed_leaves_them_to_be_found(record: Record) -> None:
    """Between any two steps of it: what is indexed already does not fail the next call."""
    key = "ab" * 16
    ask(record, "1", key, "r1")
    record.commit()
    assert record._connection is not None

    class Interrupting:
        """The connection, until its *left* statements were executed."""

        def __init__(self, connection: sqlite3.Connection, left: int) -> None:
            self.connection, self.left = connection, left

        def execute(self, *statement: Any) -> sqlite3.Cursor:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return self.connection.execute(*statement)

    connection = record._connection
    for statements in range(4):
        record._connection = cast("sqlite3.Connection", Interrupting(connection, statements))
        with pytest.raises(KeyboardInterrupt):
            record.index_replies()
    record._connection = connection

    assert record.index_replies() == 2
    found = record.reply(key, 0, 2)
    assert found is not None
    assert found[1].response == "r1"


def test_a_late_reply_is_found_in_as_many_steps_as_an_early_one(record: Record) -> None:
    """Ten thousand samples of one question are not sought by counting from the first."""
    key = "ab" * 16
    for number in range(500):
        ask(record, str(number), key, str(number))
    record.commit()
    until = record.index_replies()
    assert record._connection is not None
    steps = [0]

    def count() -> None:
        steps[-1] += 1

    record._connection.set_progress_handler(count, 1)
    started = 0
    for number in range(500):
        found = record.reply(key, started, until)
        assert found is not None
        started, reply = found
        assert reply.response == str(number)
        steps.append(0)

    assert max(steps) <= 2 * steps[0]


def test_an_index_that_is_not_what_the_events_say_is_reported(record: Record) -> None:
    ask(record, "1", "ab" * 16, "r1")
    record.commit()
    assert record.verify() == []

    with sqlite3.connect(record.path) as raw:
        raw.execute("DELETE FROM asked")
    raw.close()
    assert record.verify() == ["the table asked does not hold what the events say"]
