"""The kernel survives what code in a cell does to its worker, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.kernel.client import Kernel

DEADLINE_S = 20.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll *condition*; fail naming *what* where it does not come true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {DEADLINE_S:g} s: {what}")
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tree(kernel: Kernel) -> list[int]:
    """The kernel's process and all below it."""
    root = psutil.Process(kernel.pid)
    return [root.pid, *(child.pid for child in root.children(recursive=True))]


DEADLY = {
    "os._exit": "import os; os._exit(3)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "closed link": "import os; os.closerange(3, 64)",
}


@pytest.mark.parametrize("name", DEADLY)
def test_a_dead_worker_is_replaced_and_what_was_lost_is_named(kernel: Kernel, name: str) -> None:
    kernel.run("precious = 1")
    cell = kernel.run(DEADLY[name])
    assert cell.status == "error"
    assert "precious" in cell.evalue + "".join(cell.reply["content"]["traceback"])
    after = kernel.run("'precious' in globals(), 6 * 7")
    assert after.result == "(False, 42)"


def test_recursion_ends_as_an_error_of_the_cell(kernel: Kernel) -> None:
    assert kernel.run("def f(): return f()\nf()").ename == "RecursionError"
    assert kernel.run("1").result == "1"


@pytest.mark.parametrize(
    "code",
    ["import os; os.close(1)", "import sys; sys.stdout = None", "import sys; sys.stdout.close()"],
)
def test_a_cell_that_takes_stdout_away_does_not_take_it_from_the_next(
    kernel: Kernel, code: str
) -> None:
    kernel.run(code)
    assert kernel.run("print('still here')").text() == "still here\n"


def test_a_flood_of_output_is_bounded_and_said(own_kernel: Kernel) -> None:
    cell = own_kernel.run("line = 'x' * 99_999\nfor _ in range(10_000): print(line)", timeout=110)
    shown = sum(len(c["text"]) for c in cell.of("stream"))
    assert cell.status == "ok"
    assert 1_000_000 < shown < 12_000_000
    assert "not shown" in cell.text("stderr") + cell.text()
    assert psutil.Process(own_kernel.pid).memory_info().rss < 400_000_000
    assert own_kernel.run("len(line)").result == "99999"


def test_the_kernel_answers_while_a_cell_runs(kernel: Kernel) -> None:
    request = kernel.send("import time; time.sleep(1.5)")
    kernel.until(request, "execute_input")
    info = kernel.client.session.msg("kernel_info_request", {})
    kernel.client.control_channel.send(info)
    reply = kernel.client.get_control_msg(timeout=1)
    assert reply["content"]["rlm"]["driver"] == "rlm.driver"
    kernel.collect(request)


def test_no_process_outlives_a_killed_kernel() -> None:
    kernel = Kernel()
    kernel.run("import subprocess; p = subprocess.Popen(['sleep', '300'])")
    request = kernel.send("while True: pass")
    kernel.until(request, "execute_input")
    pids = tree(kernel)
    assert len(pids) >= 4
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.manager.provisioner.process.wait()
    wait_until(lambda: all(gone(pid) for pid in pids), "processes of a killed kernel are left")
    kernel.client.stop_channels()
    kernel.manager.cleanup_resources()


def test_no_process_outlives_a_shutdown() -> None:
    kernel = Kernel()
    pids = tree(kernel)
    kernel.close()
    wait_until(lambda: all(gone(pid) for pid in pids), "processes are left after a shutdown")


def test_a_restart_gives_an_empty_namespace() -> None:
    with Kernel() as kernel:
        kernel.run("x = 1")
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
        assert kernel.run("x").ename == "NameError"


def test_no_credential_of_the_kernel_reaches_the_worker() -> None:
    secret = "sk-" + "a1B2" * 10
    env = {
        "OPENAI_API_KEY": secret,
        "HARMLESS_NAME": secret,
        "DB_PASSWORD": "hunter2",
        "KEPT": "yes",
    }
    with Kernel(env) as kernel:
        seen = kernel.run("import os; print(dict(os.environ))").text()
    assert "hunter2" not in seen
    assert secret not in seen
    assert "'KEPT': 'yes'" in seen
