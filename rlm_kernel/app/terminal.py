"""The live view of a run on standard error, and its plain form where that is no terminal.

Both are fed by the operations of the driver and by nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from rlm_kernel.app.progress import Progress, Subcalls, Turn, code_preview, prose_preview
from rlm_kernel.app.streams import escape_controls
from rlm_kernel.driver.progress_bar import Tally, tally_words
from rlm_kernel.driver.protocol import Operation
from rlm_kernel.driver.task_counts import task_lines

__all__ = ["LiveView", "PlainView", "RunView", "View", "open_view", "wants_plain"]

_REFRESH_S = 0.125

_PASSING = ("proposed", "observing")
"""States that last for no time where nobody is asked: plain lines leave them out."""

_BAR_CELLS = 24
_WIDE = 80
_LIVE_LINES = 3
"""Lines of source that are shown of the turn under way."""

_STYLES = {
    "done": "green",
    "answered": "green",
    "failed": "red",
    "stopped": "yellow",
    "executing": "cyan",
    "proposing": "magenta",
}
_MARKS = {"done": "✓", "failed": "✗", "stopped": "■", "answered": "✓"}


class View:
    """A `Listener` that shows a run on one stream.

    Parameters
    ----------
    title
        What is worked on, such as the name and size of the prompt.
    query
        The question.
    """

    def __init__(self, title: str, query: str) -> None:
        self.progress = Progress()
        self.title = title
        self.query = " ".join(query.split())

    def operation(self, op: Operation) -> None:
        """The kernel said this."""
        self.progress.apply(op)

    def subcalls(self, tally: Tally | None) -> None:
        """The cell under way is so far with its sub-calls."""
        self.progress.tally = tally

    def note(self, text: str) -> None:
        """The host says something, in one line."""

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show the run while the body goes on."""
        yield


class PlainView(View):
    """One line for every change of state; no colours, no cursor movement."""

    def __init__(self, title: str, query: str, stream: TextIO | None = None) -> None:
        super().__init__(title, query)
        self._stream = stream or sys.stderr
        self._last = ""
        self._print(f"{self.title} · {self.query}")

    def operation(self, op: Operation) -> None:
        """Say what changed, if that is more than a count."""
        super().operation(op)
        line = self._line()
        if line and line != self._last:
            self._last = line
            self._print(line + self._details())

    def note(self, text: str) -> None:
        """Say *text*."""
        self._print(text)

    def _line(self) -> str:
        progress = self.progress
        if progress.final is not None:
            return f"{progress.state}" + (f": {progress.reason}" if progress.reason else "")
        if not progress.turns:
            return ""
        turn = progress.turns[max(progress.turns)]
        if turn.state in _PASSING or turn.ended is not None:
            return ""
        return f"turn {turn.number} {turn.state}"

    def _details(self) -> str:
        progress = self.progress
        parts = [_tokens(progress.usage.tokens)] if progress.usage.tokens else []
        if progress.subcalls.total:
            parts.append(_subcalls_words(progress.subcalls))
        return f" ({', '.join(parts)})" if parts else ""

    def _print(self, text: str) -> None:
        line = f"[{self.progress.seconds():7.1f} s] {escape_controls(' '.join(text.split()))}"
        with contextlib.suppress(OSError):
            print(line, file=self._stream, flush=True)


class LiveView(View):
    """A tree of turns that is drawn again in place, eight times a second."""

    def __init__(self, title: str, query: str, console: Console) -> None:
        super().__init__(title, query)
        self._console = console
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Show *text* under the tree; of several the last two."""
        self._notes = [*self._notes[-1:], text]

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Draw until the body ends, then once more, as it stays."""
        view = RunView(self)
        with Live(view, console=self._console, auto_refresh=False) as live:
            drawing = asyncio.create_task(_redraw(live))
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
                live.refresh()

    @property
    def notes(self) -> list[str]:
        """What is said under the tree."""
        return self._notes


async def _redraw(live: Live) -> None:
    while True:
        live.refresh()
        await asyncio.sleep(_REFRESH_S)


