"""Where a run is, reduced from its events: what the driver and the inline view both show.

A `Trajectory` covers one run and all its descendants. Turns are those of the
run itself; of the runs below it only nodes, counts and usage are kept. No
texts of sub-calls are kept: they can be many and long, and lie in the record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from rlm_kernel.cells import CellResult
from rlm_kernel.driver.note_counts import count_note
from rlm_kernel.driver.protocol import Node, State
from rlm_kernel.driver.task_counts import TaskCounts, count_verdict
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import (
    Action,
    AnswerRejected,
    ReplyStreamed,
    ReplyWithoutCode,
    RunEnded,
    RunPaused,
    RunResumed,
    RunStarted,
    RunState,
    Stored,
    SubcallEnded,
    SubcallJudged,
    SubcallStarted,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
    WorkerLost,
)

__all__ = ["Counts", "Trajectory", "Turn"]

_TASK_CHARS = 80
"""Of a name of a sub-task, which a cell gives."""

_ENDS: tuple[RunState, ...] = ("answered", "stopped", "failed")


@dataclass(slots=True)
class Counts:
    """Sub-calls by state."""

    running: int = 0
    done: int = 0
    failed: int = 0
    cached: int = 0
    """Of those done, those that were given a recorded reply."""

    retried: int = 0
    """Of those that ended, those that took more than one request."""

    @property
    def total(self) -> int:
        """All that were started."""
        return self.running + self.done + self.failed

    def start(self) -> None:
        """One more is under way."""
        self.running += 1

    def end(self, event: SubcallEnded) -> None:
        """One that was under way ended."""
        self.running -= 1
        if event.ok:
            self.done += 1
        else:
            self.failed += 1
        self.cached += event.cached
        self.retried += event.attempts > 1


@dataclass(slots=True)
class Turn:
    """One root proposal, its decision, execution and observation."""

    number: int
    started: float
    """Seconds since the epoch."""

    attempt: int = 1
    state: Literal[
        "proposing", "proposed", "executing", "observing", "done", "skipped", "stopped", "failed"
    ] = "proposing"
    """The last two: the run ended before this turn was observed."""

    reply: list[str] = field(default_factory=list)
    """What was streamed of the reply, in pieces."""

    prose: str = ""
    source: str = ""
    """What was proposed and, once decided, what runs."""

    action: Action | None = None
    by: str = ""
    observation: str = ""
    result: CellResult | None = None
    remarks: list[str] = field(default_factory=list)
    """Why an answer was rejected, why the worker ended; one sentence each."""

    notes: dict[str, int] = field(default_factory=dict)
    """Why sub-calls were others than were asked for, by kind, and how many."""

    tasks: dict[str, TaskCounts] = field(default_factory=dict)
    """Replies to typed sub-tasks, those of child runs included."""

    usage: Usage = field(default_factory=Usage)
    """Of the root and of the sub-calls that the cell made, children included."""

    counts: Counts = field(default_factory=Counts)
    ended: float = 0.0

    def seconds(self, now: float) -> float:
        """Since the root was asked, until the turn's end or *now*."""
        return max((self.ended or now) - self.started, 0.0)


