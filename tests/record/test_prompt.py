"""The prompt is stored once, whole or not at all, and any part of it is read without the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlm_kernel.engine.events import TurnStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record
from rlm_kernel.record.prompts import CHUNK
from tests.record import samples

MIXED = "aé€😀\ud800\n" * 300_000  # 4.5 MB in UTF-8: characters of 1, 2, 3 and 4 bytes cross chunks

SPANS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def put(record: Record, prompt: str | list[str] | dict[str, str], piece: int = CHUNK) -> str:
    info = samples.prompt_info(prompt)
    data = samples.prompt_bytes(prompt)
    with record.prompt_writer(info) as writer:
        for at in range(0, len(data), piece):
            writer.write(data[at : at + piece])
    return info.sha256


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "short",
        MIXED,
        "x" * CHUNK,
        "x" * (CHUNK + 1),
        ["a", "\ud800", "é"],
        {"k\ud800": "v"},
        [],
    ],
    ids=["empty", "short", "mixed", "a chunk", "a chunk and a byte", "list", "dict", "empty list"],
)
def test_a_prompt_comes_back_as_it_was(
    record: Record, prompt: str | list[str] | dict[str, str]
) -> None:
    sha256 = put(record, prompt, piece=300_001)

    assert record.read_prompt(sha256) == prompt
    assert b"".join(record.prompt_chunks(sha256)) == samples.prompt_bytes(prompt)
    assert record.verify() == []


def test_what_is_told_of_a_prompt_comes_back(record: Record) -> None:
    info = samples.prompt_info("Ein Tor, ein Code")
    put(record, "Ein Tor, ein Code")

    assert record.has_prompt(info.sha256)
    assert record.prompt_info(info.sha256) == info


def test_chunks_are_at_most_1_mib_however_the_prompt_was_written(record: Record) -> None:
    data = samples.prompt_bytes(MIXED)
    info = samples.prompt_info(MIXED)
    with record.prompt_writer(info) as writer:
        writer.write(memoryview(data))

    sizes = [len(chunk) for chunk in record.prompt_chunks(info.sha256)]
    assert set(sizes[:-1]) == {CHUNK}
    assert 0 < sizes[-1] <= CHUNK


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, len(MIXED)), st.integers(0, 2 * CHUNK))
def test_any_span_of_characters_is_read_exactly(
    mixed: tuple[Record, str], start: int, size: int
) -> None:
    record, sha256 = mixed

    assert record.prompt_text(sha256, start, start + size) == MIXED[start : start + size]


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 5 * CHUNK), st.integers(0, 3 * CHUNK))
def test_any_range_of_bytes_is_read_exactly(
    mixed: tuple[Record, str], start: int, size: int
) -> None:
    record, sha256 = mixed
    expected = samples.prompt_bytes(MIXED)[start : start + size]

    assert b"".join(record.prompt_chunks(sha256, start, start + size)) == expected


@pytest.fixture
def mixed(record: Record) -> tuple[Record, str]:
    return record, put(record, MIXED)


def test_every_character_at_a_border_of_chunks_is_read_exactly(mixed: tuple[Record, str]) -> None:
    record, sha256 = mixed
    data = samples.prompt_bytes(MIXED)
    borders = range(CHUNK, len(data), CHUNK)
    before = [len(data[:border].translate(None, bytes(range(0x80, 0xC0)))) for border in borders]

    assert len(before) == 4
    assert any(0x80 <= data[border] < 0xC0 for border in borders)  # one is inside a character
    for at in before:
        for start in range(at - 2, at + 2):
            for stop in (at, at + 1, at + 2):
                assert record.prompt_text(sha256, start, stop) == MIXED[start:stop]


def test_a_prompt_is_not_there_before_it_is_whole(record: Record) -> None:
    data, info = samples.prompt_bytes(MIXED), samples.prompt_info(MIXED)
    with record.prompt_writer(info) as writer:
        writer.write(data)
        assert not record.has_prompt(info.sha256)
        with pytest.raises(RecordError, match="holds no prompt"):
            record.read_prompt(info.sha256)

    assert record.has_prompt(info.sha256)


def test_a_prompt_that_is_not_what_was_announced_leaves_nothing(record: Record) -> None:
    for info in (
        samples.prompt_info(MIXED, sha256="0" * 64),
        samples.prompt_info(MIXED, chars=3),
    ):
        with pytest.raises(RecordError, match="announced"), record.prompt_writer(info) as writer:
            writer.write(samples.prompt_bytes(MIXED))

        assert not record.has_prompt(info.sha256)
        assert record.verify() == []  # which reports chunks of a prompt that is not there


def test_an_error_while_a_prompt_is_written_leaves_nothing_and_is_passed_on(
    record: Record,
) -> None:
    info = samples.prompt_info(MIXED)

    def pieces() -> Iterator[bytes]:
        yield samples.prompt_bytes(MIXED)
        raise ZeroDivisionError

    def write() -> None:
        with record.prompt_writer(info) as writer:
            for piece in pieces():
                writer.write(piece)

    with pytest.raises(ZeroDivisionError):
        write()

    assert not record.has_prompt(info.sha256)
    assert record.verify() == []


def test_the_same_prompt_written_twice_is_stored_once(record: Record) -> None:
    put(record, MIXED)
    record.commit()
    size = record.path.stat().st_size
    sha256 = put(record, MIXED)

    assert record.read_prompt(sha256) == MIXED
    assert record.verify() == []
    assert record.path.stat().st_size <= size + 2 * CHUNK  # pages that were used once and are free


def test_a_text_that_is_the_json_of_a_list_is_told_from_the_list(record: Record) -> None:
    sha256 = put(record, ["a", "b"])
    text = samples.prompt_bytes(["a", "b"]).decode()

    assert samples.prompt_info(text).sha256 == sha256
    assert record.read_prompt(sha256) == ["a", "b"]
    assert record.read_prompt(sha256, "str") == text


def test_events_are_committed_while_a_prompt_is_written(record: Record) -> None:
    data, info = samples.prompt_bytes(MIXED), samples.prompt_info(MIXED)
    with record.prompt_writer(info) as writer:
        for at in range(0, len(data), CHUNK):
            writer.write(data[at : at + CHUNK])
            record.append(samples.RUN, TurnStarted(turn=at + 1))
            record.commit()

    assert record.read_prompt(info.sha256) == MIXED
    assert record.last_seq() == 5


def test_a_prompt_is_written_from_another_thread_while_events_are_committed(
    record: Record,
) -> None:
    data, info = samples.prompt_bytes(MIXED), samples.prompt_info(MIXED)

    half, committed = threading.Event(), threading.Event()

    def write() -> None:
        with record.prompt_writer(info) as writer:
            writer.write(data[: 2 * CHUNK])
            half.set()
            assert committed.wait(60)
            writer.write(data[2 * CHUNK :])

    thread = threading.Thread(target=write)
    thread.start()
    assert half.wait(60)
    count = 0
    while thread.is_alive():
        record.append(samples.RUN, TurnStarted(turn=1))
        record.commit()
        committed.set()
        count += 1
    thread.join()

    assert record.read_prompt(info.sha256) == MIXED
    assert record.last_seq() == count > 0


def test_two_writers_of_one_prompt_do_not_disturb_each_other(record: Record) -> None:
    data, info = samples.prompt_bytes(MIXED), samples.prompt_info(MIXED)
    with record.prompt_writer(info) as first, record.prompt_writer(info) as second:
        for at in range(0, len(data), CHUNK):
            first.write(data[at : at + CHUNK])
            second.write(data[at : at + CHUNK])

    assert record.read_prompt(info.sha256) == MIXED
    assert record.verify() == []


def test_a_prompt_is_not_written_outside_the_block_or_into_a_record_that_is_only_read(
    record: Record,
) -> None:
    writer = record.prompt_writer(samples.prompt_info("x"))
    with pytest.raises(RecordError, match="with block"):
        writer.write(b"x")
    with Record.read(record.path) as reader, pytest.raises(RecordError, match="not open for"):
        reader.prompt_writer(samples.prompt_info("x"))


def test_a_prompt_takes_no_more_room_than_its_compressed_text(path: Path) -> None:
    # The source of the standard library's larger modules: text as P often is.
    import email.message
    import typing

    text = "".join(Path(str(m.__file__)).read_text("utf-8") for m in (email.message, typing)) * 4
    with Record.open(path) as record:
        put(record, text)

    assert path.stat().st_size <= 0.6 * len(text)
