"""Events are appended, committed and read back; views read as tables."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from rlm_kernel import load_record
from rlm_kernel.engine.events import (
    Event,
    RunStarted,
    SubcallStarted,
    TurnDecided,
    TurnObserved,
    TurnStarted,
)
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record, files
from tests.record import samples
from tests.record.samples import RUN


def fill(record: Record, events: list[Event], run_id: str = RUN) -> None:
    for event in events:
        record.append(run_id, event)
    record.commit()


def put_prompt(record: Record, prompt: str = samples.LONG) -> None:
    with record.prompt_writer(samples.prompt_info(prompt)) as writer:
        writer.write(samples.prompt_bytes(prompt))


def test_events_come_back_in_order_with_numbers_from_1_without_gaps(record: Record) -> None:
    events = samples.whole_run()
    stored = [record.append(RUN, event, at=100.0 + n) for n, event in enumerate(events)]
    record.commit()

    assert list(record.events()) == stored
    assert [s.seq for s in stored] == list(range(1, len(events) + 1))


def test_all_kinds_of_event_are_read_from_a_file_opened_again(path: Path) -> None:
    with Record.open(path) as record:
        stored = [record.append(RUN, event) for event in samples.one_of_each()]

    with Record.read(path) as record:
        assert repr(list(record.events())) == repr(stored)


def test_load_record_takes_a_str_and_reads_beside_the_writer(record: Record) -> None:
    fill(record, [TurnStarted(turn=1)])

    with load_record(str(record.path)) as loaded:
        assert list(loaded.events()) == list(record.events())
        with pytest.raises(RecordError):
            loaded.append(RUN, TurnStarted(turn=2))


def test_a_reader_leaves_a_record_at_rest_as_it_was(path: Path) -> None:
    with Record.open(path) as record:
        fill(record, [TurnStarted(turn=1)])
    before = path.read_bytes(), path.stat().st_mtime_ns

    with load_record(path) as loaded, load_record(path) as other:
        assert len(list(loaded.events())) == len(list(other.events())) == 1

    assert list(path.parent.iterdir()) == [path]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_reader_that_ends_takes_nothing_from_a_writer(path: Path) -> None:
    with Record.open(path):
        pass
    with Record.read(path) as reader:
        assert list(reader.events()) == []
        with Record.open(path) as writer:
            reader.close()
            fill(writer, [TurnStarted(turn=1)])
            with Record.read(path) as another:
                assert len(list(another.events())) == 1
    assert list(path.parent.iterdir()) == [path]


def test_an_event_is_not_there_before_its_commit(record: Record) -> None:
    record.append(RUN, TurnStarted(turn=1))

    with Record.read(record.path) as reader:
        assert list(reader.events()) == []
        record.commit()
        assert len(list(reader.events())) == 1


def test_numbers_go_on_where_they_ended_when_the_record_is_opened_again(path: Path) -> None:
    with Record.open(path) as record:
        fill(record, [TurnStarted(turn=1)])
    with Record.open(path) as record:
        assert record.append(RUN, TurnStarted(turn=2)).seq == 2


def test_closing_commits_what_was_appended(path: Path) -> None:
    with Record.open(path) as record:
        record.append(RUN, TurnStarted(turn=1))

    with Record.read(path) as record:
        assert record.last_seq() == 1


def test_events_of_one_run_and_after_a_number(record: Record) -> None:
    for number in range(1, 700):
        record.append("even" if number % 2 == 0 else "odd", TurnStarted(turn=number))
    record.commit()

    odd = [stored.seq for stored in record.events("odd")]
    assert odd == list(range(1, 700, 2))
    assert [s.seq for s in record.events("even", after_seq=690)] == [692, 694, 696, 698]
    assert [s.seq for s in record.events(after_seq=697)] == [698, 699]


def test_a_reader_that_goes_on_reading_sees_what_is_committed_meanwhile(record: Record) -> None:
    fill(record, [TurnStarted(turn=1)])
    with Record.read(record.path) as reader:
        reading = reader.events()
        assert next(reading).seq == 1
        fill(record, [TurnStarted(turn=2)])
        assert next(reading).seq == 2


def test_a_reader_in_the_middle_does_not_hinder_the_writer(record: Record) -> None:
    fill(record, [TurnStarted(turn=n) for n in range(1, 1000)])
    raw = sqlite3.connect(record.path)
    cursor = raw.execute("SELECT * FROM event")
    cursor.fetchone()

    fill(record, [TurnStarted(turn=1000)])

    assert len(cursor.fetchall()) == 998  # the rest of what was there when it began
    raw.close()


def test_equal_long_texts_are_stored_once_and_small(record: Record) -> None:
    for n in range(50):
        record.append(
            RUN, SubcallStarted(call_id=f"c{n}", kind="llm", prompt=samples.LONG, model="m")
        )
    record.commit()

    with sqlite3.connect(record.path) as raw:
        assert raw.execute("SELECT count(*), sum(length(zstd)) < 1000 FROM blob").fetchone() == (
            1,
            1,
        )
        (bodies,) = raw.execute("SELECT sum(length(body)) FROM event").fetchone()
    raw.close()
    assert bodies < len(samples.LONG)
    assert all(s.event.prompt == samples.LONG for s in record.events())  # type: ignore[union-attr]


def test_a_run_is_summed_up_when_it_has_ended(record: Record) -> None:
    fill(record, samples.whole_run())
    (run,) = record.runs()

    assert (run.id, run.parent, run.query, run.state) == (RUN, "", "What is the code?", "answered")
    assert (run.turns, run.tokens, run.subcalls, run.response) == (1, 1270, 2, "48213")
    assert run.ended is not None
    assert run.started <= run.ended


def test_a_run_under_way_is_summed_up_from_what_it_did(record: Record) -> None:
    fill(record, samples.whole_run()[:-3])  # the cell runs, both sub-calls have ended
    (run,) = record.runs()

    assert (run.state, run.ended, run.response) == ("executing", None, "")
    assert (run.turns, run.tokens, run.subcalls) == (1, 1050 + 2 * 110, 2)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (0, "idle"),
        (1, "proposing"),
        (2, "proposed"),
        (3, "proposed"),
        (4, "executing"),
        (5, "observing"),
        (6, "observing"),
    ],
)
def test_the_state_of_a_run_under_way_is_that_of_its_last_event(
    record: Record, events: int, state: str
) -> None:
    fill(record, [samples.started(), *list(samples.turn())[:events]])

    assert record.runs()[0].state == state


def test_child_runs_are_listed_with_their_parent_in_order_of_start(record: Record) -> None:
    record.append("parent", samples.started())
    record.append("child", samples.started(depth=1, parent_run_id="parent", parent_call_id="c1"))
    record.commit()

    assert [(run.id, run.parent) for run in record.runs()] == [("parent", ""), ("child", "parent")]


def test_a_long_query_and_response_are_whole_in_the_summary(record: Record) -> None:
    fill(record, [samples.started(query=samples.LONG), samples.ended(samples.LONG * 2)])
    (run,) = record.runs()

    assert run.query == samples.LONG
    assert run.response == samples.LONG * 2


def test_the_view_trajectory_reads_as_a_table(record: Record) -> None:
    fill(record, [*samples.whole_run()[:-1], *samples.turn(2, "1/0", ok=False)])
    fill(record, [TurnStarted(turn=3), list(samples.turn(3, "x"))[1]])
    with sqlite3.connect(record.path) as raw:
        rows = raw.execute("SELECT * FROM trajectory").fetchall()
    raw.close()

    assert rows == [
        (RUN, 1, "done", "Final = 48213", "out", 0.5, 1050),
        (RUN, 2, "failed", "1/0", "out", 0.5, 1050),
        (RUN, 3, "proposed", "x", None, None, 1050),
    ]


def test_the_trajectory_shows_the_source_that_ran_not_the_one_proposed(record: Record) -> None:
    proposed, *ran = list(samples.turn(1, "first"))[:2], *list(samples.turn(1, "second"))[3:]
    decided = TurnDecided(turn=1, action="edit", by="alice", source="second")
    fill(record, [*proposed, decided, *ran])
    with sqlite3.connect(record.path) as raw:
        rows = raw.execute("SELECT turn, state, source, tokens FROM trajectory").fetchall()
    raw.close()

    assert rows == [(1, "done", "second", 1050)]


def test_the_view_subcalls_puts_start_and_end_together(record: Record) -> None:
    fill(record, [*samples.whole_run(), next(samples.subcall("call-3"))])
    with sqlite3.connect(record.path) as raw:
        rows = raw.execute(
            "SELECT run, turn, call, kind, model, state, response, error, tokens FROM subcalls"
        ).fetchall()
    raw.close()

    call = (RUN, 1, "call-1", "llm", "small")
    assert rows == [
        (*call, "done", "48213", "", 110),
        (*call[:2], "call-2", *call[3:], "failed", "", "the endpoint answered 500", 110),
        (*call[:2], "call-3", *call[3:], "running", None, None, None),
    ]


def test_a_record_without_a_path_is_a_new_file_in_jupyters_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    with Record.open() as first, Record.open() as second:
        assert first.path != second.path
        assert first.path.parent == tmp_path / "rlm" / "records"


def test_memory_is_an_ordinary_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Record.open(Path(":memory:")).close()

    assert (tmp_path / ":memory:").is_file()


@pytest.mark.parametrize("name", ["a?mode=memory", "100%.db", "a#b", "naïve name"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    with Record.open(tmp_path / name) as record:
        fill(record, [TurnStarted(turn=1)])

    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_nothing_is_left_beside_a_record_that_was_closed(path: Path) -> None:
    with Record.open(path) as record:
        fill(record, samples.whole_run())

    assert list(path.parent.iterdir()) == [path]


def test_a_closed_or_read_only_record_says_so(path: Path) -> None:
    record = Record.open(path)
    record.close()
    record.close()

    with pytest.raises(RecordError, match="open it again"):
        record.append(RUN, TurnStarted(turn=1))
    with pytest.raises(RecordError, match="closed"):
        record.runs()
    with Record.read(path) as reader, pytest.raises(RecordError, match="not open for writing"):
        reader.append(RUN, TurnStarted(turn=1))


class TestVerify:
    def test_a_whole_record_has_nothing_to_report(self, record: Record) -> None:
        put_prompt(record)
        fill(record, samples.whole_run())

        assert record.verify() == []

    def test_what_has_no_end_is_reported_as_under_way(self, record: Record) -> None:
        put_prompt(record)
        calls = [next(samples.subcall(f"call-{n}")) for n in range(5)]
        fill(record, [samples.started(), *list(samples.turn())[:4], *calls])

        assert record.verify() == [
            f"run {RUN} is under way: executing",
            f"the cell of turn 1 of run {RUN} is under way",
            f"5 sub-calls are under way of run {RUN}: call-0, call-1, call-2, …",
        ]

    def test_ends_without_a_start_or_twice_are_reported(self, record: Record) -> None:
        put_prompt(record)
        start, end = samples.subcall("twice")
        _, lone = samples.subcall("lone")
        fill(record, [samples.started(), start, end, end, lone, samples.ended(), samples.ended()])

        assert record.verify() == [
            f"run {RUN} has 1 start and 2 ends",
            "sub-call twice has 1 start and 2 ends",
            "sub-call lone has 0 starts and 1 end",
        ]

    def test_a_run_whose_prompt_is_not_there_is_reported_but_not_a_child_run(
        self, record: Record
    ) -> None:
        fill(record, [samples.started(), samples.ended()])
        child = samples.started(parent_run_id=RUN, parent_call_id="c", depth=1)
        fill(record, [child, samples.ended()], "child")

        assert record.verify() == [f"the prompt of run {RUN} is not in the record"]

    @pytest.mark.parametrize(
        ("damage", "report"),
        [
            ("DELETE FROM event WHERE seq IN (2, 3)", "events 2 to 3 are missing"),
            ("UPDATE event SET body = '{' WHERE seq = 2", "event 2 cannot be read"),
            ("UPDATE event SET body = '{' WHERE seq = 1", "event 1 cannot be read"),
            ("UPDATE event SET tokens = 1 WHERE seq = 3", "event 3 and its columns disagree"),
            ("UPDATE event SET turn = 9 WHERE seq = 3", "event 3 and its columns disagree"),
            ("DELETE FROM blob", "event 6 cannot be read: "),
            (
                "UPDATE blob SET sha256 = replace(sha256, substr(sha256, 1, 1), 'f')",
                "is not the one that its hash names",
            ),
            ("UPDATE blob SET bytes = 3", "does not have the size"),
            ("UPDATE blob SET zstd = x'28b52ffd'", "cannot be read"),
            ("UPDATE prompt_chunk SET prompt_id = 1", "the writing of 1 prompt is under way"),
            ("DELETE FROM prompt_chunk", "chunk 0 of a prompt is missing"),
            ("UPDATE prompt SET sha256 = 'f'", "prompt f… is not the one that its hash names"),
        ],
    )
    def test_every_damage_is_found(self, path: Path, damage: str, report: str) -> None:
        with Record.open(path) as record:
            put_prompt(record)
            fill(record, samples.whole_run())
            call = SubcallStarted(call_id="long", kind="llm", prompt=samples.LONG, model="m")
            record.append(RUN, call)
        raw = sqlite3.connect(path)
        (seq,) = raw.execute("SELECT max(seq) FROM event").fetchone()
        raw.execute(damage)
        raw.commit()
        raw.close()

        with Record.read(path) as record:
            problems = record.verify()
        assert any(report.replace("event 6", f"event {seq}") in line for line in problems), problems

    def test_pages_that_were_overwritten_are_found(self, path: Path) -> None:
        with Record.open(path) as record:
            fill(record, [TurnStarted(turn=n) for n in range(1, 2000)])
        data = bytearray(path.read_bytes())
        data[-8192:] = b"\xff" * 8192
        path.write_bytes(data)

        with Record.read(path) as record:
            assert any("the file is damaged" in line for line in record.verify())

    def test_a_damaged_event_does_not_hide_those_after_it(self, path: Path) -> None:
        with Record.open(path) as record:
            fill(record, [TurnStarted(turn=n) for n in (1, 2, 3)])
        with sqlite3.connect(path) as raw:
            raw.execute("""UPDATE event SET body = '{"event":"Unheard"}' WHERE seq = 2""")
        raw.close()

        with Record.read(path) as record:
            reading = record.events()
            assert next(reading).seq == 1
            with pytest.raises(RecordError, match="event 2"):
                next(reading)
            assert [s.seq for s in record.events(after_seq=2)] == [3]


def test_the_first_run_event_carries_what_a_reader_needs_to_find_the_prompt(
    record: Record,
) -> None:
    put_prompt(record)
    fill(record, samples.whole_run())
    first = next(record.events())

    assert isinstance(first.event, RunStarted)
    assert record.read_prompt(first.event.prompt.sha256) == samples.LONG


def test_the_log_is_moved_into_the_file_while_it_is_written(record: Record) -> None:
    """Not by a commit: it goes on in a thread. Whatever is written meanwhile is kept."""
    text = "".join(chr(97 + i * i % 26) for i in range(4000))
    size = record.path.stat().st_size
    count = 0
    deadline = time.monotonic() + 30
    while record.path.stat().st_size < size + files.MOVE_BYTES:
        assert time.monotonic() < deadline
        for _ in range(100):
            count += 1
            record.append(RUN, TurnStarted(turn=count))
            record.append(RUN, TurnObserved(turn=count, observation=text))
        record.commit()
    assert record.path.with_name(record.path.name + "-wal").exists()

    record.close()
    with Record.read(record.path) as reader:
        assert reader.last_seq() == 2 * count
        assert [line for line in reader.verify() if "under way" not in line] == []
