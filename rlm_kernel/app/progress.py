"""What a run looks like while it goes on, reduced from the driver's operations.

No drawing here; see `rlm_kernel.app.terminal`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlm_kernel.driver.note_counts import count_note
from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.driver.protocol import (
    CELL_KIND,
    CloseCell,
    Delta,
    Final,
    Node,
    Nodes,
    OpenCell,
    Operation,
    Snapshot,
    State,
)
from rlm_kernel.driver.task_counts import TaskCounts, count_verdict
from rlm_kernel.engine.budget import Usage

__all__ = ["Progress", "Subcalls", "Turn", "code_preview", "prose_preview"]

_MARKUP = re.compile(r"[*`]|^#+ |^[-+] ")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s")


@dataclass
class Subcalls:
    """Counts of sub-calls by state."""

    done: int = 0
    running: int = 0
    failed: int = 0
    cached: int = 0
    """Of those done: they were given a recorded reply."""

    @property
    def total(self) -> int:
        """Sub-calls that were started."""
        return self.done + self.running + self.failed


@dataclass
class Turn:
    """One turn, as it is shown."""

    number: int
    started: float
    ended: float | None = None
    state: str = "proposing"
    prose: str = ""
    source: str = ""
    tokens: int = 0
    """Of the root and of the sub-calls, in this turn."""

    subcalls: Subcalls = field(default_factory=Subcalls)
    notes: dict[str, int] = field(default_factory=dict)
    """Why sub-calls, also of child runs, were others than were asked for, and how many."""

    tasks: dict[str, TaskCounts] = field(default_factory=dict)
    """Replies to typed sub-tasks, those of child runs included."""

    def seconds(self, now: float) -> float:
        """Seconds that the turn has taken so far."""
        return (self.ended or now) - self.started


class Progress:
    """The state of a run and its turns.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._nodes: dict[str, Node] = {}
        self._cells: dict[str, tuple[int, CELL_KIND]] = {}
        self._run_id = ""
        self._tokens_before = 0
        self.root = ""
        self.sub = ""
        self.state = "idle"
        self.reason = ""
        self.usage = Usage()
        self.subcalls = Subcalls()
        self.tally: Tally | None = None
        """Sub-calls of the cell under way, those included that wait to be sent."""

        self.turns: dict[int, Turn] = {}
        self.final: Final | None = None

    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def now(self) -> float:
        """The clock's time."""
        return self._clock()

    def apply(self, op: Operation) -> None:
        """Take one operation."""
        match op:
            case State():
                self._on_state(op)
            case OpenCell():
                self._cells[op.cell_id] = op.turn, op.kind
            case Delta():
                # At offset 0 another attempt begins; what was written before is void.
                self._write(op.cell_id, op.text, anew=op.offset == 0)
            case CloseCell():
                self._write(op.cell_id, op.source, anew=True)
            case Nodes():
                for node in op.nodes:
                    self._on_node(node)
            case Snapshot():
                self._on_snapshot(op)
            case Final():
                self._on_final(op)
            case _:
                pass

    def _write(self, cell_id: str, text: str, *, anew: bool) -> None:
        number, kind = self._cells.get(cell_id, (0, "code"))
        if number:
            turn = self._turn(number)
            part = "prose" if kind == "markdown" else "source"
            setattr(turn, part, text if anew else getattr(turn, part) + text)

    def _turn(self, number: int) -> Turn:
        turn = self.turns.get(number)
        if turn is None:
            now = self._clock()
            self._end_turns(now)
            turn = self.turns[number] = Turn(number, now)
            self._tokens_before = self.usage.tokens
        return turn

    def _end_turns(self, now: float) -> None:
        for turn in self.turns.values():
            if turn.ended is None:
                turn.ended = now
                if turn.state not in ("skipped", "failed", "stopped"):
                    turn.state = "done"

    def _on_state(self, op: State) -> None:
        if self._run_id and op.run_id != self._run_id:
            return  # a child run: its calls are counted with the run above it
        self._run_id = op.run_id
        self.state, self.reason = op.state, op.reason
        self.root, self.sub = op.root or self.root, op.sub or self.sub
        self.subcalls = Subcalls(
            op.subcalls_done, op.subcalls_running, op.subcalls_failed, self.subcalls.cached
        )
        # A turn's first state still has the usage of the turns before it.
        if op.turn > 0:
            turn = self._turn(op.turn)
            turn.tokens = op.usage.tokens - self._tokens_before
            if turn.ended is None and op.state not in ("answered", "stopped", "failed"):
                turn.state = "waiting for a decision" if op.awaiting else op.state
        self.usage = op.usage

    def _on_node(self, node: Node) -> None:
        before = self._nodes.get(node.id)
        self._nodes[node.id] = node
        cached = node.cached - (before is not None and before.cached)
        self.subcalls.cached += cached
        if before is None and node.note and self.turns:
            count_note(self.turns[max(self.turns)].notes, node.note)
        if node.verdict and self.turns and (before is None or not before.verdict):
            tasks = self.turns[max(self.turns)].tasks
            count_verdict(tasks, node.task, ok=node.verdict == "ok")
        if node.parent != self._run_id or node.turn < 1:
            return
        counts = self._turn(node.turn).subcalls
        if before is not None:
            _count(counts, before.state, -1)
        _count(counts, node.state, +1)
        counts.cached += cached

    def _on_snapshot(self, op: Snapshot) -> None:
        for cell in op.cells:
            self._cells[cell.cell_id] = cell.turn, cell.kind
            self._write(cell.cell_id, cell.source, anew=True)

    def _on_final(self, op: Final) -> None:
        if self._run_id and op.run_id != self._run_id:
            return
        self.final = op
        self.state, self.reason, self.usage = op.state, op.reason, op.usage
        if op.state != "answered":
            for turn in self.turns.values():
                if turn.ended is None:
                    turn.state = op.state
        self._end_turns(self._clock())


def _count(counts: Subcalls, state: str, by: int) -> None:
    setattr(counts, state, getattr(counts, state) + by)


def code_preview(source: str, lines: int) -> list[str]:
    """The lines of a cell that say most in little room: the last with something on them,
    without the indentation that they share."""
    full = [line.rstrip() for line in source.expandtabs(4).splitlines() if line.strip()]
    shown = full[-lines:]
    indent = min((len(line) - len(line.lstrip()) for line in shown), default=0)
    return [line[indent:] for line in shown]


def prose_preview(prose: str) -> str:
    """The first sentence of a turn's prose, without the marks of Markdown."""
    paragraph = " ".join(prose.strip().partition("\n\n")[0].split())
    return _SENTENCE_END.split(_MARKUP.sub("", paragraph), maxsplit=1)[0]
