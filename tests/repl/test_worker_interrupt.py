"""An interrupt ends what a cell does, at once, and harms nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlm_kernel.cells import Stream
from rlm_kernel.repl import messages
from tests.repl.worker_driver import Cell, WorkerDriver, echo


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def interrupted(worker: WorkerDriver, code: str, **options: object) -> Cell:
    """Run *code* and interrupt it once it prints ``go``.

    And once more if nothing comes of it, as the kernel does: the interpreter misses a signal that
    comes between its last look for one and a system call that blocks.
    """
    number = worker.start(code, **options)
    going = False

    def seen(message: object) -> None:
        nonlocal going
        if isinstance(message, messages.Emit) and message.output == Stream("stdout", "go\n"):
            going = True
            worker.interrupt()

    def nudge() -> None:
        if going:
            worker.interrupt()

    return worker.finish(number, seen=seen, nudge=nudge)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import asyncio\nawait asyncio.sleep(60)",
        "import asyncio\nawait asyncio.gather(*(asyncio.sleep(60) for _ in range(5)))",
        "import asyncio\nawait asyncio.sleep(0)\nwhile True: pass",
        "import asyncio\nasyncio.run(asyncio.sleep(60))",
        "sub_RLM('never answered')",
        "sub_RLM(['never', 'answered'])",
        "await sub_RLM.aio('never answered')",
        "import asyncio\nawait asyncio.gather(*(sub_RLM.aio('x') for _ in range(5)))",
        "from concurrent.futures import ThreadPoolExecutor as T\n"  # noqa: ISC004
        "with T(4) as pool: list(pool.map(sub_RLM, ['x'] * 8))",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "!sleep 60",
        "slept = !sleep 60",
        "import queue; queue.Queue().get()",
        "import threading; threading.Lock().acquire(); threading.Event().wait()",
        "budget()",
    ],
)
def test_an_interrupt_ends_the_cell_and_the_next_runs(worker: WorkerDriver, code: str) -> None:
    """Whatever it waits for or computes; it is told as KeyboardInterrupt."""
    cell = interrupted(worker, f"print('go')\n{code}")
    assert not cell.finished.ok
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    after = worker.run("import asyncio\nawait asyncio.sleep(0)\nsub_RLM('clean')", answer=echo)
    assert after.result == "'CLEAN'"


def test_an_interrupted_command_ends_the_cell(worker: WorkerDriver) -> None:
    """Also where IPython has handed the interrupt on to it already."""
    number = worker.start("!echo go; sleep 60\nprint('on')")
    worker.wait_for(messages.Emit)
    worker.interrupt()
    cell = worker.finish(number)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    assert "on" not in cell.out


def test_an_interrupt_during_input(worker: WorkerDriver) -> None:
    """The cell ends without waiting for the person."""
    number = worker.start("input('name? ')", allow_stdin=True)
    request = worker.wait_for(messages.GetInput)
    worker.interrupt()
    cell = worker.finish(number)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    worker.send(messages.InputReply(id=request.id, text="too late"))
    assert worker.run("'alive'").result == "'alive'"


def test_an_interrupted_wait_cancels_its_sub_calls(worker: WorkerDriver) -> None:
    """Of the main thread, of tasks and of threads; a late reply is dropped."""
    number = worker.start("sub_RLM(['a', 'b'])")
    asked = worker.wait_for(messages.SendSubcalls)
    worker.interrupt()
    cell = worker.finish(number)
    assert [m.id for m in cell.requests if isinstance(m, messages.CancelSubcalls)] == [asked.id]
    worker.send(
        messages.SubcallResults(id=asked.id, results=[messages.SubcallResult(index=0, text="A")])
    )
    assert worker.run("sub_RLM('c')", answer=echo).result == "'C'"


def test_threads_that_wait_are_told_of_the_interrupt(worker: WorkerDriver) -> None:
    """So that a pool in a `with` block ends, though nobody answers its sub-calls."""
    number = worker.start(
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "with T(3) as pool:\n    futures = [pool.submit(sub_RLM, 'x') for _ in range(3)]\n"
        "    print('waiting')\n    for future in futures: future.result()"
    )
    awaited = 4

    def seen(message: object) -> None:
        nonlocal awaited
        awaited -= isinstance(message, (messages.SendSubcalls, messages.Emit))
        if not awaited:
            awaited = -1
            worker.interrupt()

    cell = worker.finish(number, seen=seen)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    result = worker.run("[type(f.exception()).__name__ for f in futures]").result
    assert result == "['SubcallError', 'SubcallError', 'SubcallError']"


def test_finally_blocks_run(worker: WorkerDriver) -> None:
    """In synchronous code and in coroutines."""
    code = "import time\ntry: print('go'); time.sleep(60)\nfinally: print('cleaned')"
    assert "cleaned\n" in interrupted(worker, code).out
    code = "import asyncio\ntry: print('go'); await asyncio.sleep(60)\nfinally: print('cleaned')"
    assert "cleaned\n" in interrupted(worker, code).out


def test_an_interrupt_can_be_caught(worker: WorkerDriver) -> None:
    """Code that handles it goes on, sub-calls included."""
    code = (
        "import time\ntry: print('go'); time.sleep(60)\n"
        "except KeyboardInterrupt: print('caught')\n'on'"
    )
    cell = interrupted(worker, code)
    assert cell.finished.ok
    assert cell.result == "'on'"


def test_an_interrupt_of_an_idle_worker_does_nothing(worker: WorkerDriver) -> None:
    """Neither now nor to the next cell."""
    for _ in range(20):
        worker.interrupt()
    assert worker.run("'alive'").result == "'alive'"


def test_background_tasks_outlive_an_interrupt(worker: WorkerDriver) -> None:
    """It ends the cell, not what earlier cells started."""
    worker.run(
        "import asyncio\nticks = []\n"
        "async def tick():\n    while True: ticks.append(1); await asyncio.sleep(0)\n"
        "task = asyncio.create_task(tick())\nawait asyncio.sleep(0)"
    )
    cell = interrupted(worker, "print('go'); await asyncio.sleep(60)")
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    assert worker.run("task.done(), len(ticks) > 1").result == "(False, True)"
    worker.run("task.cancel()")


def test_a_handler_of_the_users_own_is_replaced_after_the_cell(worker: WorkerDriver) -> None:
    """A cell that ignores or blocks SIGINT does so for itself only."""
    worker.run(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]);"
    )
    cell = interrupted(worker, "import time; print('go'); time.sleep(60)")
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]


def test_a_storm_of_interrupts_tears_no_frame(worker: WorkerDriver) -> None:
    """Interrupts in the midst of prints, displays and sub-calls leave the link whole."""
    worker.run("import itertools\ncaught = 0")
    number = worker.start(
        "for i in itertools.count():\n"
        "    try:\n"
        "        print('x' * 500); display(i); sub_RLM('y' * 1000)\n"
        "        if caught >= 100: break\n"
        "    except KeyboardInterrupt: caught += 1\n"
    )
    count = 0

    def seen(message: object) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0 and count < 3_000:
            worker.interrupt()

    def answer(message: messages.FromWorker) -> messages.ToWorker | None:
        return echo(message)

    cell = worker.finish(number, answer=answer, seen=seen)
    # An interrupt between two statements of the handler ends the loop early, which is fine.
    assert cell.finished.ok or cell.errors[0].ename == "KeyboardInterrupt"
    assert int(worker.run("caught").result or 0) > 0
    assert worker.run("sub_RLM('whole')", answer=echo).result == "'WHOLE'"


@pytest.mark.parametrize("way", ["KeyboardInterrupt", "ValueError"])
def test_an_error_is_told_though_showing_it_is_interrupted_or_fails(
    worker: WorkerDriver, way: str
) -> None:
    """A second interrupt may come while the first one's traceback is made."""
    cell = worker.run(
        "class Odd(Exception):\n"
        f"    def _render_traceback_(self): raise {way}\n"
        "raise Odd('as it is')"
    )
    assert [(error.ename, error.evalue) for error in cell.errors] == [("Odd", "as it is")]
    assert cell.errors[0].traceback[-1] == "Odd: as it is\n"
    assert cell.finished.error == cell.errors[0]


def test_an_interrupt_while_the_kernel_does_not_read(worker: WorkerDriver) -> None:
    """A cell blocked in printing can be interrupted, and what it had begun to send arrives."""
    number = worker.start("print('go')\nwhile True: print('x' * 100_000)")
    worker.wait_for(messages.Emit)
    worker.interrupt()
    worker.interrupt()
    cell = worker.finish(number)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    assert worker.run("'alive'").result == "'alive'"
