"""A batch of 10,000 calls from one cell: memory, record, and answers to others meanwhile."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Self

import psutil

from benchmarks.bench_subcalls import zero_latency_server
from benchmarks.figures import report
from benchmarks.kernels import RunningKernel

CALLS = 10_000
PROMPT_CHARS = 1_000
PAUSE_S = 0.02


class RoundTrips:
    """Sends messages of a widget, one after the other, while it is open.

    They are what a kernel has to answer while a cell runs; others wait behind the cell. The
    answer that counts is the status that says that the message was taken.
    """

    def __init__(self, kernel: RunningKernel) -> None:
        self._client = kernel.manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.seconds: list[float] = []

    def _ask(self) -> None:
        client = self._client
        while not self._stop.wait(PAUSE_S):
            message = client.session.msg("comm_msg", {"comm_id": "nobody's", "data": {}})
            begin = time.perf_counter()
            client.shell_channel.send(message)
            request = message["header"]["msg_id"]
            while client.get_iopub_msg(timeout=60)["parent_header"].get("msg_id") != request:
                pass
            self.seconds.append(time.perf_counter() - begin)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.stop_channels()


def pss(pid: int) -> int:
    """Bytes that the process occupies, shared pages shared out (proc(5), smaps_rollup)."""
    return int(psutil.Process(pid).memory_full_info().pss)


def batch(number: int) -> str:
    """A cell whose prompts are those of no other number."""
    return (
        f"r = llm_query_batched([f'{number} {{i}}: '.ljust({PROMPT_CHARS}, 'x')"
        f" for i in range({CALLS})])\n"
        f"assert r == ['ok'] * {CALLS}, r[:3]\n"
        "del r"
    )


def recorded(notebook: Path) -> int:
    """Calls of the record with an end that is no failure."""
    with closing(sqlite3.connect(notebook.with_suffix(".rlm.sqlite"))) as record:
        (number,) = record.execute("SELECT count(*) FROM subcalls WHERE state = 'done'").fetchone()
        return int(number)


def main() -> None:
    name = f"a batch of {CALLS:,} calls"
    with tempfile.TemporaryDirectory() as folder, zero_latency_server() as url:
        notebook = Path(folder) / "bench.ipynb"
        os.environ["RLM_SUB"] = f"openai:zero@{url}"
        os.environ["RLM_NOTEBOOK"] = str(notebook)
        with RunningKernel("rlm") as kernel:
            kernel.execute("llm_query_batched(['warm'] * 32);")
            before = pss(kernel.pid)
            kernel.execute(batch(1))
            grown = pss(kernel.pid) - before
            with RoundTrips(kernel) as trips:
                kernel.execute(batch(2))
            assert recorded(notebook) == 2 * CALLS + 32
    report(f"{name}: growth of the kernel process", "MB", grown / 1e6, reach=60)
    slowest = max(trips.seconds)
    report(
        f"{name}: slowest answer of the kernel to another message",
        "s",
        slowest,
        reach=0.05,
        messages=len(trips.seconds),
        median=sorted(trips.seconds)[len(trips.seconds) // 2],
    )


if __name__ == "__main__":
    main()
