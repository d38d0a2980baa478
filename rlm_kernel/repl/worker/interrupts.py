"""Where SIGINT may become KeyboardInterrupt, and where it may not.

The link's framing must survive an interrupt at any bytecode. So the main
thread counts how deep it is in code of ours (`enter`, `leave`); there a
signal is only noted, except inside a `window` around one blocking system
call, whose interruption loses nothing. Everywhere else in a cell it raises,
and outside of cells it is ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """The SIGINT handler of the worker and the state that it goes by."""

    def __init__(self) -> None:
        self.in_cell = False
        """True while code of the user's may run in the main thread."""

        self.count = 0
        """Interrupts since the cell began."""

        self.divert: Callable[[], bool] | None = None
        """Asked first; returns True where it took care of the interrupt (the event loop)."""

        self.alert = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable after an interrupt, for threads that are blocked in a wait."""

        self.on_interrupt: Callable[[], None] | None = None
        self._main = threading.main_thread().ident
        self._depth = 0
        self._window = False
        self._pending = False

    def install(self) -> None:
        """Handle SIGINT from now on."""
        signal.signal(signal.SIGINT, self._handle)

    def reinstall(self) -> None:
        """Take SIGINT back if user code took it away or blocked it."""
        if signal.getsignal(signal.SIGINT) != self._handle:
            signal.signal(signal.SIGINT, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def begin_cell(self) -> None:
        """Forget what came before; from now on a signal interrupts."""
        self.count = 0
        self._pending = False
        self.in_cell = True

    def end_cell(self) -> None:
        """From now on a signal is ignored."""
        self.in_cell = False
        self._pending = False

    def enter(self) -> bool:
        """Begin a stretch that must not be torn. Give the result to `leave`."""
        if threading.get_ident() != self._main:
            return False
        self._depth += 1
        return True

    def leave(self, main: bool) -> None:
        """End the stretch. Raises KeyboardInterrupt if a signal came meanwhile."""
        if not main:
            return
        self._depth -= 1
        if self._pending and not self._depth:
            self._pending = False
            raise KeyboardInterrupt

    def check(self, main: bool) -> None:
        """Raise KeyboardInterrupt if a signal came meanwhile; for waits without a window."""
        if main and self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextmanager
    def window(self, main: bool) -> Iterator[None]:
        """Around one blocking call: here a signal raises at once, in the main thread."""
        if not main:
            yield
            return
        try:
            self._window = True
            # A signal that came between `enter` and here has only been noted.
            self.check(main)
            yield
        finally:
            self._window = False

    def forget_parent(self) -> None:
        """In a forked child of user code: SIGINT is an ordinary KeyboardInterrupt."""
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.in_cell:
            return
        self.count += 1
        if self.on_interrupt is not None:
            self.on_interrupt()
        os.eventfd_write(self.alert, 1)
        if self._depth and not self._window:
            self._pending = True
            return
        # Cleared here, because the exception may surface inside `window`'s own bookkeeping.
        self._window = self._pending = False
        if not self._depth and self.divert is not None and self.divert():
            return
        raise KeyboardInterrupt
