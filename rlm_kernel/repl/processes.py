"""The kernel's side of the supervisor process: start it, order it about, notice its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlm_kernel.errors import UsageError, WorkerDied
from rlm_kernel.repl import supervisor as script

__all__ = ["MARK", "SupervisorProcess", "describe_exit", "kill_marked"]

MARK = "RLM_TREE"
"""Environment variable with the id of a tree of processes. It finds them where no parent does."""

_EXIT_S = 5.0
"""Seconds that the supervisor has to end its tree; it gives its own sweep `script.SWEEP_S`."""

_MAX_NOTES = 2000
"""Bytes of the supervisor's stderr that an error quotes."""


class SupervisorOwner(Protocol):
    """Who is told what the supervisor reports. Called on the event loop."""

    def on_spawned(self, ticket: str, pid: int) -> None:
        """The worker of this ticket has this process id."""

    def on_exit(self, pid: int, status: int) -> None:
        """A worker ended with this wait status."""

    def on_supervisor_end(self) -> None:
        """The supervisor is gone, and its workers with it or soon."""


def describe_exit(status: int) -> str:
    """Say how a process ended, given its wait status (wait(2))."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def signal_name(number: int) -> str:
    """Name of a signal with what it means, such as ``SIGSEGV (Segmentation fault)``."""
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"


class SupervisorProcess:
    """A running supervisor, its control link and its process.

    Starting it is synchronous and needs no event loop: orders wait in the
    link until it is up. From `attach` on everything belongs to that loop.

    Raises
    ------
    UsageError
        The launcher, or the working folder, is not there.
    """

    def __init__(self, launcher: Sequence[str], environ: Mapping[str, str]) -> None:
        self.up = False
        """Whether it has reported; a tree whose supervisor never did is not started again."""

        self.ended = False
        """Whether its link is closed, from either end."""

        self._loop: asyncio.AbstractEventLoop | None = None
        self._acks: dict[str, asyncio.Future[None]] = {}
        self._tickets = 0
        self._notes = os.memfd_create("rlm-supervisor-notes", os.MFD_CLOEXEC)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        argv = [*launcher, sys.executable, "-I", "-S", str(Path(script.__file__).resolve())]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._notes,
                env=dict(environ),
                # A terminal's and a front end's signals are not for it: it ends with the kernel.
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            os.close(self._notes)
            raise UsageError(f"The REPL cannot be started with {argv[0]!r}: {error}.") from error
        finally:
            theirs.close()
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, of the launcher where there is one that stays."""
        return self._process.pid

    def attach(self, loop: asyncio.AbstractEventLoop, owner: SupervisorOwner) -> None:
        """Start to listen to what it reports."""
        self._loop = loop
        loop.add_reader(self._control, functools.partial(self._read, owner))

    # --- orders -------------------------------------------------------------------------------

    def spawn(self, argv: Sequence[str], cwd: str, fds: Sequence[int]) -> str:
        """Order a worker with *fds* as its link, stdout and stderr. Return its ticket."""
        ticket = self._ticket()
        self._order(fds, "spawn", ticket, cwd, *argv)
        return ticket

    def signal(self, pid: int, number: int, *, group: bool = False) -> asyncio.Future[None]:
        """Order a signal for a worker. The future is done once it was sent."""
        assert self._loop is not None
        ticket = self._ticket()
        ack = self._loop.create_future()
        self._acks[ticket] = ack
        self._order((), "signal", ticket, pid, int(number), "group" if group else "process")
        if self.ended:
            self._forget_acks()
        return ack

    def kill(self, pid: int) -> None:
        """Order the end of a worker and of all that it started."""
        self._order((), "kill", pid)

    def _ticket(self) -> str:
        self._tickets += 1
        return str(self._tickets)

    def _order(self, fds: Sequence[int], *fields: str | int) -> None:
        data = b"\0".join(os.fsencode(str(field)) for field in fields)
        # Where it is gone, or reads no more, the end of its link says so.
        with contextlib.suppress(OSError):
            if fds:
                socket.send_fds(self._control, [data], list(fds))
            else:
                self._control.send(data)

    # --- reports ------------------------------------------------------------------------------

    def _read(self, owner: SupervisorOwner) -> None:
        try:
            data = self._control.recv(script.MAX_MESSAGE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        match data.decode("utf-8", "replace").split("\0"):
            case ["up", _]:
                self.up = True
            case ["spawned", ticket, pid]:
                owner.on_spawned(ticket, int(pid))
            case ["signalled", ticket]:
                self._acknowledge(ticket)
            case ["exit", pid, status]:
                owner.on_exit(int(pid), int(status))
            case _:
                self._end(owner)

    def _acknowledge(self, ticket: str) -> None:
        ack = self._acks.pop(ticket, None)
        if ack is not None and not ack.done():
            ack.set_result(None)

    def _end(self, owner: SupervisorOwner) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._control)
        self.ended = True
        self._forget_acks()
        owner.on_supervisor_end()

    def _forget_acks(self) -> None:
        for ticket in list(self._acks):
            self._acknowledge(ticket)

    # --- end ----------------------------------------------------------------------------------

    async def wait(self) -> str:
        """Wait for the end of the process, kill it where it takes too long, and say how it ended.

        It ends by itself once its link is closed.
        """
        if self._pidfd < 0:
            return self.reap()
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        loop.add_reader(self._pidfd, _set_once, over)
        try:
            async with asyncio.timeout(_EXIT_S):
                await over
        except TimeoutError:
            self._process.kill()
        finally:
            loop.remove_reader(self._pidfd)
        return self.reap()

    def hang_up(self) -> None:
        """Close the link: it ends every process of its tree, and itself."""
        self.ended = True
        if self._control.fileno() < 0:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._control)
        self._control.close()
        self._forget_acks()

    def reap(self) -> str:
        """Collect the dead process, close what belongs to it, and say how it ended."""
        self.hang_up()
        try:
            code = self._process.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        notes = self._take_notes()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"{how} ({notes})" if notes and code else how

    def _take_notes(self) -> str:
        """Return the end of what it wrote to stderr."""
        if self._pidfd < 0:
            return ""
        size = os.fstat(self._notes).st_size
        data = os.pread(self._notes, _MAX_NOTES, max(0, size - _MAX_NOTES))
        os.close(self._notes)
        os.close(self._pidfd)
        self._pidfd = -1
        return " ".join(data.decode("utf-8", "replace").split())


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def kill_marked(mark: str, timeout_s: float = 2.0) -> None:
    """Kill every process whose environment carries *mark*: a tree that lost its supervisor.

    A process that cleared its environment and left its session is not found.

    Raises
    ------
    WorkerDied
        Some are still there after *timeout_s* seconds.
    """
    deadline = time.monotonic() + timeout_s
    while marked := _marked(f"{MARK}={mark}".encode()):
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise WorkerDied(
                f"Processes {marked} of a REPL whose supervisor is gone do not end: kill them."
            )
        await asyncio.sleep(0.001)


def _marked(entry: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # A zombie's environment is empty: it is dead and none of ours to reap.
            if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found
