"""An interrupt ends the cell: at once where Python can be reached, else with a new worker."""

from __future__ import annotations

import pytest

from tests.kernel.client import Cell, Kernel

POLITE = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "await": "import asyncio; await asyncio.sleep(600)",
    "gather": "import asyncio; await asyncio.gather(*(asyncio.sleep(600) for _ in range(5)))",
    "subprocess": "!sleep 600\nkept = 0",
    "queue": "import queue; queue.Queue().get()",
    "thread pool": "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor(2).submit(time.sleep, 3).result()",
}
UP = "print('started', flush=True)\n"
STUBBORN = {
    # Each says that it started when an interrupt can end it no more.
    "swallows it": "import time\nwhile True:\n"
    "    try:\n        print('started', flush=True); time.sleep(1)\n"
    "    except KeyboardInterrupt: pass",
    "ignores the signal": f"import signal, time\nsignal.signal(2, signal.SIG_IGN)\n{UP}"
    "time.sleep(600)",
    "never returns to Python": "import ctypes\n"
    "ctypes.PyDLL(None).system(b\"trap '' INT; echo started; sleep 600\")",
    "stopped itself": "import os, signal\n"
    f"signal.pthread_sigmask(signal.SIG_BLOCK, {{2}})\n{UP}os.kill(os.getpid(), signal.SIGSTOP)",
}


def interrupt_running(kernel: Kernel, code: str) -> Cell:
    request = kernel.send(code)
    kernel.until(request, "stream")
    kernel.interrupt()
    return kernel.collect(request, timeout=30)


@pytest.mark.parametrize("name", POLITE)
def test_an_interrupted_cell_ends_and_keeps_the_namespace(kernel: Kernel, name: str) -> None:
    kernel.run("kept = 41")
    cell = interrupt_running(kernel, UP + POLITE[name])
    assert cell.status == "error"
    assert cell.ename == "KeyboardInterrupt"
    assert kernel.run("kept + 1").result == "42"


@pytest.mark.parametrize("name", STUBBORN)
def test_a_stubborn_cell_costs_the_worker_not_the_kernel(kernel: Kernel, name: str) -> None:
    kernel.run("gone_with_it = 1")
    cell = interrupt_running(kernel, STUBBORN[name])
    assert cell.status == "error"
    assert "gone_with_it" in cell.evalue + "".join(cell.reply["content"]["traceback"])
    assert kernel.run("6 * 7").result == "42"


def test_an_interrupt_between_cells_does_nothing(kernel: Kernel) -> None:
    kernel.run("kept = 1")
    kernel.interrupt()
    assert kernel.run("kept").result == "1"


def test_input_can_be_interrupted(kernel: Kernel) -> None:
    request = kernel.send("input('?')", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=30)
    kernel.interrupt()
    assert kernel.collect(request).ename == "KeyboardInterrupt"
    assert kernel.run("1").result == "1"
