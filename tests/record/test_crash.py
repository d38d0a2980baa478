"""What was committed outlives the process; one process writes; both with real ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.engine.events import TurnStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record
from rlm_kernel.record.files import WriterLock
from tests.record import samples
from tests.record.writer import event

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def writer(path: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes *path*; killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.record.writer", str(path), what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_after(process: subprocess.Popen[str], lines: int) -> int:
    """Kill the writer at some moment after it showed so much; what it showed last."""
    shown = [line(process) for _ in range(lines)]
    process.kill()
    rest, _ = process.communicate()
    return int((shown + rest.split())[-1])


@pytest.mark.parametrize("seed", range(6))
def test_everything_shown_before_a_kill_is_there_afterwards(path: Path, seed: int) -> None:
    with writer(path, "events") as process:
        shown = kill_after(process, random.Random(seed).randrange(1, 60))

    with Record.read(path) as reader:  # first a reader, which must not need a writer to recover
        assert reader.last_seq() >= shown
    with Record.open(path) as record:
        found = list(record.events())
        assert [s.event for s in found] == [event(seq) for seq in range(1, len(found) + 1)]
        assert not [line for line in record.verify() if "start" not in line]
        assert record.append(samples.RUN, TurnStarted(turn=1)).seq == len(found) + 1


def test_a_record_killed_many_times_goes_on_without_a_gap(path: Path) -> None:
    for _ in range(3):
        with writer(path, "events") as process:
            shown = kill_after(process, 3)

    with Record.open(path) as record:
        assert [s.seq for s in record.events()] == list(range(1, record.last_seq() + 1))
        assert record.last_seq() >= shown


def test_a_prompt_cut_short_by_a_kill_is_not_there_and_is_cleared_away(path: Path) -> None:
    with writer(path, "prompt") as process:
        kill_after(process, 3)

    with Record.read(path) as reader:
        assert reader.verify() == ["the writing of 1 prompt is under way"]
    with Record.open(path) as record:
        assert record.verify() == []


def test_a_second_process_is_refused_and_told_who_writes(path: Path) -> None:
    with writer(path, "hold") as process:
        assert line(process) == "open"
        before = path.read_bytes()
        with pytest.raises(RecordError, match=f"process {process.pid} is writing it") as refusal:
            Record.open(path)
        assert str(path) in str(refusal.value)
        assert path.read_bytes() == before

        process.kill()
        process.wait()
        Record.open(path).close()  # the lock ended with its holder


def test_a_second_record_in_the_same_process_is_refused(record: Record) -> None:
    with pytest.raises(RecordError, match=f"process {os.getpid()} is writing it"):
        Record.open(record.path)

    record.append(samples.RUN, TurnStarted(turn=1))
    record.commit()  # and the first goes on undisturbed
    assert record.verify() == []
    assert record.last_seq() == 1


def test_the_lock_is_found_by_any_name_of_the_record(record: Record, tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(record.path)

    with pytest.raises(RecordError, match="is writing it"):
        Record.open(link)


def test_a_lock_whose_file_was_removed_just_before_it_was_taken_does_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    One process opens the lock's file; before it locks it, the holder lets go and removes the
    file, and a third makes it anew: the first has a lock on a file that nobody looks at.
    """
    holder = WriterLock(path)
    third: list[WriterLock] = []
    flock = fcntl.flock

    def flock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        holder.release()
        third.append(WriterLock(path))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    with pytest.raises(RecordError, match="is writing it"):
        WriterLock(path)
    third[0].release()


def test_a_forked_child_does_not_keep_the_lock_of_its_killed_parent(path: Path) -> None:
    with writer(path, "fork") as process:
        child = int(line(process))
        try:
            process.kill()
            process.wait()
            os.kill(child, 0)  # it lives
            Record.open(path).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_reader_follows_a_process_that_writes(path: Path) -> None:
    with writer(path, "events") as process:
        shown = int(line(process))
        with Record.read(path) as reader:
            assert reader.last_seq() >= shown
            later = int(line(process))
            assert [s.seq for s in reader.events(after_seq=shown)][: later - shown] == list(
                range(shown + 1, later + 1)
            )
