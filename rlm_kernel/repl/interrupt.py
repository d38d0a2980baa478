"""Getting a cell to stop: ask, ask again, look where it is stuck, end its worker.

Most code stops at the first SIGINT. Some needs two, such as a handler that
swallows one. What blocks or ignores the signal, or never comes back from C,
ends with its process. Under `GRACE_S` × 2 + 1 seconds in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Callable
from typing import Any

from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.processes import SupervisorProcess

__all__ = ["GRACE_S", "interrupt_cell"]

GRACE_S = 1.5
"""Seconds that a cell has to end after each SIGINT."""

_DUMP_S = 0.3
"""Seconds to wait for the traceback of a worker that does not react to SIGINT."""

_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+) in (\S+)$', re.MULTILINE)
"""A line of faulthandler's dump, innermost frame first."""

_CELL_FILE = re.compile(r"ipython-input|ipykernel_")


async def interrupt_cell(
    supervisor: SupervisorProcess,
    worker: Worker,
    over: asyncio.Future[Any],
    waits: Callable[[], set[int]],
    give_up: Callable[[set[int]], None],
) -> None:
    """Stop the cell whose end is the future *over*, whatever it takes.

    The signal goes to the worker's process group, as a terminal's does: a
    child that the cell waits for in C (``os.system``) has to hear it too.

    Parameters
    ----------
    waits
        What the cell waits for. Asked before each signal: what it asks for once it has heard of
        the signal is not meant.
    give_up
        Cancels that. Called once the signal is delivered, so that the cell sees its
        KeyboardInterrupt and not the end of the wait.
    """
    assert worker.pid is not None
    for _ in range(2):
        waited_for = waits()
        await supervisor.signal(worker.pid, signal.SIGINT, group=True)
        give_up(waited_for)
        await asyncio.wait([over], timeout=GRACE_S)
        if over.done() or worker.ended:
            return
    where = await _where(supervisor, worker)
    if not over.done():
        worker.end(f"did not stop when interrupted{where} and was killed")


async def _where(supervisor: SupervisorProcess, worker: Worker) -> str:
    """Return where the worker is stuck, as part of a sentence; empty if it cannot tell."""
    assert worker.pid is not None
    texts = worker.divert_stderr()
    dump = ""
    await supervisor.signal(worker.pid, signal.SIGUSR2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DUMP_S):
            while _in_cell(_frames(dump)) is None:
                dump += await texts.get()
    worker.restore_stderr()
    frames = _frames(dump)
    line = _in_cell(frames)
    if line is not None:
        return f" (stuck in line {line} of a cell)"
    if not frames:
        return ""
    file, line, function = frames[0]
    return f" (stuck in {function[:80]}, line {line} of {file[-80:]})"


def _frames(dump: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the interrupted thread's frames, innermost first."""
    start = dump.rfind("Current thread")
    return _FRAME.findall(dump, start) if start >= 0 else []


def _in_cell(frames: list[tuple[str, str, str]]) -> str | None:
    return next((line for file, line, _ in frames if _CELL_FILE.search(file)), None)
