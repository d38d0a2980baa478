"""What a person sees on standard error while servers start: one line for each."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from rlm_kernel.app.streams import escape_controls
from rlm_kernel.app.terminal import wants_plain
from rlm_kernel.subcalls.vllm.launch import Started

__all__ = ["WaitView", "open_wait_view"]


class WaitView(Protocol):
    """Shows how far servers are."""

    def tell(self, server: Started, ready: bool) -> None:
        """*server* was looked at."""

    def note(self, text: str) -> None:
        """Say something, in one line."""


class PlainWait:
    """A line for every change of phase."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._told: dict[str, str] = {}

    def tell(self, server: Started, ready: bool) -> None:
        """Say the phase of *server* where it is another."""
        phase = "ready" if ready else server.log.phase
        name = server.entry.name
        # The percents of a phase are for those who watch.
        if self._told.get(name) != (stem := phase.partition(" (")[0]):
            self._told[name] = stem
            self.note(f"{name}: {stem}")

    def note(self, text: str) -> None:
        """Say *text*."""
        seconds = time.monotonic() - self._began
        print(f"[{seconds:7.1f} s] {escape_controls(text)}", file=sys.stderr, flush=True)


class LiveWait:
    """Lines that are drawn again in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._began = time.monotonic()
        self._lines: dict[str, tuple[str, bool]] = {}
        self._note = ""
        self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def tell(self, server: Started, ready: bool) -> None:
        """Draw, with the phase of *server*."""
        place = f"GPU {','.join(server.entry.gpus)}" if server.entry.gpus else "CPU"
        phase = "ready" if ready else server.log.phase
        self._lines[f"{server.entry.name} ({place})"] = (phase, ready)
        self._draw()

    def note(self, text: str) -> None:
        """Draw, with *text* under the lines."""
        self._note = escape_controls(text)
        self._draw()

    def _draw(self) -> None:
        from rich.text import Text

        seconds = time.monotonic() - self._began
        shown = Text(overflow="ellipsis", no_wrap=True)
        for name, (phase, ready) in self._lines.items():
            shown.append("✓ " if ready else "◆ ", style="green" if ready else "cyan")
            shown.append(f"{name} · ")
            shown.append(f"{phase}\n", style="green" if ready else "magenta")
        shown.append(f"{seconds:.0f} s", style="bold")
        shown.append(f" · {self._note}" if self._note else "", style="dim")
        self.live.update(shown, refresh=True)


@contextlib.contextmanager
def open_wait_view() -> Iterator[WaitView]:
    """The view that suits standard error."""
    if wants_plain(sys.stderr, os.environ):
        yield PlainWait()
        return
    view = LiveWait()
    with view.live:
        yield view
