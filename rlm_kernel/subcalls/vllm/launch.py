"""Starts servers, waits until they answer, and ends them with all that they started.

What vLLM does at its ends (0.32, seen): an API server that gets SIGTERM while requests are under
way kills its engine and then stays until its clients have gone; one that is killed leaves its
engine and workers with all their memory; an engine that fails takes the server with it, exit
code 0. So a server is a session of processes here, and is gone when that is empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlm_kernel.errors import RLMError
from rlm_kernel.subcalls.vllm.interpreter import Interpreter
from rlm_kernel.subcalls.vllm.log import LogReader, failure_in
from rlm_kernel.subcalls.vllm.metrics import is_ready, served_models
from rlm_kernel.subcalls.vllm.plan import Planned, environment_for
from rlm_kernel.subcalls.vllm.processes import (
    ProcessInfo,
    end_sessions,
    listens,
    machine_id,
    process_at,
    send,
)
from rlm_kernel.subcalls.vllm.registry import Registry, ServerEntry

__all__ = ["Started", "start_server", "stop_servers", "wait_until_ready", "why_it_ended"]

POLL_S = 0.2
TERM_S = 10.0
"""What a server gets to end by itself. An idle one needs up to 6 s; one whose clients hold on
never ends, and its engine is dead by then."""


@dataclass
class Started:
    """A server that this process started."""

    entry: ServerEntry
    process: subprocess.Popen[bytes]
    port: int
    log: LogReader

    def reap(self, patience: float) -> None:
        """Take note of its end, for which it gets *patience* seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)


def start_server(
    planned: Planned,
    interpreter: Interpreter,
    registry: Registry,
    environ: Mapping[str, str],
) -> Started:
    """Start the process of *planned* and write it into *registry*, which is locked by the caller.
    It does not answer yet.

    Raises
    ------
    UsageError
        Its name is taken, or the registry cannot be written.
    RLMError
        The process cannot be started.
    """
    log = registry.log_path(planned.name)
    command = [interpreter.path, *interpreter.module, *planned.args]
    registry.check_name(planned.name)
    # Not truncated: an engine that was left behind would go on writing into the new log.
    log.unlink(missing_ok=True)
    process = _spawn(command, log, environment_for(planned, environ))
    try:
        info = process_at(process.pid)
        entry = ServerEntry(
            name=planned.name,
            group=planned.group,
            model=planned.model,
            url=planned.url,
            gpus=planned.gpus,
            pid=process.pid,
            start=info.start if info is not None else -1,
            machine=machine_id(),
            started_at=time.time(),
            ready=False,
            log=str(log),
            python=interpreter.path,
            args=planned.args,
        )
        registry.add(entry)
    except BaseException:
        end_sessions([process.pid])
        process.wait()
        raise
    return Started(entry, process, planned.port, LogReader(log))


def _spawn(
    command: Sequence[str], log: os.PathLike[str], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,  # neither Ctrl-C nor the end of the terminal is for it
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RLMError(
            f"the server cannot be started ({error.strerror}: {error.filename}): "
            "check --python and the folder of the servers"
        ) from error


def wait_until_ready(
    started: Sequence[Started],
    registry: Registry,
    *,
    limit: float,
    keep_on: Callable[[], bool],
    tell: Callable[[Started, bool], None],
) -> bool:
    """Wait until all of *started* answer; False where *keep_on* says to give up.

    *tell* is called for each of them at every look, with whether it is ready.

    Raises
    ------
    RLMError
        One ended, or *limit* seconds passed. The others go on: stop them.
    """
    deadline = time.monotonic() + limit
    waiting = list(started)
    while waiting:
        if not keep_on():
            return False
        for server in list(waiting):
            server.log.read()
            ready = _look(server, registry)
            if ready:
                waiting.remove(server)
            tell(server, ready)
        if time.monotonic() > deadline:
            name, log = waiting[0].entry.name, waiting[0].entry.log
            raise RLMError(
                f"the server {name} did not answer within {limit:.0f} s and was stopped: its last "
                f"phase was {waiting[0].log.phase!r}; read {log}, or give a longer --timeout"
            )
        if waiting:
            time.sleep(POLL_S)
    return True


def _look(server: Started, registry: Registry) -> bool:
    """Whether *server* answers; the registry is told then. Raises `RLMError` where it ended."""
    if server.process.poll() is not None:
        raise RLMError(why_it_ended(server))
    entry = server.entry
    models = served_models(entry.url) if is_ready(entry.url) else []
    # Another program may have taken the port since we looked; vLLM is about to find that out.
    if not models or not listens(entry.processes(), server.port):
        return False
    # A file of options, say, may have given it another name.
    model = entry.model if entry.model in models else models[0]
    server.entry = msgspec.structs.replace(entry, model=model, ready=True)
    registry.add(server.entry)
    return True


def why_it_ended(server: Started) -> str:
    """Why the process of *server* is gone, as one sentence."""
    code, entry = server.process.poll(), server.entry
    how = f"exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"killed by {signal.Signals(-code).name}"
    reason = failure_in(Path(entry.log))
    said = f": {reason.rstrip('.')}" if reason else ""
    return f"vLLM ended ({how}){said}; the whole log is {entry.log}"


def stop_servers(entries: Sequence[ServerEntry], registry: Registry) -> list[ProcessInfo]:
    """End all processes of *entries* and forget them, unless some are left; returns those."""
    running = [entry for entry in entries if entry.processes()]
    for entry in running:
        leader = process_at(entry.pid)
        if leader is not None and leader.start == entry.start:
            send(leader, signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    while any(entry.alive for entry in running) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    # All at once: what takes long to end does so while the others do.
    left = end_sessions([entry.pid for entry in running if entry.processes()])
    held = {process.session for process in left}
    for entry in entries:
        if entry not in running or entry.pid not in held:
            registry.remove(entry)
    return left
