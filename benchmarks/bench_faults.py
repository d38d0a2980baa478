"""A batch that is interrupted, and one whose servers fail: what becomes of its calls, how soon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import report
from benchmarks.kernels import RunningKernel

CALLS = 1_000
FAIL_EVERY = 50
ROUNDS = 5
ROOT = Path(__file__).parents[1]


class Server(NamedTuple):
    """A slow server in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def running(self) -> int:
        """Completions under way."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/running") as reply:
            return int(reply.read())


@contextmanager
def slow_server(seconds: float, fail_every: int = 0) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.slow_server", str(seconds), str(fail_every)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield Server(process, f"http://127.0.0.1:{process.stdout.readline().strip()}/v1")
    finally:
        process.stdin.close()
        process.wait(10)


@contextmanager
def kernel_on(spec: str) -> Iterator[RunningKernel]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLM_SUB"] = spec
        os.environ["RLM_NOTEBOOK"] = str(Path(folder) / "bench.ipynb")
        with RunningKernel("rlm") as kernel:
            kernel.execute("llm_query_batched(['warm'] * 4);")
            yield kernel


def bench_interrupt() -> None:
    """Seconds from the interrupt of a cell until the server works on nothing."""
    seconds = []
    with slow_server(2.0) as server, kernel_on(f"openai:zero@{server.url}") as kernel:
        for number in range(ROUNDS):
            code = f"llm_query_batched([f'{number} {{i}}' for i in range({CALLS})])"
            request = kernel.client.execute(code, stop_on_error=False)  # aborts none after it
            while server.running() < 32:
                time.sleep(0.01)
            begin = time.perf_counter()
            kernel.manager.interrupt_kernel()
            while server.running():
                time.sleep(0.002)
            seconds.append(time.perf_counter() - begin)
            while kernel.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] != request:
                pass
    report("from interrupt to an idle server, 32 calls under way", "s", max(seconds), reach=1.0)


def bench_loss() -> None:
    """2 % of the calls fail, and one of two servers is killed in the middle."""
    with (
        slow_server(0.02, FAIL_EVERY) as one,
        slow_server(0.02, FAIL_EVERY) as two,
        kernel_on(f"openai:zero@{one.url},{two.url}") as kernel,
    ):
        timer = threading.Timer(0.2, two.process.kill)
        timer.start()
        kernel.execute(f"r = llm_query_batched([f'{{i}}' for i in range({CALLS})])")
        timer.join()
        answered = int(kernel.value("sum(x == 'ok' for x in r)"))
        failed = int(kernel.value("sum(isinstance(x, Exception) for x in r)"))
    report(
        f"of {CALLS:,} calls, 1 of {FAIL_EVERY} refused and one of two servers killed: accounted",
        "calls",
        answered + failed,
        reach=CALLS,
        better="higher",
        answered=answered,
        failed=failed,
    )


def main() -> None:
    bench_interrupt()
    bench_loss()


if __name__ == "__main__":
    main()
