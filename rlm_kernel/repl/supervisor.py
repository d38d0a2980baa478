"""The supervisor: a tiny process that starts, signals, reaps and ends workers.

It is run by path with ``python -I -S``, imports only the standard library,
has one thread and never runs anybody's code. Its fd 0 is the control link, a
SEQPACKET socket whose other end the kernel process holds; there is no other
way in. A message is its fields joined by NUL:

    kernel to supervisor
        spawn TICKET CWD ARGV…   with three descriptors: link, stdout, stderr
        signal TICKET PID SIGNAL (process | group)
        kill PID                 the worker, its group, and all that it started
    supervisor to kernel
        up PID
        spawned TICKET PID
        signalled TICKET
        exit PID STATUS          wait status; its group is dead by then

Every process below is a child of the supervisor sooner or later, because it
is a subreaper. When a worker ends, by itself or killed, everything that is
not a worker is swept: nothing that a cell started outlives its worker. When
the kernel process ends, however it ends, the control link reads end-of-file,
all is swept and the supervisor exits. It takes no parent-death signal itself:
that would take away its time to sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would be a fifth of this process's start
    from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

LINK_FD = 3
SWEEP_S = 3.0
"""Seconds to wait for killed processes: one in an uninterruptible call must not hold us up."""

MAX_MESSAGE = 64 << 10
"""Bytes of a control message."""

_RESET = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
"""Signals whose handling the supervisor (or Python) changed; a worker starts with the default."""


class Supervisor:
    """State of the supervisor process: its control link and the workers that live."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.workers: set[int] = set()
        self.ending = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._wake_read, self._wake_write = os.pipe()

    def serve(self) -> NoReturn:
        """Work until the kernel process is gone."""
        self._become_supervisor()
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        self.tell("up", os.getpid())
        while not self.ending:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    self._forget_wakes()
            # Before the next order: an order to spawn must find the last worker's rests swept.
            self.reap()
            self._take_order()
        self.end()

    def _become_supervisor(self) -> None:
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._libc.prctl(PR_SET_NAME, ctypes.c_char_p(b"rlm-supervisor"), 0, 0, 0)
        # Else a worker of the same user attaches to this process and is out of its session.
        self._prctl(PR_SET_DUMPABLE, 0)
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_term)

    def _on_term(self, *_: object) -> None:
        self.ending = True

    def _prctl(self, option: int, value: int) -> None:
        self._libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)

    def _forget_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    # --- control link -------------------------------------------------------------------------

    def tell(self, *fields: str | int) -> None:
        """Report to the kernel process. Its absence is noticed by the next read."""
        try:
            self.control.send("\0".join(map(str, fields)).encode())
        except OSError:
            self.ending = True

    def _take_order(self) -> None:
        fds: list[int] = []
        try:
            data, fds = receive(self.control)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ending = True
            return
        try:
            self._obey(os.fsdecode(data).split("\0"), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _obey(self, fields: list[str], fds: list[int]) -> None:
        match fields:
            case ["spawn", ticket, cwd, *argv] if len(fds) == 3 and argv:
                self.spawn(ticket, cwd, argv, fds)
            case ["signal", ticket, pid, number, whom]:
                self.signal(int(pid), int(number), group=whom == "group")
                self.tell("signalled", ticket)
            case ["kill", pid]:
                self.kill(int(pid))
            case _:
                print(f"rlm supervisor: order not understood: {fields[0]!r}", file=sys.stderr)

    # --- workers ------------------------------------------------------------------------------

    def spawn(self, ticket: str, cwd: str, argv: list[str], fds: list[int]) -> None:
        """Start a worker in a session of its own."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(parent, cwd, argv, fds)
        self.workers.add(pid)
        self.tell("spawned", ticket, pid)

    def _become_worker(self, parent: int, cwd: str, argv: list[str], fds: list[int]) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in _RESET:
                signal.signal(number, signal.SIG_DFL)
            # The worker sets it again; this covers the time until it does.
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            # Out of the way first: the descriptors that came may lie where they are to go.
            link, out, err = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in fds)
            for source, target in ((out, 1), (err, 2), (link, LINK_FD)):
                os.dup2(source, target, inheritable=True)
            os.chdir(cwd)
            os.execv(argv[0], argv)
        except BaseException as error:
            os.write(2, f"The worker could not be started: {error}\n".encode())
        finally:
            os._exit(127)

    def signal(self, pid: int, number: int, *, group: bool) -> None:
        """Signal a worker, or with *group* also the processes that it started in its group."""
        if pid not in self.workers:
            return
        # Not there: a zombie that the next turn of the loop reaps, or no group yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)

    def kill(self, pid: int) -> None:
        """End a worker. The group first: members of a fork bomb outrun a kill one by one."""
        self.signal(pid, signal.SIGKILL, group=True)
        self.signal(pid, signal.SIGKILL, group=False)

    def reap(self) -> None:
        """Collect the dead. After a worker's death nothing that it started stays."""
        while True:
            try:
                # Left as a zombie at first: it keeps the id of the group from being reused.
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            if dead.si_pid in self.workers:
                self._bury(dead.si_pid)
            else:
                os.waitpid(dead.si_pid, 0)

    def _bury(self, pid: int) -> None:
        self.signal(pid, signal.SIGKILL, group=True)
        _, status = os.waitpid(pid, 0)
        self.workers.discard(pid)
        self.tell("exit", pid, status)
        self.sweep()

    def sweep(self) -> None:
        """Kill every child that is no worker. Grandchildren become children as parents die."""
        deadline = time.monotonic() + SWEEP_S
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while rest := [pid for pid in children() if pid not in self.workers]:
            for pid in rest:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            dead = [pid for pid in rest if collect(pid)]
            if len(dead) < len(rest):
                if time.monotonic() > deadline:
                    return
                poll.poll(20)
                self._forget_wakes()

    def end(self) -> NoReturn:
        """Leave no process behind, and exit."""
        for pid in list(self.workers):
            self.kill(pid)
        self.workers.clear()
        self.sweep()
        os._exit(0)


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and the descriptors beside it, without waiting."""
    # Not socket.recv_fds: it ignores its flags, so it would wait and let descriptors be inherited.
    data, ancillary, _, _ = control.recvmsg(
        MAX_MESSAGE, socket.CMSG_LEN(16 * 4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, numbers in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += struct.unpack(f"{len(numbers) // 4}i", numbers)
    return data, fds


def collect(pid: int) -> bool:
    """Reap *pid* if it is dead. Return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def children() -> list[int]:
    """Process ids of the children of this process."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        # A kernel built without CONFIG_PROC_CHILDREN.
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == me]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may hold anything, parentheses too.
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def main() -> NoReturn:
    """Take the control link from fd 0 and serve it."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    Supervisor(control).serve()


if __name__ == "__main__":
    main()
