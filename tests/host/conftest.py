"""Real kernels driven by the host, and what is left of them afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 30.0

LINES = [f"line {number} says nothing\n" for number in range(2000)]
LINES[777] = "the needle is 42\n"


def descendants() -> set[int]:
    """Ids of all living processes that come from this one."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with *what* if it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """After the test there is no process that was not there before."""
    before = descendants()
    yield
    until(lambda: not descendants() - before, "processes are left behind")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A prompt of one sentence among many lines."""
    path = tmp_path / "prompt.txt"
    path.write_text("".join(LINES))
    return path


@pytest.fixture
def playbook(tmp_path: Path) -> Callable[..., str]:
    """Writes a playbook of cells, each a source or a pair of prose and source; its spec."""

    def write(*cells: str | tuple[str, str]) -> str:
        parts = []
        for cell in cells:
            prose, source = ("", cell) if isinstance(cell, str) else cell
            if prose:
                parts.append("# %% [markdown]\n" + prose)
            parts.append("# %%\n" + source)
        path = tmp_path / "playbook.py"
        path.write_text("\n\n".join(parts) + "\n")
        return f"playbook:{path}"

    return write
