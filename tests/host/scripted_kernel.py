"""A kernel that speaks ``rlm.driver`` from a script: the other party, with its faults.

The first argument names the scenario, which begins with the cell ``%%rlm``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
from comm.base_comm import BaseComm
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from rlm_kernel.driver.protocol import (
    TARGET,
    CloseCell,
    Delta,
    Final,
    OpenCell,
    Operation,
    Refused,
    RunCell,
    Snapshot,
    State,
    Update,
    source_sha,
)

RUN = "0123456789ab"
CELL = f"{RUN}-1"
SOURCE = "print('it', 'ran')"

Ops = list[Operation]


def state() -> State:
    return State(run_id=RUN, state="proposing", turn=1)


def opened() -> OpenCell:
    return OpenCell(cell_id=CELL, after="start", turn=1, run_id=RUN)


def closed(source: str = SOURCE) -> CloseCell:
    return CloseCell(cell_id=CELL, sha=source_sha(source), source=source)


def run(sha: str = "") -> RunCell:
    return RunCell(cell_id=CELL, sha=sha or source_sha(SOURCE))


def final() -> Final:
    return Final(run_id=RUN, state="answered", response="done")


class ScriptedKernel(IPythonKernel):  # type: ignore[misc]
    """Answers the host from the scenario `name`."""

    name = ""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.comm_manager.register_target(TARGET, self._opened)
        self._comm: BaseComm | None = None
        self.shell.register_magic_function(lambda line: None, "line", "prompt")
        self.shell.register_magic_function(self._start, "cell", "rlm")

    def _opened(self, comm: BaseComm, message: dict[str, Any]) -> None:
        self._comm = comm
        comm.on_msg(self._asked)
        if self.name != "mute":
            self.send(0)

    def send(self, seq: int, *ops: Operation) -> None:
        assert self._comm is not None
        self._comm.send(msgspec.to_builtins(Update(seq, list(ops))))

    def _start(self, line: str, cell: str) -> None:
        SCENARIOS[self.name](self)

    def _asked(self, message: dict[str, Any]) -> None:
        ANSWERS.get(self.name, ignore)(self, message["content"]["data"])


def ignore(kernel: ScriptedKernel, data: dict[str, Any]) -> None:
    """Nothing is answered."""


def gap(kernel: ScriptedKernel) -> None:
    """Update 2 of 4 is lost on the way."""
    kernel.send(1, state(), opened())
    kernel.send(3, run())


def after_gap(kernel: ScriptedKernel, data: dict[str, Any]) -> None:
    if data["op"] == "need":
        for seq, ops in enumerate(([closed()], [run()]), 2):
            kernel.send(seq, *ops)
        kernel.send(4, final())


def gap_snapshot(kernel: ScriptedKernel) -> None:
    """What was lost cannot be repeated; the whole is told instead."""
    kernel.send(1, state(), opened())
    kernel.send(900, state())


def after_gap_snapshot(kernel: ScriptedKernel, data: dict[str, Any]) -> None:
    if data["op"] == "need":
        cell = {"cell_id": CELL, "after": "start", "turn": 1, "source": SOURCE}
        told = {"run_id": RUN, "query": "q", "state": "executing", "turn": 1}
        cells = [{**cell, "kind": "code", "state": "closed"}]
        kernel.send(901, msgspec.convert({"op": "snapshot", **told, "cells": cells}, Snapshot))
        kernel.send(902, run(), final())


def misfit(kernel: ScriptedKernel) -> None:
    """A delta does not fit what the host has."""
    kernel.send(1, state(), opened(), Delta(cell_id=CELL, offset=7, text="lost"))


def after_misfit(kernel: ScriptedKernel, data: dict[str, Any]) -> None:
    if data["op"] == "conflict":
        response = f"conflict at {data['have']}"
        kernel.send(2, Final(run_id=RUN, state="answered", response=response))


def stale(kernel: ScriptedKernel) -> None:
    """The host is told to run another text than its cell has."""
    kernel.send(1, state(), opened(), closed(), run(source_sha("something else")))


def double(kernel: ScriptedKernel) -> None:
    """An update comes twice."""
    kernel.send(1, state(), opened(), Delta(cell_id=CELL, offset=0, text=SOURCE))
    kernel.send(1, state(), opened(), Delta(cell_id=CELL, offset=0, text=SOURCE))
    kernel.send(2, closed(), run(), final())


def child(kernel: ScriptedKernel) -> None:
    """A child run ends before the run that the host waits for."""
    kernel.send(1, state(), Final(run_id="ba9876543210", state="failed", reason="a child's"))
    kernel.send(2, final())


def garbage(kernel: ScriptedKernel) -> None:
    """An update of another version."""
    assert kernel._comm is not None
    kernel._comm.send({"seq": 1, "ops": [{"op": "dance"}]})


def refused(kernel: ScriptedKernel) -> None:
    kernel.send(1, Refused(reason="not like this"), state(), final())


def silent(kernel: ScriptedKernel) -> None:
    """The cell ends, and no run begins."""


SCENARIOS: dict[str, Callable[[ScriptedKernel], None]] = {
    function.__name__: function
    for function in (gap, gap_snapshot, misfit, stale, double, child, garbage, refused, silent)
}
ANSWERS = {
    "gap": after_gap,
    "gap_snapshot": after_gap_snapshot,
    "misfit": after_misfit,
    "stale": after_misfit,
}

if __name__ == "__main__":
    ScriptedKernel.name = sys.argv.pop(1)
    IPKernelApp.launch_instance(kernel_class=ScriptedKernel)
