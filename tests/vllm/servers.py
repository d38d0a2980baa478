"""Real vLLM servers, started and stopped as a person does it: with ``jupyter rlm serve``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlm_kernel.subcalls.vllm.registry import Registry, ServerEntry

__all__ = ["CONTEXT", "MODEL", "Machine", "Server", "until"]

MODEL = "smollm2"
CONTEXT = 2048
START_S = 600
VLLM_ARGS = (
    *("--served-model-name", MODEL),
    # Many a CPU does not know bfloat16, and is five times as slow with it.
    *("--dtype", "float32"),
    *("--max-model-len", str(CONTEXT)),
    # Compiling takes two minutes or more of every start, and makes nothing here faster that is
    # tested.
    "--enforce-eager",
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    # Else JSON may have any white space, of which a small model does not come to an end.
    *(
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ),
    "--enable-log-requests",  # each with how it is to be sampled
)
ENVIRON = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Two servers on two cores: left to itself each would bind its only thread to the same one.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> float:
    """Wait for *condition*; fail with *what* if it does not come. Returns the seconds it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s, what
        time.sleep(0.01)
    return time.monotonic() - begin


class Server:
    """One running server, seen from outside of rlm-kernel."""

    def __init__(self, entry: ServerEntry) -> None:
        self.entry = entry
        self.name, self.url, self.log = entry.name, entry.url, entry.log
        self.root = entry.url.removesuffix("/v1")
        self.spec = f"vllm:{MODEL}@{self.url}"

    def metrics(self) -> dict[str, float]:
        """What ``/metrics`` tells: by name without its ``vllm:``, the sum over all labels."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def metric(self, name: str) -> float:
        """One of `metrics`."""
        return self.metrics()[name]

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, neither running nor waiting."""
        metrics = self.metrics()
        return not metrics["num_requests_running"] and not metrics["num_requests_waiting"]

    def post(self, path: str) -> None:
        """A POST without a body, which it grants."""
        request = urllib.request.Request(self.root + path, method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that it answers a POST with."""
        request = urllib.request.Request(
            self.root + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def tokens_of(self, prompt: str) -> int:
        """Tokens of a conversation that is *prompt* alone, as the server counts them."""
        messages = [{"role": "user", "content": prompt}]
        return int(self.ask("/tokenize", {"model": MODEL, "messages": messages})["count"])

    def kill_api_server(self) -> None:
        """As the kernel does where memory runs out: engine and workers are not told."""
        os.kill(self.entry.pid, signal.SIGKILL)


class Machine:
    """The command line of rlm-kernel, with a registry of servers of its own.

    Parameters
    ----------
    folder
        Where the registry is.
    python
        The interpreter that has vLLM.
    model
        The folder of the model.
    """

    def __init__(self, folder: Path, python: Path, model: Path) -> None:
        self.folder, self.python, self.model = folder, python, model
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RLM_")},
            **ENVIRON,
            "NO_COLOR": "1",
            "RLM_RUNTIME_DIR": str(folder),
        }
        self.registry = Registry.of(self.environ)
        self._sessions: set[int] = set()

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """``jupyter rlm`` with *args*, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "rlm_kernel.app.main", *args],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S + 60,
        )

    def serve(self, name: str, *args: str) -> Server:
        """Start a server and wait until it answers."""
        options = ["--gpus", "none", "--python", str(self.python), "--name", name]
        options += ["--timeout", str(START_S)]
        done = self.command("serve", str(self.model), *options, "--", *VLLM_ARGS, *args)
        entries = {entry.name: entry for entry in self.registry.entries()}
        self._sessions |= {entry.pid for entry in entries.values()}
        assert done.returncode == 0, done.stderr + self._end_of_log(entries.get(name))
        return Server(entries[name])

    def stop(self, name: str) -> subprocess.CompletedProcess[str]:
        """``jupyter rlm serve --stop`` *name*."""
        return self.command("serve", "--stop", name)

    def close(self) -> None:
        """Stop all servers, and check that none of their processes is left."""
        done = self.stop("all")
        left = self.left_over()
        for session in {int(line.split()[1]) for line in left}:
            os.killpg(session, signal.SIGKILL)
        assert not left, f"processes are left behind: {left}"
        assert done.returncode == 0, done.stderr

    def left_over(self, *servers: Server) -> list[str]:
        """Living processes of *servers*, or of all that were ever started here, as ``ps`` lists
        them: number, session, state, command."""
        wanted = {server.entry.pid for server in servers} or self._sessions
        listed = subprocess.run(
            ["ps", "-eo", "pid=,sid=,state=,comm="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        fields = [line.split(maxsplit=3) for line in listed]
        return [" ".join(words) for words in fields if int(words[1]) in wanted and words[2] != "Z"]

    @staticmethod
    def _end_of_log(entry: ServerEntry | None) -> str:
        path = Path(entry.log) if entry else None
        return path.read_text(errors="replace")[-3000:] if path and path.is_file() else ""
