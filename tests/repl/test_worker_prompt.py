"""Loading P into the worker and reading it back."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def read_back(worker: WorkerDriver) -> bytes:
    worker.send(messages.ReadPrompt(id=worker.next_id()))
    pieces = []
    while True:
        chunk = worker.wait_for(messages.PromptChunk)
        assert len(chunk.data) <= 1 << 20
        pieces.append(chunk.data)
        if chunk.last:
            return b"".join(pieces)


@pytest.mark.parametrize(
    "text",
    ["plain", "é漢😀\r\n\x00 end\n", "lone \ud800 surrogate", "x" * 3_000_001 + "漢" * 500_000],
)
def test_a_text_survives_the_way_there_and_back(worker: WorkerDriver, text: str) -> None:
    """Whatever its characters; the description fits it."""
    data = text.encode("utf-8", "surrogatepass")
    loaded = worker.load(data, source="book.txt")
    assert loaded.prompt is not None
    assert loaded.prompt.chars == len(text)
    assert (loaded.prompt.kind, loaded.prompt.items, loaded.prompt.source) == ("str", 1, "book.txt")
    assert loaded.prompt.sha256 == hashlib.sha256(data).hexdigest()
    assert read_back(worker) == data
    assert worker.run("len(P), context is P").result == f"({len(text)}, True)"


@pytest.mark.parametrize(
    ("kind", "value"),
    [("list", ["a", "é\n", ""]), ("dict", {"z": "1", "a": "漢"}), ("list", ["ab" * 400_000] * 3)],
)
def test_lists_and_dicts(
    worker: WorkerDriver, kind: str, value: list[str] | dict[str, str]
) -> None:
    """Order, items and types are kept."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    loaded = worker.load(data, kind=kind)
    assert loaded.prompt is not None
    assert (loaded.prompt.kind, loaded.prompt.items) == (kind, len(value))
    assert loaded.prompt.sha256 == hashlib.sha256(data).hexdigest()
    assert read_back(worker) == data


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"", "str"), (b"\xff\xfe", "str"), (b"[1, 2]", "list"), (b"{", "dict"), (b"5", "list")],
)
def test_what_cannot_be_a_prompt_is_refused(worker: WorkerDriver, data: bytes, kind: str) -> None:
    """With a reason, and P stays what it was."""
    worker.load(b"as before")
    refused = worker.load(data, kind=kind)
    assert refused.prompt is None
    assert refused.error
    assert worker.run("P").result == "'as before'"


def test_a_load_without_its_memory_is_refused(worker: WorkerDriver) -> None:
    """A frame whose file descriptor is missing."""
    worker.send(messages.LoadPrompt(id=worker.next_id()))
    assert worker.wait_for(messages.Loaded).error


def test_no_descriptor_is_left_open(worker: WorkerDriver) -> None:
    """Loading again and again does not use up the worker's descriptors."""
    count = "import os; len(os.listdir('/proc/self/fd'))"
    worker.load(b"x")
    before = worker.run(count).result
    for _ in range(20):
        worker.load(b"x")
        worker.load(b"{", kind="dict")
    assert worker.run(count).result == before


def test_the_peak_of_memory_is_twice_the_prompt() -> None:
    """Once in the memfd, once as str, and nothing beside."""
    size = 64 << 20
    with WorkerDriver() as worker:
        before = _peak(worker)
        worker.load(b"x" * size)
        assert _peak(worker) - before < 2.1 * size
        assert resource.getpagesize()


def _peak(worker: WorkerDriver) -> int:
    """VmHWM of the worker in bytes; shared pages count, and so does the memfd."""
    status = Path(f"/proc/{worker.hello.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
