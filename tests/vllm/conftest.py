"""One real server for all tests, and kernels that ask it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.subcalls.vllm.interpreter import PYTHON_VARIABLE
from tests.kernel.client import Cell, Kernel
from tests.vllm.model import converted_model
from tests.vllm.servers import Machine, Server

LIMIT_S = 900
"""Of one test, the start of a server included: ten times what it takes on two idle cores."""

PATIENCE_S = 300.0
"""Of one cell."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine without servers; those that tests start are stopped at the end."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        pytest.skip("there is no vLLM here: make test-vllm installs it, where that can be done")
    assert shutil.which(python), f"{PYTHON_VARIABLE} names no program"
    model = converted_model(Path(python))
    machine = Machine(tmp_path_factory.mktemp("servers"), Path(python), model)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="session")
def server(machine: Machine) -> Server:
    """The server that all tests share. None may leave a request in it."""
    return machine.serve("one")


class RecordedKernel(Kernel):
    """A kernel that asks the servers of a `Machine`, and its record."""

    def __init__(self, machine: Machine, folder: Path, **environ: str) -> None:
        self.record = folder / "test.rlm.sqlite"
        notebook = {"RLM_NOTEBOOK": str(folder / "test.ipynb")}
        super().__init__({**machine.environ, **notebook, **environ}, cwd=str(folder))

    def collect(self, request: str, timeout: float = PATIENCE_S) -> Cell:
        """As of a `Kernel`, with the patience that a model on a busy CPU needs."""
        return super().collect(request, timeout)

    def run(self, code: str, timeout: float = PATIENCE_S, **kwargs: Any) -> Cell:
        """As of a `Kernel`, with more patience."""
        return super().run(code, timeout, **kwargs)

    def value(self, expression: str) -> str:
        """``repr`` of *expression*, evaluated in a cell."""
        cell = self.run(f"print(repr(({expression})))")
        assert cell.status == "ok", cell.evalue
        return cell.text().strip()

    def calls(self, where: str = "1") -> list[dict[str, Any]]:
        """Sub-calls in the record, in the order in which they were started."""
        with closing(sqlite3.connect(f"file:{self.record}?mode=ro", uri=True)) as record:
            record.row_factory = sqlite3.Row
            rows = record.execute(f"SELECT * FROM subcalls WHERE {where}").fetchall()
        return [dict(row) for row in rows]


@pytest.fixture
def kernel_with(machine: Machine, tmp_path: Path) -> Iterator[Callable[..., RecordedKernel]]:
    """Starts kernels with variables of the environment; ends them."""
    kernels: list[RecordedKernel] = []

    def start(**environ: str) -> RecordedKernel:
        folder = tmp_path / f"kernel-{len(kernels)}"
        folder.mkdir()
        kernels.append(RecordedKernel(machine, folder, **environ))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(server: Server, kernel_with: Callable[..., RecordedKernel]) -> RecordedKernel:
    """A kernel whose sub-calls go to `server`."""
    return kernel_with(RLM_SUB=server.spec)
