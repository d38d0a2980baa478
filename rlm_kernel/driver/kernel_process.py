"""A kernel process that the headless host started, and owns until it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from rlm_kernel.errors import RLMError

__all__ = ["KERNEL_NAME", "KernelDied", "KernelProcess", "last_words", "own_kernel_argv"]

KERNEL_NAME = "rlm"
_POLL_S = 0.1
_ASK_AGAIN_S = 0.5
_TAIL = 4096
_WORDS = 200
"""Characters of a log that a message quotes."""

_LOGGED = re.compile(r"\[\w+\] (DEBUG|INFO|WARNING|ERROR|CRITICAL) \|")
_ERRORS = ("ERROR", "CRITICAL")


class KernelDied(RLMError):
    """The kernel process ended while it was needed."""


def own_kernel_argv() -> list[str]:
    """The command of the kernel in the running interpreter, installed kernelspec or not."""
    return [sys.executable, "-P", "-m", "rlm_kernel", "-f", "{connection_file}"]


class _OneSpec(KernelSpecManager):
    """Knows one kernelspec: a PATH or another environment cannot change which kernel starts."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        self._spec = KernelSpec(
            argv=list(argv),
            display_name="RLM (Python)",
            language="python",
            interrupt_mode="message",
        )

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return self._spec


class KernelProcess:
    """A running kernel, its client channels, and the news of its death.

    Use `open`, which leaves no process behind in any way out.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        context = zmq.asyncio.Context()
        # The default mark of 1,000 messages would drop output, or the end of a cell, while the
        # notebook is being written.
        context.rcvhwm = 0
        self._manager = AsyncKernelManager(
            kernel_name=KERNEL_NAME,
            kernel_spec_manager=_OneSpec(argv),
            context=context,
            transport="ipc",  # TCP could be read along by others on this machine
        )
        self._context = context
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.client: Any = None
        self.info: dict[str, Any] = {}
        """Content of the kernel_info reply."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        *,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> AsyncIterator[KernelProcess]:
        """Start a kernel, wait until it answers, and shut it down at the end.

        *timeout* is in seconds, *environ* is added to the environment of this process.

        Raises
        ------
        KernelDied
            It ended before it answered.
        RLMError
            It did not answer in time, or could not be started.
        """
        process = cls(argv or own_kernel_argv())
        try:
            await process._start(dict(environ or {}), cwd, timeout)
            yield process
        finally:
            await _uncancelled(process._close())

    async def _start(self, environ: dict[str, str], cwd: Path | None, timeout: float) -> None:
        try:
            await self._manager.start_kernel(
                env={**os.environ, **environ},
                cwd=str(cwd or Path.cwd()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        except OSError as error:
            raise RLMError(f"the kernel could not be started: {error}") from error
        self.client = self._manager.client(context=self._context)
        self.client.start_channels(hb=False, stdin=False)
        try:
            async with asyncio.timeout(timeout):
                await self._first_answer()
        except TimeoutError:
            raise RLMError(
                f"the kernel did not answer within {timeout:g} seconds of its start; "
                "try again when the machine is less busy"
            ) from None

    async def _first_answer(self) -> None:
        """Wait for a kernel_info reply *and* for a message on iopub.

        Only the second shows that the subscription reached the kernel: what it publishes
        before that is lost.
        """
        died = asyncio.create_task(self.died())
        ready = asyncio.create_task(self._handshake())
        try:
            await asyncio.wait({died, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise KernelDied(f"the kernel {died.result()} before it was ready")
            self.info = ready.result()
        finally:
            for task in (died, ready):
                task.cancel()
            await asyncio.gather(died, ready, return_exceptions=True)

    async def _handshake(self) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        iopub = self.client.iopub_channel.socket
        while True:
            self.client.kernel_info()
            if not reply and await self.client.shell_channel.socket.poll(_ASK_AGAIN_S * 1000):
                reply = (await self.client.get_shell_msg())["content"]
            if reply and await iopub.poll(_ASK_AGAIN_S * 1000):
                return reply

    async def died(self) -> str:
        """Wait until the process has ended; say how, as the end of a sentence."""
        while await self._manager.is_alive():  # noqa: ASYNC110 - only polling tells
            await asyncio.sleep(_POLL_S)
        return self._how_it_ended()

    def _how_it_ended(self) -> str:
        process = getattr(self._manager.provisioner, "process", None)
        code = None if process is None else process.returncode
        if code is None:
            how = "ended"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        last = last_words(self._tail(), chosen=code is not None and code >= 0)
        return f"{how} ({last})" if last else how

    def _tail(self) -> str:
        """The end of what the process wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _TAIL, 0))
        return self._log.read().decode(errors="replace")

    async def interrupt(self) -> None:
        """Interrupt what the kernel executes."""
        await self._manager.interrupt_kernel()

    async def kill(self) -> None:
        """End the process at once."""
        await self._manager.shutdown_kernel(now=True)

    async def _close(self) -> None:
        try:
            if self._manager.has_kernel:
                alive = self.client is not None and await self._manager.is_alive()
                await self._manager.shutdown_kernel(now=not alive)
        finally:
            if self.client is not None:
                self.client.stop_channels()
            self._manager.cleanup_connection_file()
            self._context.destroy(linger=0)
            self._log.close()


def last_words(log: str, *, chosen: bool) -> str:
    """The line of *log* that says best why its process ended, for a message; may be empty.

    That is the last error: a line logged as one, or the end of a traceback. A process that
    chose to end (*chosen*) may have said why in its last line instead, but not in a line that
    it logged at a lower level.
    """
    errors, others, tracing = [], [], False
    for line in filter(str.strip, log.splitlines()):
        level = _LOGGED.match(line)
        if line.startswith("Traceback (most recent call last)"):
            tracing = True
        elif tracing and not line[0].isspace():
            errors.append(line)
            tracing = False
        elif line.startswith("Fatal Python error") or (level and level[1] in _ERRORS):
            errors.append(line)
        elif not level and not tracing:
            others.append(line)
    said = errors or (others if chosen else [])
    return said[-1].strip()[:_WORDS] if said else ""


async def _uncancelled(work: Any) -> None:
    """Finish *work* although this task may be cancelled meanwhile, then be cancelled."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
