"""A file that cannot be used is refused in one sentence and left as it was; a full disk loses
nothing."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_kernel.engine.events import SubcallEnded, TurnStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record
from rlm_kernel.record.schema import VERSION
from tests.record import samples
from tests.record.test_crash import ROOT


def a_text(path: Path) -> None:
    path.write_text("not a database, but long enough to have a header\n" * 100)


def anothers_database(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE t (x)")
    raw.close()


def anothers_database_with_a_log(path: Path) -> None:
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA journal_mode = WAL")
    raw.execute("CREATE TABLE t (x)")
    wal = path.with_name(path.name + "-wal").read_bytes()
    data = path.read_bytes()
    raw.close()
    path.write_bytes(data)
    path.with_name(path.name + "-wal").write_bytes(wal)


def a_newer_record(path: Path) -> None:
    Record.open(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute(f"PRAGMA user_version = {VERSION + 1}")
    raw.close()


def a_truncated_record(path: Path) -> None:
    with Record.open(path) as record:
        record.append("", SubcallEnded(call_id="c", ok=True, response=samples.LONG))
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("opened", [Record.open, Record.read])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_text, "file is not a database; choose another file"),
        (anothers_database, "it is a database of something else; choose another file"),
        (anothers_database_with_a_log, "it is a database of something else"),
        (a_newer_record, f"is of version {VERSION + 1} and this rlm-kernel reads up to {VERSION}"),
        (a_truncated_record, "malformed; copy the file away"),
    ],
)
def test_what_is_no_record_of_ours_is_refused_and_untouched(
    path: Path, opened: Callable[[Path], Record], make: Callable[[Path], None], said: str
) -> None:
    make(path)
    before = path.read_bytes()

    with pytest.raises(RecordError, match=said) as refusal:
        opened(path)

    assert str(refusal.value).startswith(f"cannot open the record {path}: ")
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == before
    assert not path.with_name(path.name + "-lock").exists()


def test_a_missing_folder_file_or_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist; make it first"):
        Record.open(tmp_path / "missing" / "x.sqlite")
    with pytest.raises(RecordError, match="no such file"):
        Record.read(tmp_path / "x.sqlite")
    for opened in (Record.open, Record.read):
        with pytest.raises(RecordError, match=r"cannot open the record"):
            opened(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_link_to_itself_is_refused(path: Path) -> None:
    path.symlink_to(path)
    for opened in (Record.open, Record.read):
        with pytest.raises(RecordError, match=r"cannot open the record"):
            opened(path)


def test_an_empty_file_becomes_a_record_and_is_none_yet_for_a_reader(path: Path) -> None:
    path.touch()
    with pytest.raises(RecordError, match="it is empty"):
        Record.read(path)

    with Record.open(path) as record:
        record.append("", TurnStarted(turn=1))
    with Record.read(path) as reader:
        assert reader.last_seq() == 1


READ_ONLY = """
import os, sys
from pathlib import Path
from rlm_kernel.record import Record
path = Path(sys.argv[1])
path.as_uri()  # loads what it needs, from where the other user may not look
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    Record.open(path)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
with Record.read(path) as record:
    print(record.last_seq())
