"""The event loop of cells: top-level ``await``, and background tasks between cells."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rlm_kernel.repl.worker.interrupts import Interrupts
from rlm_kernel.repl.worker.link import Link, settle

__all__ = ["CellLoop"]


class _Selector(selectors.DefaultSelector):
    """Knows whether the loop is waiting or running code."""

    waiting = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        try:
            self.waiting = True
            return super().select(timeout)
        finally:
            self.waiting = False


class CellLoop:
    """Runs the coroutine of a cell, and everything that it leaves behind.

    An interrupt reaches a coroutine that waits as a cancellation of the cell's
    task, which its ``finally`` blocks see and which leaves the loop whole;
    code that computes gets KeyboardInterrupt where it stands.

    Parameters
    ----------
    link
        Read by the loop while it runs.
    interrupts
        Told how to interrupt a cell that awaits.
    on_command
        Called when commands of the kernel's came while a cell awaits.
    """

    def __init__(self, link: Link, interrupts: Interrupts, on_command: Callable[[], None]) -> None:
        self._link = link
        self._interrupts = interrupts
        self._on_command = on_command
        self._open()
        self._task: asyncio.Task[Any] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one loop in which all cells await."""
        return self._loop

    def _open(self) -> None:
        self._selector = _Selector()
        self._loop = asyncio.SelectorEventLoop(self._selector)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of *coroutine*; may be called from cells only, not from one that awaits."""
        if self._loop.is_closed():
            self._open()
        task = self._loop.create_task(coroutine)
        outer = self._task
        self._task = task
        self._link.on_command = lambda: self._soon(self._on_command)
        self._interrupts.divert = self._divert
        try:
            with self._link.attached(self._loop):
                return self._until_done(task)
        finally:
            self._task = outer
            self._link.on_command = None
            self._interrupts.divert = None

    def _until_done(self, task: asyncio.Task[Any]) -> Any:
        while True:
            try:
                return self._loop.run_until_complete(task)
            except BaseException as error:
                # Mostly raised by a callback or a background task, which don't end the cell;
                # except that an interrupt is meant for it.
                if task.done():
                    return task.result()
                if isinstance(error, KeyboardInterrupt):
                    task.cancel()

    def _divert(self) -> bool:
        """In the signal handler: whether cancelling the cell's task is the right interrupt."""
        task = self._task
        if task is None or task.done():
            return False
        computing = not self._selector.waiting
        if computing and asyncio.current_task(self._loop) is task:
            return False
        if computing and self._interrupts.count > 1:
            return False  # a callback or another task that never yields
        self._soon(task.cancel)
        return True

    def idle(self) -> None:
        """Let background tasks go on until a command comes."""
        link = self._link
        while not link.commands and not self._loop.is_closed():
            arrived = self._loop.create_future()
            link.on_command = partial(self._soon, partial(settle, arrived))
            try:
                with link.attached(self._loop):
                    if not link.commands:
                        self._loop.run_until_complete(arrived)
            except (SystemExit, KeyboardInterrupt, RuntimeError):
                # A background task tried to leave, which ended it only; or an order to stop
                # that such a one kept from being carried out is carried out now.
                continue
            finally:
                link.on_command = None

    def _soon(self, callback: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(callback)
