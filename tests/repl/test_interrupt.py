"""Any cell stops within seconds, and what can be kept is kept."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlm_kernel.cells import CellResult, Stream
from rlm_kernel.errors import RLMError
from rlm_kernel.repl import Nobody, Repl
from rlm_kernel.repl.messages import SendSubcalls
from tests.repl.conftest import Run, text_of, until

UP = "print('up', flush=True)\n"


async def interrupted(repl: Repl, code: str, allow_stdin: bool = False) -> CellResult:
    """Run *code*, interrupt it once it has written ``up``, and return its result."""
    up = asyncio.Event()

    def see(output: object) -> None:
        if isinstance(output, Stream) and "up" in output.text:
            up.set()

    cell = asyncio.ensure_future(repl.execute(code, on_output=see, allow_stdin=allow_stdin))
    await up.wait()
    await repl.interrupt()
    return (await cell).result


WILLING = {
    "loop": UP + "while True: pass",
    "sleep": "import time\n" + UP + "time.sleep(600)",
    "await": "import asyncio\n" + UP + "await asyncio.sleep(600)",
    "os.system": "import os; os.system('echo up; sleep 600')",
    "subprocess": "import subprocess\n" + UP + "subprocess.run(['sleep', '600'])",
    "second chance": "import time\ntry:\n    print('up', flush=True)\n    time.sleep(600)\n"
    "except KeyboardInterrupt: pass\ntime.sleep(600)",
}


@pytest.mark.parametrize("name", WILLING)
async def test_interrupted_cell_stops_and_the_variables_stay(
    repl: Repl, run: Run, name: str
) -> None:
    await run("x = 1")
    worker = repl.worker_pid

    result = await interrupted(repl, WILLING[name])

    assert result.worker_lost == ""
    if name != "os.system":  # which returns the status of its child
        assert result.error is not None
        assert result.error.ename == "KeyboardInterrupt"
    assert text_of(await run("print(x)")) == "1\n"
    assert repl.worker_pid == worker


async def test_a_signal_that_is_late_does_not_hit_the_next_cell(
    repl: Repl, run: Run, tmp_path: Path
) -> None:
    """On a busy machine a cell may end before it is signalled; here the supervisor is stopped."""
    supervisor, over, started = repl.supervisor_pid, tmp_path / "over", asyncio.Event()
    await run("import os, time\nkept = 1")
    waiting = f"while not os.path.exists({str(over)!r}): time.sleep(0.01)"
    first = asyncio.ensure_future(repl.execute(waiting))
    await until(lambda: repl.busy)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        await repl.interrupt()
        await asyncio.sleep(0)  # the signal is ordered now
        over.touch()
        assert (await first).result.ok
        code = "print(kept)"
        second = asyncio.ensure_future(repl.execute(code, on_start=lambda _: started.set()))
        for _ in range(100):
            await asyncio.sleep(0)  # whatever the cell waits for of this process has come
        assert not started.is_set()
    finally:
        os.kill(supervisor, signal.SIGCONT)

    assert text_of((await second).result) == "1\n"


SWALLOW = """while True:
    try:
        print('up', flush=True)
        while True: pass
    except BaseException: pass"""

STUBBORN = {
    "ignored": (
        f"import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{UP}time.sleep(600)",
        "stuck in line 4 of a cell",
    ),
    # Its own handler, so that an early signal does not end it before it is in C.
    "C": (
        f"import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\n{UP}max(range(10**12))",
        "stuck in line 4 of a cell",
    ),
    "swallowed": (
        SWALLOW,
        "stuck in line",
    ),
    # Blocked first, or an interrupt that is faster than the next statement ends the cell.
    "stopped": (
        (
            "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
            f"{UP}os.kill(os.getpid(), signal.SIGSTOP)"
        ),
        "interrupted and",
    ),
}


@pytest.mark.parametrize("name", STUBBORN)
async def test_stubborn_cell_loses_its_worker_and_is_told_where_it_stuck(
    repl: Repl, run: Run, name: str
) -> None:
    code, where = STUBBORN[name]
    await run("x = 1")

    result = await interrupted(repl, code)

    assert where in result.worker_lost
    assert result.error is not None
    assert "(x)" in result.error.evalue
    assert "Current thread" not in text_of(result, "stderr")
    assert text_of(await run("print(1)")) == "1\n"


async def test_interrupt_of_an_idle_repl_changes_nothing(repl: Repl, run: Run) -> None:
    await run("x = 1")

    await repl.interrupt()

    assert text_of(await run("print(x)")) == "1\n"


async def test_cancelled_execute_interrupts_its_cell_and_the_next_runs_after_it(
    repl: Repl, run: Run
) -> None:
    up = asyncio.Event()
    cell = asyncio.ensure_future(
        repl.execute(f"x = 1\n{UP}while True: pass", on_output=lambda _: up.set())
    )
    await up.wait()
    cell.cancel()

    result = await run("print(x)")

    assert cell.cancelled()
    assert text_of(result) == "1\n"


class Waiting(Nobody):
    """Answers nothing, and remembers what was cancelled."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled: list[str] = []

    def subcalls(self, request: SendSubcalls, deliver: object, fail: object):  # type: ignore[no-untyped-def]
        self.asked.set()
        return lambda: self.cancelled.append("subcalls")

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append("input")
        raise RLMError("not reached")


POOL = """from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: list(pool.map(sub_RLM, "????"))"""


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("sub_RLM('?')", "subcalls"),
        ("input('? ')", "input"),
        (
            POOL,
            "subcalls",
        ),
    ],
)
async def test_interrupt_cancels_what_the_cell_waits_for(
    repl: Repl, run: Run, code: str, what: str
) -> None:
    handler = Waiting()
    repl.handler = handler
    cell = asyncio.ensure_future(repl.execute(f"y = 1\n{code}", allow_stdin=True))
    await handler.asked.wait()

    await repl.interrupt()
    result = (await cell).result

    assert result.worker_lost == ""
    assert result.error is not None
    assert result.error.ename in ("KeyboardInterrupt", "SubcallError")
    assert set(handler.cancelled) == {what}
    assert text_of(await run("print(y)")) == "1\n"
