"""The other parties of the hub: a clock, a front end, a kernel that receives execute requests,
and a run that is scripted event by event."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlm_kernel.cells import CellResult, PromptInfo, Result, Stream
from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.protocol import (
    Accepted,
    CloseCell,
    Conflict,
    Delta,
    Final,
    FromFrontEnd,
    Need,
    Nodes,
    Open,
    OpenCell,
    Operation,
    Refused,
    RunCell,
    Snapshot,
    State,
    Update,
    source_sha,
)
from rlm_kernel.engine.budget import Budget, Usage
from rlm_kernel.engine.decisions import Decision, Proposal
from rlm_kernel.engine.events import (
    Event,
    ReplyStreamed,
    RunEnded,
    RunPaused,
    RunStarted,
    RunState,
    Stored,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.errors import UsageError

RUN = "0123456789ab"


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait until *condition* holds; fail after thirty seconds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what or "the condition did not come true"
        await asyncio.sleep(0.001)


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._calls: list[tuple[float, int, Timer]] = []
        self._count = 0

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._count += 1
        heapq.heappush(self._calls, (self.now + delay, self._count, timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass, making the calls that are due on the way."""
        end = self.now + seconds
        while self._calls and self._calls[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._calls)
            if timer.call is not None:
                timer.call()
        self.now = end


@dataclass
class Timer:
    call: Callable[[], None] | None

    def cancel(self) -> None:
        self.call = None


@dataclass
class Cell:
    cell_id: str
    kind: str
    source: str = ""
    person: bool = False
    """A person changed it."""


class FrontEnd:
    """A front end that keeps to the protocol, without pixels.

    What it sends is queued until `speak`, as a comm message is never answered within itself.
    """

    def __init__(
        self, hub: Hub, comm_id: str = "comm", *, lose: Callable[[int], bool] | None = None
    ):
        self.hub = hub
        self.comm_id = comm_id
        self.cells: list[Cell] = [Cell("start", "code", "%%rlm\nWhich code?")]
        self.updates: list[Update] = []
        self.times: list[float] = []
        self.ops: list[Operation] = []
        self.states: list[State] = []
        self.nodes: dict[str, Any] = {}
        self.to_run: list[RunCell] = []
        self.outgoing: list[FromFrontEnd] = []
        self._lose = lose or (lambda count: False)
        self._expected = 1
        self._received = 0

    def open(self, name: str = "page", *, can_drive: bool = True) -> FrontEnd:
        data = msgspec.to_builtins(Open(client=name, can_drive=can_drive))
        self.hub.connect(self.comm_id, self.receive, data)
        return self

    def say(self, message: FromFrontEnd) -> None:
        self.hub.message(self.comm_id, msgspec.to_builtins(message))

    def speak(self) -> None:
        """Send what was queued, and what that leads to."""
        while self.outgoing:
            self.say(self.outgoing.pop(0))

    def receive(self, data: dict[str, Any]) -> None:
        update = msgspec.convert(msgspec.json.decode(msgspec.json.encode(data)), Update)
        self._received += 1
        if self._lose(self._received):
            return
        self.updates.append(update)
        whole = any(isinstance(op, Snapshot) for op in update.ops)
        if update.seq < self._expected:
            return
        if update.seq > self._expected and not whole:
            self.outgoing.append(Need(from_seq=self._expected))
            return
        self._expected = update.seq + 1
        for op in update.ops:
            self.ops.append(op)
            self._apply(op)

    def _apply(self, op: Operation) -> None:
        match op:
            case OpenCell():
                self._insert(op.cell_id, op.kind, op.after)
            case Delta():
                self._append(op)
            case CloseCell():
                self._close(op)
            case RunCell():
                self.to_run.append(op)
            case State():
                self.states.append(op)
            case Nodes():
                self.nodes.update((node.id, node) for node in op.nodes)
            case Snapshot():
                for told in op.cells:
                    self._insert(told.cell_id, told.kind, told.after)
                    cell = self.cell(told.cell_id)
                    if cell is not None and not cell.person:
                        cell.source = told.source

    def cell(self, cell_id: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.cell_id == cell_id), None)

    def text(self, cell_id: str) -> str:
        cell = self.cell(cell_id)
        assert cell is not None, f"there is no cell {cell_id}"
        return cell.source

    def ids(self) -> list[str]:
        return [cell.cell_id for cell in self.cells]

    def all(self, kind: type[Any]) -> list[Any]:
        return [op for op in self.ops if isinstance(op, kind)]

    def refusals(self) -> list[str]:
        return [op.reason for op in self.all(Refused)]

    def _insert(self, cell_id: str, kind: str, after: str) -> None:
        if self.cell(cell_id) is not None:
            return
        ids = self.ids()
        at = ids.index(after) + 1 if after in ids else len(ids)
        self.cells.insert(at, Cell(cell_id, kind))

    def _append(self, op: Delta) -> None:
        cell = self.cell(op.cell_id)
        if cell is not None and cell.person:
            return
        have = 0 if cell is None else len(cell.source)
        if cell is None or op.offset != have:
            self.outgoing.append(Conflict(cell_id=op.cell_id, have=have))
        else:
            cell.source += op.text

    def _close(self, op: CloseCell) -> None:
        assert source_sha(op.source) == op.sha
        cell = self.cell(op.cell_id)
        if cell is None or cell.person:
            return
        if op.source:
            cell.source = op.source
        else:
            self.cells.remove(cell)

    def accept(self) -> tuple[str, str]:
        """Answer the next `RunCell`; id and source for the execute request."""
        op = self.to_run.pop(0)
        cell = self.cell(op.cell_id)
        assert cell is not None
        assert source_sha(cell.source) == op.sha
        self.say(Accepted(cell_id=op.cell_id, source=cell.source, sha=op.sha))
        return op.cell_id, cell.source


