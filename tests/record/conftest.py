from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.record import Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.rlm.sqlite"


@pytest.fixture
def record(path: Path) -> Iterator[Record]:
    with Record.open(path) as opened:
        yield opened