class RunView:
    """The drawing of a `LiveView`, for the size that the console has at the moment."""

    def __init__(self, view: LiveView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, foot = self._head(), self._foot()
        room = max(options.size.height - len(head) - len(foot) - 1, 4)
        yield Group(*head, *self._tree(room, options.max_width), *foot)

    def _head(self) -> list[RenderableType]:
        progress = self._view.progress
        models = [
            f"{word} {spec}" for word, spec in (("root", progress.root), ("sub", progress.sub))
        ]
        lines = [_cut("RLM  " + self._view.title, "bold"), _cut("“" + self._view.query + "”")]
        if progress.root:
            lines.append(_cut(" · ".join(models), "dim"))
        return list(lines)

    def _tree(self, room: int, width: int) -> list[RenderableType]:
        """The turns, the newest ones where there is no room for all."""
        progress = self._view.progress
        turns = [progress.turns[n] for n in sorted(progress.turns)]
        blocks = [
            _turn_lines(
                turn, last=turn is turns[-1], width=width, now=self._now(), tally=progress.tally
            )
            for turn in turns
        ]
        shown: list[list[RenderableType]] = []
        for block in reversed(blocks):
            if shown and sum(map(len, shown)) + len(block) > room - 1:
                break
            shown.insert(0, block)
        hidden = len(blocks) - len(shown)
        more = [Text(f"├─ … {hidden} earlier turns", style="dim")] if hidden else []
        return [*more, *(line for block in shown for line in block)]

    def _now(self) -> float:
        return self._view.progress.now()

    def _foot(self) -> list[RenderableType]:
        progress = self._view.progress
        parts = [f"{progress.seconds():.1f} s", _count_words(len(progress.turns), "turn")]
        if progress.subcalls.total:
            parts.append(_subcalls_words(progress.subcalls))
        parts.append(_tokens(progress.usage.tokens))
        if progress.usage.cost:
            parts.append(f"${progress.usage.cost:.4f}")
        state = Text(_MARKS.get(progress.state, "◆") + " ", style=_style(progress.state))
        state.append(progress.state if progress.turns else "starting")
        line = Text.assemble(state, " · ", " · ".join(parts), overflow="ellipsis", no_wrap=True)
        reason = [_cut(progress.reason, "yellow")] if progress.reason else []
        return [line, *reason, *(_cut(note, "yellow") for note in self._view.notes)]


def _turn_lines(
    turn: Turn, *, last: bool, width: int, now: float, tally: Tally | None
) -> list[RenderableType]:
    """A turn of the tree: its line, its source, its sub-calls."""
    stem, rail = ("└─ ", "   ") if last else ("├─ ", "│  ")
    head = Text(stem, style="dim", overflow="ellipsis", no_wrap=True)
    head.append(f"turn {turn.number}", style="bold not dim")
    head.append(f" · {turn.state}", style=f"not dim {_style(turn.state)}")
    head.append(f" · {turn.seconds(now):.1f} s")
    if turn.tokens:
        head.append(f" · {_tokens(turn.tokens)}")
    lines: list[RenderableType] = [head]
    prose = prose_preview(turn.prose)
    if prose:
        lines.append(_cut(f"{rail}  {prose}", "italic"))
    if turn.ended is None or not prose:
        code = code_preview(turn.source, _LIVE_LINES if turn.ended is None else 1)
        lines.extend(_cut(f"{rail}  {line}", "dim") for line in code)
    if tally is not None and turn.ended is None:
        lines.append(_tally_line(rail, tally, width))
    elif turn.subcalls.total:
        lines.append(_subcalls_line(rail, turn.subcalls, width))
    for note, number in turn.notes.items():
        lines.append(_cut(f"{rail}  {_count_words(number, 'sub-call')}: {note}", "yellow"))
    lines.extend(_cut(f"{rail}  {line}", "dim") for line in task_lines(turn.tasks))
    return lines


def _subcalls_line(rail: str, counts: Subcalls, width: int) -> Text:
    ended = counts.done + counts.failed
    line = Text(f"{rail}  ", style="dim", overflow="ellipsis", no_wrap=True)
    if counts.total > 1:
        _append_bar(line, ended / counts.total, width)
    line.append(f"{ended}/{counts.total} {_subcalls_states(counts)}", style="not dim")
    return line


def _tally_line(rail: str, tally: Tally, width: int) -> Text:
    line = Text(f"{rail}  ", style="dim", overflow="ellipsis", no_wrap=True)
    if tally.calls > 1:
        _append_bar(line, tally.done / tally.calls, width)
    counted, *rest = tally_words(tally)
    line.append(" · ".join((f"{counted} sub-calls", *rest)), style="not dim")
    return line


def _append_bar(line: Text, share: float, width: int) -> None:
    cells = _BAR_CELLS if width >= _WIDE else _BAR_CELLS // 2
    full = round(cells * share)
    line.append("━" * full, style="not dim cyan")
    line.append("╌" * (cells - full) + " ")


def _subcalls_states(counts: Subcalls) -> str:
    parts = [f"{counts.running} running"] if counts.running else []
    return " · ".join(["sub-calls", *parts, *_ends_words(counts)])


def _subcalls_words(counts: Subcalls) -> str:
    words = _count_words(counts.total, "sub-call")
    ends = _ends_words(counts)
    return f"{words} ({', '.join(ends)})" if ends else words


def _ends_words(counts: Subcalls) -> list[str]:
    """What there is to say of calls that have ended."""
    numbers = ((counts.failed, "failed"), (counts.cached, "cached"))
    return [f"{number:,} {word}" for number, word in numbers if number]


def _count_words(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _tokens(count: int) -> str:
    return _count_words(count, "token")


def _style(state: str) -> str:
    return _STYLES.get(state, "blue")


def _cut(text: str, style: str = "") -> Text:
    """*text* on one line, whatever the width. Control characters are shown, not obeyed."""
    clean = "".join(c if c.isprintable() else "·" for c in text)
    return Text(clean, style=style, overflow="ellipsis", no_wrap=True)


def wants_plain(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether *stream* should get plain lines: it is no terminal, or a dumb one, or the
    person asked for no colours."""
    dumb = environ.get("TERM", "") in ("", "dumb")
    return not stream.isatty() or dumb or bool(environ.get("NO_COLOR"))


def open_view(title: str, query: str) -> View:
    """The view that suits standard error."""
    if wants_plain(sys.stderr, os.environ):
        return PlainView(title, query)
    return LiveView(title, query, Console(stderr=True))