class Kernel:
    """Receives execute requests and runs cells in turn, as the kernel does."""

    def __init__(self, hub: Hub, result_of: Callable[[str], CellResult] | None = None) -> None:
        self.hub = hub
        self.result_of = result_of or cell_result
        self.directly: list[int] = []
        """Turns that ran without a front end."""
        self.ran: list[tuple[int, str]] = []
        """Turn (0 for an ordinary cell) and source of what ran."""
        self.shown: list[CellResult] = []

    async def execute_request(self, cell_id: str | None, code: str) -> str:
        claim = self.hub.claim(cell_id, code)
        verdict = "none" if claim is None else await claim.verdict()
        if claim is None or verdict == "none":
            self.ran.append((0, code))
        elif verdict == "run":
            self.ran.append((claim.turn, code))
            claim.done(self.result_of(code))
        elif verdict == "show":
            self.shown.append(claim.result)
        return verdict

    async def direct(self, turn: int, code: str) -> CellResult:
        self.ran.append((turn, code))
        self.directly.append(turn)
        return self.result_of(code)


def cell_result(code: str) -> CellResult:
    text = f"ran {len(code)}\n"
    return CellResult(ok=True, execution_count=1, outputs=[Stream("stdout", text)])


PROMPT = PromptInfo(kind="str", chars=1_234_567, items=1, sha256="0" * 64, preview="Once")


def run_started(**fields: Any) -> RunStarted:
    known: dict[str, Any] = {
        "query": "Which code?",
        "prompt": PROMPT,
        "dialect": "paper",
        "root": "openai:m@http://127.0.0.1:1/v1",
        "sub": "embedded",
        "budget": Budget(),
    }
    return RunStarted(**(known | fields))


@dataclass
class Control:
    """What a person can do to the scripted run, and what was asked of it."""

    run_id: str = RUN
    state: RunState = "idle"
    turn: int = 0
    proposal: Proposal | None = None
    decisions: list[Decision] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def decide(self, decision: Decision) -> None:
        if self.proposal is None:
            raise UsageError("no proposal waits for a decision")
        self.proposal = None
        self.decisions.append(decision)

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def stop(self, reason: str) -> None:
        self.asked.append(f"stop: {reason}")


class Script:
    """Emits the events of a run, as the engine does."""

    def __init__(self, listener: Callable[[Stored], None], clock: Clock, run_id: str = RUN) -> None:
        self.control = Control(run_id)
        self._listener = listener
        self._clock = clock
        self._seq = 0
        self._offset = 0

    def emit(self, event: Event, run_id: str = "") -> None:
        self._seq += 1
        self._listener(Stored(self._seq, run_id or self.control.run_id, self._clock.now, event))

    def start(self, hub: Hub, **fields: Any) -> bool:
        started = run_started(**fields)
        driven = hub.attach(self.control, started, "run.rlm.sqlite", cell_id="start")
        self.emit(started)
        return driven

    def ask(self, turn: int, attempt: int = 1) -> None:
        self.control.turn, self._offset = turn, 0
        self.emit(TurnStarted(turn=turn, attempt=attempt))

    def stream(self, *pieces: str, attempt: int = 1) -> None:
        for piece in pieces:
            self.emit(
                ReplyStreamed(
                    turn=self.control.turn, offset=self._offset, text=piece, attempt=attempt
                )
            )
            self._offset += len(piece)

    def propose(self, source: str, prose: str = "", *, wait: bool = False) -> None:
        turn = self.control.turn
        usage = Usage(input_tokens=100, output_tokens=10, calls=1)
        self.emit(TurnProposed(turn=turn, reply="", prose=prose, source=source, usage=usage))
        if wait:
            self.control.proposal = Proposal(turn=turn, source=source, prose=prose)
            self.emit(RunPaused(turn=turn))

    def decided(self, action: Any = "run", source: str | None = None, by: str = "policy") -> None:
        self.emit(TurnDecided(turn=self.control.turn, action=action, by=by, source=source))

    def executing(self, source: str) -> None:
        self.emit(TurnExecuting(turn=self.control.turn, source=source))

    def executed(self, result: CellResult) -> None:
        self.emit(TurnExecuted(turn=self.control.turn, result=result))
        self.emit(TurnObserved(turn=self.control.turn, observation="it ran"))

    def turn(self, turn: int, source: str, prose: str = "") -> None:
        """A whole turn, except for its execution."""
        self.ask(turn)
        self.stream(f"{prose}\n```repl\n{source}\n```\n")
        self.propose(source, prose)
        self.decided()
        self.executing(source)

    def end(self, response: str = "48213", state: Any = "answered", reason: str = "") -> None:
        usage = Usage(input_tokens=1000, output_tokens=100, calls=3)
        self.emit(RunEnded(state=state, response=response, usage=usage, reason=reason))


def picture() -> Result:
    return Result(3, {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"})


def finals(front: FrontEnd) -> list[Final]:
    return front.all(Final)
