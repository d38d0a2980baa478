"""The registry: one file for each server that was started here.

It lies in a folder of its user alone, so that ``jupyter rlm serve`` in one place and a kernel in
another know the same servers. That is the user's state folder and not the runtime folder: the
latter differs between a login and a service, and is emptied at logout while servers go on.

Kernels only read it. A file may have been written by code of a cell, so it is never more than a
hint: servers are on this machine's loopback, get no key, and a process is only touched where its
start, or the log file that it writes to, shows that it is the one.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.subcalls.vllm.processes import (
    ProcessInfo,
    machine_id,
    members,
    process_at,
    writes_to,
)

__all__ = ["Registry", "ServerEntry"]

FOLDER_VARIABLE = "RLM_RUNTIME_DIR"
_MAX_BYTES = 256 << 10
_MAX_FILES = 1000
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,79}", re.ASCII)


class ServerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one server."""

    name: str
    group: str
    """Common to the servers that one command started."""

    model: str
    """As its clients name it."""

    url: str
    """Base of its API, such as ``http://127.0.0.1:8100/v1``."""

    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them; none where it works on the CPU."""

    pid: int
    """Of the API server, which is the leader of its session and its process group too."""

    start: int
    """When that process started, in clock ticks since the machine was."""

    machine: str
    started_at: float
    """Seconds since 1970."""

    ready: bool
    """False until it has answered."""

    log: str
    python: str
    args: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether the API server is there."""
        process = process_at(self.pid)
        return process is not None and process.start == self.start

    @property
    def port(self) -> int:
        """The TCP port of its API."""
        return urlsplit(self.url).port or 80

    def processes(self) -> list[ProcessInfo]:
        """All living processes of the server, engines that were left behind too."""
        found = members(self.pid)
        # A session's number is not given away while a member lives. So one that writes to our log
        # shows that the whole session is ours, though its leader be gone.
        if self.alive or any(writes_to(process, self.log) for process in found):
            return found
        return []


class Registry:
    """The servers of this user on this machine.

    Parameters
    ----------
    folder
        Where the files are; made when the first is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Registry:
        """That of RLM_RUNTIME_DIR in *environ*, else that of the user."""
        if given := environ.get(FOLDER_VARIABLE, "").strip():
            return cls(Path(given).expanduser().absolute() / "servers")
        import platformdirs

        return cls(platformdirs.user_state_path("rlm-kernel") / "servers")

    def entries(self) -> list[ServerEntry]:
        """All entries of this machine, dead or alive, by name. What is no entry is left out."""
        machine = machine_id()
        host = machine.partition(" ")[0]
        found = (self._read(name) for name in self._names())
        # An entry of this host from before its last start is dead, and told as such; those of
        # other hosts that share the folder are nobody's business here.
        mine = (entry for entry in found if entry and entry.machine.partition(" ")[0] == host)
        return sorted((_of_now(entry, machine) for entry in mine), key=lambda entry: entry.name)

    def serving(self, model: str | None = None) -> list[ServerEntry]:
        """Servers that have answered and still live, of *model* or of any."""
        return [
            entry
            for entry in self.entries()
            if entry.ready and model in (None, entry.model) and entry.alive
        ]

    def models(self) -> list[str]:
        """What is served, each model once."""
        return sorted({entry.model for entry in self.serving()})

    def make(self) -> None:
        """Make the folders. Raises `UsageError` where they cannot be made or written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.folder.stat().st_uid != os.geteuid():
                raise UsageError(
                    f"the folder of the servers {self.folder} belongs to another user: "
                    f"set {FOLDER_VARIABLE} to a folder of yours"
                )
            self.folder.chmod(0o700)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from error

    def log_path(self, name: str) -> Path:
        """Where the server *name* writes its log."""
        return self.folder / f"{name}.log"

    def check_name(self, name: str) -> None:
        """Raise `UsageError` where no new server can have this *name*."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name[:90]!r} is no name of a server: use letters, digits, '.', '_' and '-'"
            )
        entry = next((e for e in self.entries() if e.name == name), None)
        if entry is not None and entry.processes():
            raise UsageError(
                f"a server of the name {name!r} is there already (process {entry.pid}): give "
                f"another --name, or stop it with jupyter rlm serve --stop {name}"
            )

    def add(self, entry: ServerEntry) -> None:
        """Write *entry*, or its new state; all of it or nothing."""
        data = msgspec.json.format(msgspec.json.encode(entry), indent=1)
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
                try:
                    file.write(data)
                    file.close()
                    os.replace(file.name, self._path(entry.name))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise self._unwritable(error) from error

    def remove(self, entry: ServerEntry) -> None:
        """Forget *entry*, unless its name is another server's by now. The log stays."""
        with contextlib.suppress(OSError), self.locked("registry"):
            there = self._read(self._path(entry.name).name)
            if there is not None and there.started_at == entry.started_at:
                self._path(entry.name).unlink()

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Hold the lock *what* against other processes of ``jupyter rlm``; waits for it."""
        descriptor = os.open(self.folder / f".{what}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def try_lock(self, whats: Sequence[str]) -> list[int] | None:
        """Descriptors that hold all locks *whats* until they are closed; ``None`` where another
        process has one of them."""
        held: list[int] = []
        for what in sorted(whats):
            path = self.folder / f".{what}.lock"
            held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            try:
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for descriptor in held:
                    os.close(descriptor)
                return None
        return held

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _names(self) -> list[str]:
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(".json")]
        except OSError:
            return []
        return sorted(name for name in names if not name.startswith("."))[:_MAX_FILES]

    def _read(self, name: str) -> ServerEntry | None:
        try:
            # No pipe, link or device: reading those may take for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self.folder / name, flags), "rb") as file:
                info = os.fstat(file.fileno())
                if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                    return None
                entry = msgspec.json.decode(file.read(_MAX_BYTES), type=ServerEntry)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        good = f"{entry.name}.json" == name and entry.pid > 1 and _is_loopback(entry.url)
        return entry if good else None

    def _unwritable(self, error: OSError) -> RLMError:
        return UsageError(
            f"the folder of the servers {self.folder} cannot be written "
            f"({error.strerror or error}): set {FOLDER_VARIABLE} to a folder that can"
        )


def _of_now(entry: ServerEntry, machine: str) -> ServerEntry:
    """*entry*, with no process where it is of an earlier start of the machine."""
    if entry.machine == machine:
        return entry
    return msgspec.structs.replace(entry, start=-1, log="")


def _is_loopback(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme == "http" and parts.port != 0
        return is_plain and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a port that is none, too
        return False
