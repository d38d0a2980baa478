"""The command line as a person runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.scripted import ScriptedServer, serve_in_thread

Command = Callable[..., "subprocess.CompletedProcess[str]"]

ENVIRON = {"OPENAI_API_KEY": "sk-of-the-test", "NO_COLOR": "1"}


@pytest.fixture
def jupyter_rlm(tmp_path: Path) -> Command:
    """Runs ``jupyter rlm`` with arguments, in an empty folder."""

    def run(
        *args: str, stdin: bytes = b"", timeout: float = 100, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "rlm_kernel.app.main", *args],
            cwd=tmp_path,
            env={**os.environ, **ENVIRON, **environ},
            input=stdin,
            capture_output=True,
            timeout=timeout,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("one line\n" * 500 + "the needle is 42\n" + "another line\n" * 500)
    return path


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Root and sub-model behind one URL; tests fill its script."""
    with serve_in_thread(ScriptedServer()) as running:
        yield running
