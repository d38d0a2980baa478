"""Real kernel processes. One is shared by the tests that leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.client import Kernel
from tests.kernel.held import Held
from tests.servers.scripted import serve_in_thread


@pytest.fixture(scope="session")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    with Kernel({"RLM_NOTEBOOK": str(folder / "tests.ipynb")}, cwd=str(folder)) as kernel:
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Kernel:
    """The shared kernel with an empty namespace."""
    assert shared_kernel.run("%reset -f").status == "ok"
    return shared_kernel


@pytest.fixture
def own_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test, which may do to it what it likes."""
    with Kernel({"RLM_NOTEBOOK": str(tmp_path / "own.ipynb")}, cwd=str(tmp_path)) as kernel:
        yield kernel


@pytest.fixture
def held() -> Iterator[Held]:
    """A sub-model that answers when the test says so."""
    held = Held()
    with serve_in_thread(held.server):
        yield held


@pytest.fixture
def sub_kernel(held: Held, tmp_path: Path) -> Iterator[Kernel]:
    """A kernel for one test, whose sub-calls go to `held`."""
    env = {"RLM_NOTEBOOK": str(tmp_path / "own.ipynb"), "RLM_SUB": held.spec, "OPENAI_API_KEY": "k"}
    with Kernel(env, cwd=str(tmp_path)) as kernel:
        yield kernel
