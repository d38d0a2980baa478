"""Ctrl-C in a program that waits for a completion."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlm_kernel import RLM, PlaybookRoot
from rlm_kernel.engine.events import Stored, TurnExecuting
from rlm_kernel.record import Record

SLEEPS = ["import time; time.sleep(600)", "Final = 1"]


def in_a_loop(call: Callable[[], None]) -> None:
    async def program() -> None:
        call()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(program())
    finally:
        loop.close()


def children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("inside", [True, False], ids=["in a running loop", "without one"])
def test_ctrl_c_ends_the_run_before_it_is_raised(inside: bool, tmp_path: Path) -> None:
    """As in a notebook cell, whose loop is running: no thread, worker or unended run is left."""
    before = children()
    main = threading.main_thread().ident
    assert main is not None

    def press(stored: Stored) -> None:
        if isinstance(stored.event, TurnExecuting):
            signal.pthread_kill(main, signal.SIGINT)

    rlm = RLM(root=PlaybookRoot(SLEEPS), record=tmp_path / "r.sqlite", on_event=press)

    def complete() -> None:
        rlm.completion("text", query="q")

    with pytest.raises(KeyboardInterrupt):
        in_a_loop(complete) if inside else complete()

    assert not [thread for thread in threading.enumerate() if "rlm" in thread.name]
    assert not children() - before
    record = Record.read(tmp_path / "r.sqlite")
    try:
        (run,) = record.runs()
    finally:
        record.close()
    assert run.state == "stopped"
