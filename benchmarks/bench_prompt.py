"""Loading P: seconds, and the peak memory of all processes together."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

import psutil

from benchmarks.figures import report
from benchmarks.kernels import RunningKernel

MB = 1_000_000
LINE = "2026-11-30T10:41:12 host-{:05d} service=billing level=info request took {:d} ms, ok\n"


class PeakMemory:
    """Highest sum of PSS of a process and all its descendants, sampled while it is open.

    PSS counts a page shared by n processes as 1/n of a page in each, so the sum is what the
    processes occupy together (proc(5), smaps_rollup).
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.base = self._now()
        self.peak = self.base

    def _now(self) -> int:
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:  # it ended between the listing and the look
                continue
        return total

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def write_prompt(path: Path, size: int) -> None:
    """About *size* bytes of log lines, made in blocks so that this process stays small."""
    block = "".join(LINE.format(i, i * 7919 % 1000) for i in range(10_000)).encode()
    with path.open("wb") as file:
        written = 0
        while written < size:
            written += file.write(block[: size - written])
        file.flush()
        os.fsync(file.fileno())  # or the disk still writes while we measure reading


def bench_load(size: int, reach_s: float | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.txt"
        write_prompt(path, size)
        with RunningKernel("rlm") as kernel:
            begin = time.perf_counter()
            kernel.execute(f"%prompt {path}")
            seconds = time.perf_counter() - begin
            assert kernel.value("len(P)") == str(size)
        # Again for the memory: whoever looks into a process's pages holds it up.
        with RunningKernel("rlm") as kernel, PeakMemory(kernel.pid) as memory:
            kernel.execute(f"%prompt {path}")
        name = f"load P of {size // MB:,} MB"
        report(name, "s", seconds, reach=reach_s)
        ratio = (memory.peak - memory.base) / size
        report(f"{name}: peak memory of all processes", "× |P|", ratio, reach=2.2)


if __name__ == "__main__":
    bench_load(100 * MB, None)
    bench_load(1000 * MB, 4.0)
