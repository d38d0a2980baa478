"""``python -m benchmarks``: all figures, one JSON line each."""

from __future__ import annotations

import os
import platform
import sys

from benchmarks import (
    bench_batch,
    bench_faults,
    bench_kernel,
    bench_prompt,
    bench_subcalls,
    bench_vllm,
)


def main() -> None:
    cores = os.cpu_count()
    machine = f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"
    print(f"# {machine}", file=sys.stderr)
    bench_kernel.bench_start()
    bench_kernel.bench_round_trip()
    bench_prompt.bench_load(100 * bench_prompt.MB, None)
    bench_prompt.bench_load(1000 * bench_prompt.MB, 4.0)
    bench_subcalls.main()
    bench_batch.main()
    bench_faults.main()
    bench_vllm.main()


if __name__ == "__main__":
    main()
