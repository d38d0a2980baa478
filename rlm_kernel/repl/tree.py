"""The processes of one REPL: a supervisor and its live worker, replaced as they end."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlm_kernel.errors import UsageError, WorkerDied
from rlm_kernel.repl.live import Worker, WorkerOwner
from rlm_kernel.repl.processes import MARK, SupervisorProcess, kill_marked

__all__ = ["WORKER_ARGV", "Tree"]

WORKER_ARGV = (sys.executable, "-P", "-m", "rlm_kernel.repl.worker", "3")

_START_S = 60.0
"""Seconds that a worker has to say hello."""

_GOODBYE_S = 1.0
"""Seconds that an idle worker has to run its exit handlers when its link is closed."""


class Tree:
    """Supervisor and worker. Creating it starts both, and needs no event loop.

    Raises
    ------
    UsageError
        The working folder or the launcher is not there.
    """

    def __init__(
        self,
        *,
        cwd: Path,
        environ: Mapping[str, str],
        launcher: Sequence[str] = (),
        worker_argv: Sequence[str] = WORKER_ARGV,
    ) -> None:
        if not cwd.is_dir():
            raise UsageError(f"The REPL cannot start in {cwd}: it is not a folder.")
        self._cwd = str(cwd.resolve())
        self._mark = secrets.token_hex(8)
        self._environ = {**environ, MARK: self._mark}
        self._launcher = launcher
        self._argv = worker_argv
        self._owner: WorkerOwner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: dict[int, Worker] = {}
        self._ordered: dict[str, Worker] = {}
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False
        self.supervisor = SupervisorProcess(self._launcher, self._environ)
        self.worker = self._order_worker()

    def attach(self, loop: asyncio.AbstractEventLoop, owner: WorkerOwner) -> None:
        """Start to listen to both, once."""
        if self._loop is not None:
            if self._loop is not loop:
                raise RuntimeError("This REPL belongs to another event loop.")
            return
        self._loop, self._owner = loop, owner
        self.supervisor.attach(loop, self)
        self.worker.attach(loop, owner)

    async def ready(self) -> Worker:
        """Return a worker that is up; start one first where the last one ended.

        Raises
        ------
        WorkerDied
            It ended before it was up, did not come up in time, or the REPL is closed.
        UsageError
            It cannot be started at all.
        """
        worker = self.worker
        if worker.is_up and not self._closed:
            return worker
        if self._replacing is not None:
            await asyncio.shield(self._replacing)
        if self._closed:
            raise WorkerDied("The REPL is closed: start a new one.")
        if self.worker.ended:
            self.replace_worker()
        worker = self.worker
        assert worker.hello is not None
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(worker.hello)
        except TimeoutError:
            worker.end(f"did not start within {_START_S:.0f} seconds")
        if not worker.is_up:
            raise WorkerDied("The worker ended as soon as it had started: start it again.")
        return worker

    def replace_worker(self) -> None:
        """Start a worker in place of one that ended."""
        assert self._loop is not None
        assert self._owner is not None
        if self._closed or self._replacing is not None:
            return
        if self.supervisor.ended:
            self.supervisor = SupervisorProcess(self._launcher, self._environ)
            self.supervisor.attach(self._loop, self)
        self.worker = self._order_worker()
        self.worker.attach(self._loop, self._owner)

    def _order_worker(self) -> Worker:
        worker = Worker(self.supervisor, self._argv, self._cwd)
        self._ordered[worker.ticket] = worker
        return worker

    async def close(self, *, goodbye: bool) -> None:
        """End both and everything below them; with *goodbye* let the worker's exit handlers run.

        No process is left when it returns, and none will be when it is cancelled.
        """
        self._closed = True
        try:
            if self._replacing is not None:
                await self._replacing
            if goodbye and self.worker.is_up:
                self.worker.link.close()
                async with asyncio.timeout(_GOODBYE_S):
                    await self.worker.gone.wait()
        except TimeoutError:
            pass  # an exit handler that hangs ends with its process
        finally:
            self.supervisor.hang_up()
            self.worker.end("ended with its REPL, which was closed")
            try:
                await self.supervisor.wait()
            finally:
                self.supervisor.reap()

    # --- what the supervisor reports ----------------------------------------------------------

    def on_spawned(self, ticket: str, pid: int) -> None:
        worker = self._ordered.pop(ticket, None)
        if worker is None:
            return
        worker.pid = pid
        self._workers[pid] = worker
        if worker.ended:
            self.supervisor.kill(pid)

    def on_exit(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            worker.on_exit(status)

    def on_supervisor_end(self) -> None:
        if not self._closed:
            self._replacing = asyncio.ensure_future(self._after_supervisor())

    async def _after_supervisor(self) -> None:
        """End what a dead supervisor left behind, and let the owner hear of the worker's end."""
        how = await self.supervisor.wait()
        try:
            await kill_marked(self._mark)
        except WorkerDied as error:
            how = f"{how} ({error})"
        self._replacing = None
        self._workers.clear()
        self._ordered.clear()
        self.worker.end(f"lost its supervisor process, which {how}")