"""


@pytest.mark.parametrize(("file", "folder"), [(0o444, 0o777), (0o644, 0o555), (0o444, 0o555)])
def test_a_record_that_may_only_be_read_is_read_and_not_opened(
    tmp_path: Path, file: int, folder: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "run.rlm.sqlite"
    with Record.open(path) as record:
        record.append("", TurnStarted(turn=1))
    before = path.read_bytes()
    path.chmod(file)
    place.chmod(folder)
    for parent in place.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    refusal, last = done.stdout.splitlines()
    assert refusal.startswith(f"RecordError: cannot open the record {path}: ")
    assert last == "1"
    assert path.read_bytes() == before
    place.chmod(0o755)


def limit_pages(record: Record, more: int) -> Callable[[], None]:
    """Leave *record* room for that many pages; returns how to give it more. The disk is as full
    for SQLite as if no block were free."""
    connection = record._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + more}")
    return lambda: connection.execute("PRAGMA max_page_count = 1000000").close()


def test_a_full_disk_loses_nothing_and_a_later_commit_writes_all(record: Record) -> None:
    record.append("", TurnStarted(turn=1))
    record.commit()
    make_room = limit_pages(record, 2)
    stored = [
        record.append("", SubcallEnded(call_id=f"c{n}", ok=True, response=os.urandom(9000).hex()))
        for n in range(20)
    ]

    for _ in range(2):  # trying again without room changes nothing
        with pytest.raises(RecordError, match=r"full; make room on the disk and try again"):
            record.commit()
        assert record.last_seq() == 1
    stored.append(record.append("", TurnStarted(turn=2)))
    make_room()
    record.commit()

    assert list(record.events(after_seq=1)) == stored
    assert all("sub-call" in line for line in record.verify())


def test_a_disk_too_full_for_a_prompt_leaves_nothing_of_it(record: Record) -> None:
    info = samples.prompt_info("x")

    def write() -> None:
        with record.prompt_writer(info) as writer:
            assert writer._connection is not None
            writer._connection.execute("PRAGMA max_page_count = 100")
            writer.write(os.urandom(2 << 20))

    with pytest.raises(RecordError, match="make room"):
        write()

    assert not record.has_prompt(info.sha256)
    assert record.verify() == []


def test_closing_a_record_that_cannot_be_written_says_so_and_lets_go_of_it(path: Path) -> None:
    record = Record.open(path)
    limit_pages(record, 1)
    record.append("", SubcallEnded(call_id="c", ok=True, response=os.urandom(90_000).hex()))

    with pytest.raises(RecordError, match="make room"):
        record.close()
    Record.open(path).close()


LIMITED = """
import os, resource, sys
from pathlib import Path
from rlm_kernel.engine.events import SubcallEnded
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record
record = Record.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
shown = 0
try:
    while True:
        for n in range(20):
            event = SubcallEnded(call_id=f"c{shown}", ok=True, response=os.urandom(5000).hex())
            last = record.append("", event)
        record.commit()
        shown = last.seq
except RecordError as error:
    print(error)
print(shown, record.last_seq(), sum(1 for _ in record.events()))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
record.commit()
record.close()
"""


def test_a_file_that_may_not_grow_loses_nothing_and_goes_on_when_it_may(path: Path) -> None:
    """The kernel's own limit: write() fails with EFBIG in the middle of a transaction."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    said, numbers = done.stdout.splitlines()
    shown, last, read = map(int, numbers.split())

    assert said.startswith(f"cannot write to the record {path}: ")
    assert said.endswith("try again")
    assert 0 < shown == last == read
    with Record.read(path) as record:
        assert record.last_seq() == shown + 20


def test_a_commit_waits_for_another_program_and_then_says_who_is_in_the_way(
    record: Record,
) -> None:
    raw = sqlite3.connect(record.path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    stored = record.append("", TurnStarted(turn=1))

    with pytest.raises(RecordError, match="locked; close the program that is writing it"):
        record.commit()

    raw.execute("ROLLBACK")
    raw.close()
    record.commit()
    assert list(record.events()) == [stored]


def test_an_interrupt_just_after_a_commit_does_not_write_its_events_twice(record: Record) -> None:
    """Such as Ctrl-C in a program that uses the library: it may come between any two lines."""
    connection = record._connection
    assert connection is not None
    record.append("", TurnStarted(turn=1))

    def interrupt(statement: str) -> None:
        if statement == "COMMIT":
            connection.set_trace_callback(None)
            signal_at_next_line()

    def signal_at_next_line() -> None:
        def trace(frame: object, what: str, argument: object) -> object:
            if what == "line":
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "commit":
            frame = frame.f_back  # type: ignore[assignment]
        frame.f_trace = trace
        sys.settrace(lambda *_: None)

    connection.set_trace_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        record.commit()
    record.append("", TurnStarted(turn=2))
    record.commit()

    assert [s.seq for s in record.events()] == [1, 2]
