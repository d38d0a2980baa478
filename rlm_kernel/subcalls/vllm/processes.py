"""Processes as ``/proc`` shows them (proc(5)), and how to end a whole session of them.

A number of a process is used again after its end. So a process is known by its number *and* the
time of its start, and signals go through a descriptor of the process (pidfd_open(2)) that was
looked at after it was opened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = [
    "KILL_S",
    "ProcessInfo",
    "end_sessions",
    "listens",
    "machine_id",
    "members",
    "process_at",
    "send",
    "writes_to",
]

_PROC = Path("/proc")
_POLL_S = 0.05
KILL_S = 30.0
"""Seconds for killed processes to be gone: one that gives back a GPU's memory needs several."""

_LISTEN = "0A"
"""State of a socket in ``/proc/net/tcp``."""

_DEAD = "ZXx"
"""States of threads that have ended; of processes that only wait for their parent to take note."""


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process that lives."""

    pid: int
    session: int
    start: int
    """Clock ticks since the machine was started."""


def machine_id() -> str:
    """This machine since its last start: process numbers mean nothing on another."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {boot}"


def process_at(pid: int) -> ProcessInfo | None:
    """The process *pid*; ``None`` where there is none that lives, or it is another user's."""
    folder = _PROC / str(pid)
    try:
        # The folder of an undumpable process is root's, whoever's it is.
        if folder.stat().st_uid not in (os.geteuid(), 0):
            return None
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program stands in brackets and may hold blanks and brackets.
    fields = stat.rpartition(")")[2].split()
    state, session, threads, start = fields[0], int(fields[3]), int(fields[17]), int(fields[19])
    # The state is the first thread's. What the process holds is freed when its last one ends.
    return None if state in _DEAD and threads <= 1 else ProcessInfo(pid, session, start)


def members(*sessions: int) -> list[ProcessInfo]:
    """The living processes of *sessions*."""
    every = (process_at(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return [process for process in every if process is not None and process.session in sessions]


def writes_to(process: ProcessInfo, path: str) -> bool:
    """Whether standard output or error of *process* is the file *path*."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(_PROC / str(process.pid) / "fd" / str(number)) == path:
                return True
    return False


def listens(processes: Sequence[ProcessInfo], port: int) -> bool:
    """Whether one of *processes* listens on TCP *port*; True where the system does not show it."""
    sockets = _listening(port)
    if sockets is None:
        return True
    for process in processes:
        folder = _PROC / str(process.pid) / "fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    if os.readlink(folder / name) in sockets:
                        return True
    return False


def _listening(port: int) -> set[str] | None:
    """The sockets that listen on *port*, as links of descriptors name them; ``None`` unknown."""
    found = set()
    try:
        for table in ("tcp", "tcp6"):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    except OSError:
        return None
    return found


def send(process: ProcessInfo, number: signal.Signals) -> bool:
    """Send a signal to *process*; False where it is gone already."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if process_at(process.pid) != process:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def end_sessions(sessions: Sequence[int], patience: float = KILL_S) -> list[ProcessInfo]:
    """Kill all processes of *sessions*, those too that they start meanwhile.

    Returns those that are still there after *patience* seconds.
    """
    deadline = time.monotonic() + patience
    while left := members(*sessions):
        for process in left:
            send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return left
