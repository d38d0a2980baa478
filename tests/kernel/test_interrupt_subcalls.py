"""However a batch ends before its replies are there, the server has nothing left to do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlm_kernel.driver.progress_bar import tally_in
from rlm_kernel.driver.protocol import TARGET
from tests.kernel.client import TIMEOUT_S, Kernel, Message
from tests.kernel.held import Held
from tests.kernel.test_front_ends import send_comm
from tests.servers.scripted import ScriptedServer, serve_in_thread

SOME_NOW = "sub_RLM(['now'] * 5 + [f'held {n}' for n in range(5)])"
MANY = "sub_RLM([f'held {n}' for n in range(3000)])"


def bar_of(message: Message) -> tuple[int, int] | None:
    """What the bar in *message* says to be done, of how many."""
    tally = tally_in(message["content"].get("metadata") or {})
    return None if tally is None else (tally.done, tally.calls)


def start(kernel: Kernel, held: Held, code: str, active: int) -> str:
    """Send a cell; once *active* of its calls are under way, its id."""
    request = kernel.send(code, cell_id="a-cell")
    held.until(lambda: held.server.active >= active)
    return request


@pytest.mark.parametrize(
    "code",
    [
        SOME_NOW,
        "await sub_RLM.aio(['now'] * 5 + [f'held {n}' for n in range(5)])",
    ],
)
def test_an_interrupt_ends_the_calls_on_the_server_and_keeps_what_had_finished(
    sub_kernel: Kernel, held: Held, code: str
) -> None:
    request = start(sub_kernel, held, code, active=5)
    while bar_of(sub_kernel.client.get_iopub_msg(timeout=TIMEOUT_S)) != (5, 10):
        pass
    sub_kernel.interrupt()

    assert sub_kernel.collect(request).ename == "KeyboardInterrupt"
    held.until_idle()
    assert held.server.cancelled == 5
    assert sub_kernel.run("sorted(sub_RLM.last.done.items())").result == str(
        [(n, "R:now") for n in range(5)]
    )
    others = sub_kernel.run("{type(one).__name__ for one in sub_RLM.last[5:]}")
    assert others.result == "{'SubcallError'}"


def test_after_an_interrupt_no_call_of_the_queue_is_sent(sub_kernel: Kernel, held: Held) -> None:
    request = start(sub_kernel, held, MANY, active=8)
    sub_kernel.interrupt()
    assert sub_kernel.collect(request).ename == "KeyboardInterrupt"
    held.until_idle()

    sent = len(held.server.requests)
    assert sent < 3000
    assert sub_kernel.run("sub_RLM('now')").result == "'R:now'"
    assert len(held.server.requests) == sent + 1
    assert sub_kernel.run("budget()['subcalls_reserved']").result == "0"


def test_two_interrupts_are_as_one(sub_kernel: Kernel, held: Held) -> None:
    sub_kernel.run("kept = 41")
    request = start(sub_kernel, held, MANY, active=8)
    sub_kernel.interrupt()
    sub_kernel.interrupt()

    assert sub_kernel.collect(request).ename == "KeyboardInterrupt"
    held.until_idle()
    assert sub_kernel.run("kept + 1").result == "42"


def test_a_cell_that_catches_the_interrupt_goes_on_without_its_calls(
    sub_kernel: Kernel, held: Held
) -> None:
    code = f"try:\n    {MANY}\nexcept KeyboardInterrupt:\n    print(sub_RLM('now'))"
    request = start(sub_kernel, held, code, active=8)
    sub_kernel.interrupt()
    cell = sub_kernel.collect(request)

    assert (cell.status, cell.text()) == ("ok", "R:now\n")
    held.until_idle()


def test_threads_of_an_interrupted_cell_hear_of_it(sub_kernel: Kernel, held: Held) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    list(pool.map(sub_RLM, ['held'] * 4))"
    )
    request = start(sub_kernel, held, code, active=4)
    sub_kernel.interrupt()

    assert sub_kernel.collect(request).status == "error"
    held.until_idle()
    assert sub_kernel.run("1").result == "1"


def die(kernel: Kernel) -> None:
    kernel.manager.signal_kernel(signal.SIGKILL)


def shut_down(kernel: Kernel) -> None:
    kernel.client.shutdown()


def restart(kernel: Kernel) -> None:
    kernel.manager.restart_kernel(now=False)


@pytest.mark.parametrize("end", [die, shut_down, restart])
def test_the_end_of_the_kernel_ends_the_calls_on_the_server(
    sub_kernel: Kernel, held: Held, end: Callable[[Kernel], None]
) -> None:
    start(sub_kernel, held, MANY, active=8)
    end(sub_kernel)

    held.until_idle()
    assert held.server.cancelled > 0


def test_the_end_of_a_worker_ends_its_calls_on_the_server(sub_kernel: Kernel, held: Held) -> None:
    code = f"import os, threading\nthreading.Thread(target=lambda: {MANY}).start()\ninput()"
    request = sub_kernel.send(code, cell_id="a-cell", allow_stdin=True)
    held.until(lambda: held.server.active >= 8)
    sub_kernel.client.get_stdin_msg(timeout=30)
    sub_kernel.client.input("go on")
    assert sub_kernel.collect(request).status == "ok"
    assert sub_kernel.run("os._exit(3)").status == "error"

    held.until_idle()
    assert sub_kernel.run("sub_RLM('now')").result == "'R:now'"


@pytest.fixture
def started(sub_kernel: Kernel, held: Held, tmp_path: Path) -> Iterator[str]:
    """The cell of a run whose first turn waits for many sub-calls."""
    (tmp_path / "prompt.txt").write_text("all that there is to know " * 400)
    assert sub_kernel.run("%prompt prompt.txt").status == "ok"
    send_comm(
        sub_kernel,
        "watcher",
        {"op": "open", "client": "watcher", "can_drive": False},
        kind="comm_open",
        target_name=TARGET,
    )
    root = ScriptedServer([f"```repl\n{MANY}\n```", "```repl\nFinal = 1\n```"])
    with serve_in_thread(root):
        options = f"--root openai:scripted@{root.base_url} --sub {held.spec}"
        yield start(sub_kernel, held, f"%%rlm {options}\nwhat?", active=8)


def test_a_run_that_is_stopped_ends_its_calls_on_the_server(
    sub_kernel: Kernel, held: Held, started: str
) -> None:
    send_comm(sub_kernel, "watcher", {"op": "stop"})

    sub_kernel.collect(started)
    held.until_idle()
    assert "no run" in sub_kernel.run("%rlm status").text()
    assert sub_kernel.run("sub_RLM('now')").result == "'R:now'"


def test_a_run_that_is_interrupted_and_then_stopped_ends_its_calls_too(
    sub_kernel: Kernel, held: Held, started: str
) -> None:
    sub_kernel.interrupt()
    sub_kernel.collect(started)
    held.until_idle()

    sub_kernel.run("%rlm stop")
    assert "no run" in sub_kernel.run("%rlm status").text()
    assert sub_kernel.run("sub_RLM('now')").result == "'R:now'"
