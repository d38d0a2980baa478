"""Round trip of a trivial cell and start of the kernel, beside plain ipykernel."""

from __future__ import annotations

from benchmarks.figures import report
from benchmarks.kernels import RunningKernel

STARTS = 7
CELLS = 400


def bench_start() -> None:
    """Alternating, so that both see the same machine."""
    seconds: dict[str, list[float]] = {"rlm": [], "ipykernel": []}
    for _ in range(STARTS):
        for name, samples in seconds.items():
            with RunningKernel(name) as kernel:
                samples.append(kernel.started_s)
    report(
        "kernel start to the end of the first cell",
        "s",
        seconds["rlm"],
        peer="ipykernel",
        theirs=seconds["ipykernel"],
        reach=1.5,
        samples=STARTS,
    )


def bench_round_trip() -> None:
    """Cell by cell in turn, after both are warm."""
    with RunningKernel("rlm") as rlm, RunningKernel("ipykernel") as ipykernel:
        for _ in range(30):
            rlm.execute("pass")
            ipykernel.execute("pass")
        ours, theirs = [], []
        for _ in range(CELLS):
            ours.append(rlm.execute("pass") * 1e3)
            theirs.append(ipykernel.execute("pass") * 1e3)
    report(
        "trivial cell round trip",
        "ms",
        ours,
        peer="ipykernel",
        theirs=theirs,
        reach=1.0,
        samples=CELLS,
    )


if __name__ == "__main__":
    bench_start()
    bench_round_trip()
