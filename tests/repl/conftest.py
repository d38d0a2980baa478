"""REPLs with real processes, and a way to find every process that one leaves behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rlm_kernel.cells import CellResult, Stream
from rlm_kernel.repl import Repl

STANDIN = (sys.executable, "-P", str(Path(__file__).with_name("standin.py")), "3")

MARK = "TEST_TREE"


def marked(mark: str) -> list[int]:
    """Ids of the living processes that were started with *mark* in their environment."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


async def until(condition: Callable[[], object], deadline_s: float = 30) -> None:
    """Wait for *condition*; fail where it does not come true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.01)


def text_of(result: CellResult, name: str = "stdout") -> str:
    """What a cell wrote to a stream."""
    return "".join(o.text for o in result.outputs if isinstance(o, Stream) and o.name == name)


@pytest.fixture
def mark() -> str:
    """Goes with the environment of a test's processes, so that `marked` finds them."""
    return secrets.token_hex(6)


@pytest.fixture
def environ(mark: str) -> dict[str, str]:
    """Environment of a test's processes."""
    return {**os.environ, MARK: mark}


@pytest.fixture
async def repl(environ: dict[str, str], mark: str) -> AsyncIterator[Repl]:
    """A REPL, and after the test the claim that it left no process."""
    async with await Repl.start(environ=environ, protect=False) as repl:
        yield repl
    assert marked(mark) == []


@pytest.fixture
async def standin(environ: dict[str, str], mark: str) -> AsyncIterator[Repl]:
    """A REPL whose worker does to the link what its cells say."""
    async with await Repl.start(environ=environ, protect=False, worker_argv=STANDIN) as repl:
        yield repl
    assert marked(mark) == []


Run = Callable[[str], Awaitable[CellResult]]


@pytest.fixture
def run(repl: Repl) -> Run:
    """Run a cell and return its result."""

    async def run(code: str) -> CellResult:
        return (await repl.execute(code)).result

    return run
