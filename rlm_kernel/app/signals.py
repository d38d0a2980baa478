"""Signals that ask the command to end, as a flag: nothing is cut off in the middle."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

__all__ = ["EndSignals"]

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """While it is entered, Ctrl-C, SIGTERM and the end of the terminal set `asked` and no more.

    An exception between the start of a process and the note of its number would leave it running.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _ASKING:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # nohup means it
                self._before[number] = before
                signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # what getsignal returned

    def check(self) -> None:
        """Raise `KeyboardInterrupt` where somebody asked."""
        if self.asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