class Trajectory:
    """One run and the tree below it.

    Parameters
    ----------
    run_id
        Of the run; runs below it join by their ``RunStarted``.
    started
        How it began.
    at
        When, in seconds since the epoch; 0 where only the first event will tell.
    """

    def __init__(self, run_id: str, started: RunStarted, at: float = 0.0) -> None:
        self.run_id = run_id
        self.started = started
        self.at = at
        self.now = at
        """Time of the last event."""

        self.state: RunState = "idle"
        self.awaiting = False
        self.reason = ""
        self.ended: RunEnded | None = None
        self.turns: dict[int, Turn] = {}
        self.turn = 0
        self.nodes: dict[str, Node] = {}
        self.counts = Counts()
        self.usage = Usage()
        # Which turn of ours each run of the tree, and each call, belongs to.
        self._turn_of_run: dict[str, int] = {}
        self._turn_of_call: dict[str, int] = {}

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in _ENDS

    @property
    def current(self) -> Turn | None:
        """The last turn."""
        return self.turns.get(self.turn)

    def owns(self, stored: Stored) -> bool:
        """Whether the event is of this run or of one below it."""
        return self._is_ours(stored.run_id) or self._is_child(stored)

    def apply(self, stored: Stored) -> Node | None:
        """Take in an event of the tree. Returns the node that it made or changed."""
        self.now = max(self.now, stored.at)
        event = stored.event
        if isinstance(event, SubcallStarted):
            return self._call_started(stored.run_id, stored.at, event)
        if isinstance(event, SubcallEnded):
            return self._call_ended(stored.at, event)
        if isinstance(event, SubcallJudged):
            return self._call_judged(event)
        if stored.run_id == self.run_id:
            self._own(event, stored.at)
            return None
        return self._below(stored)

    def as_state(self, cell_id: str = "") -> State:
        """The message that tells a front end where the run is."""
        return State(
            run_id=self.run_id,
            state=self.state,
            turn=self.turn,
            cell_id=cell_id,
            reason=self.reason,
            awaiting=self.awaiting,
            usage=self.usage,
            subcalls_done=self.counts.done,
            subcalls_running=self.counts.running,
            subcalls_failed=self.counts.failed,
            budget=self.started.budget,
            root=self.started.root,
            sub=self.started.sub,
        )

    # --- the run itself -----------------------------------------------------------------------

    def _own(self, event: object, at: float) -> None:
        match event:
            case RunStarted():
                self.at = self.at or at
            case TurnStarted():
                self._turn_started(event, at)
            case RunPaused():
                self.awaiting, self.reason = True, event.reason
            case RunResumed():
                self.awaiting, self.reason = False, ""
            case RunEnded():
                self._run_ended(event, at)
            case WorkerLost():
                self._remark(event.reason)
            case _:
                self._in_turn(event, at)

    def _turn_started(self, event: TurnStarted, at: float) -> None:
        known = self.turns.get(event.turn)
        turn = Turn(number=event.turn, started=at, attempt=event.attempt)
        if known is not None:  # asked again: what the turn has cost so far stays
            turn.started, turn.usage, turn.counts = known.started, known.usage, known.counts
            turn.notes, turn.tasks = known.notes, known.tasks
        self.turns[event.turn] = turn
        self.turn = event.turn
        self._go("proposing")

    def _in_turn(self, event: object, at: float) -> None:
        turn = self.turns.get(getattr(event, "turn", 0))
        if turn is None:
            return
        match event:
            case ReplyStreamed():
                turn.reply.append(event.text)
            case ReplyWithoutCode():
                turn.prose = event.reply
                self._spend(turn, event.usage)
            case TurnProposed():
                turn.prose, turn.source, turn.state = event.prose, event.source, "proposed"
                self._spend(turn, event.usage)
                self._go("proposed")
            case TurnDecided():
                self._decided(turn, event, at)
            case TurnExecuting():
                turn.source, turn.state = event.source, "executing"
                self._go("executing")
            case TurnExecuted():
                turn.result, turn.state = event.result, "observing"
                self._go("observing")
            case TurnObserved():
                turn.observation = event.observation
                self._close(turn, at)
            case AnswerRejected():
                turn.remarks.append(event.reason)

    def _decided(self, turn: Turn, event: TurnDecided, at: float) -> None:
        turn.action, turn.by = event.action, event.by
        self.awaiting, self.reason = False, ""
        if event.action == "edit" and event.source is not None:
            turn.source = event.source
        elif event.action == "skip":
            turn.state, turn.ended = "skipped", at

    def _run_ended(self, event: RunEnded, at: float) -> None:
        self.ended = event
        if self.current is not None and not self.current.ended:
            self.current.ended = at
            self.current.state = "done" if event.state == "answered" else event.state
        # The end knows the whole tree, also what no other event told (a summary's tokens).
        if event.usage.tokens or event.usage.calls:
            self.usage = event.usage
        self.awaiting, self.state, self.reason = False, event.state, event.reason

    def _close(self, turn: Turn, at: float) -> None:
        if not turn.ended:
            turn.ended, turn.state = at, "done"

    def _go(self, state: RunState) -> None:
        self.awaiting, self.state, self.reason = False, state, ""

    def _remark(self, text: str) -> None:
        if self.current is not None:
            self.current.remarks.append(text)

    def _spend(self, turn: Turn | None, usage: Usage) -> None:
        self.usage += usage
        if turn is not None:
            turn.usage += usage

    # --- the tree below -----------------------------------------------------------------------

    def _is_ours(self, run_id: str) -> bool:
        return run_id == self.run_id or run_id in self._turn_of_run

    def _is_child(self, stored: Stored) -> bool:
        event = stored.event
        return isinstance(event, RunStarted) and self._is_ours(event.parent_run_id)

    def _top_turn(self, run_id: str, turn: int) -> int:
        return turn if run_id == self.run_id else self._turn_of_run.get(run_id, 0)

    def _call_started(self, run_id: str, at: float, event: SubcallStarted) -> Node:
        number = self._turn_of_call[event.call_id] = self._top_turn(run_id, event.turn)
        for counts in self._counts(number):
            counts.start()
        turn = self.turns.get(number)
        if event.note and turn is not None:
            count_note(turn.notes, event.note)
        return self._keep(
            Node(
                id=event.call_id,
                parent=run_id,
                turn=event.turn,
                kind=event.kind,
                state="running",
                start=at,
                batch=event.batch_id,
                note=event.note,
                task=(event.params.task or "")[:_TASK_CHARS],
            )
        )

    def _call_ended(self, at: float, event: SubcallEnded) -> Node | None:
        node = self.nodes.get(event.call_id)
        if node is None or node.state != "running":
            return None
        number = self._turn_of_call.pop(event.call_id, 0)
        for counts in self._counts(number):
            counts.end(event)
        # A child run's own events have already told what it used.
        if not node.run_id:
            self._spend(self.turns.get(number), event.usage)
        return self._keep(
            replace(
                node,
                state="done" if event.ok else "failed",
                end=at,
                tokens=event.usage.tokens,
                cached=event.cached,
                attempts=event.attempts,
                run_id=node.run_id or event.child_run_id,
            )
        )

    def _call_judged(self, event: SubcallJudged) -> Node | None:
        node = self.nodes.get(event.call_id)
        if node is None:
            return None
        turn = self.turns.get(self._top_turn(node.parent, node.turn))
        if turn is not None:
            count_verdict(turn.tasks, node.task, ok=event.ok)
        return self._keep(replace(node, verdict="ok" if event.ok else "unfit"))

    def _below(self, stored: Stored) -> Node | None:
        event = stored.event
        if isinstance(event, RunStarted):
            return self._child_started(stored.run_id, event)
        if isinstance(event, TurnProposed | ReplyWithoutCode):
            number = self._turn_of_run.get(stored.run_id, 0)
            self._spend(self.turns.get(number), event.usage)
        return None

    def _child_started(self, run_id: str, event: RunStarted) -> Node | None:
        node = self.nodes.get(event.parent_call_id)
        self._turn_of_run[run_id] = self._turn_of_call.get(event.parent_call_id, self.turn)
        if node is None:
            return None
        return self._keep(replace(node, run_id=run_id))

    def _keep(self, node: Node) -> Node:
        self.nodes[node.id] = node
        return node

    def _counts(self, number: int) -> list[Counts]:
        """The counts of the tree, and those of the turn that the call belongs to."""
        turn = self.turns.get(number)
        return [self.counts] if turn is None else [self.counts, turn.counts]
