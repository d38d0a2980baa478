"""The cells of a run in the notebook: turns events into the operations that write them.

A turn has a markdown cell for the root's prose, where there is any, and a
code cell for its proposal. Both are streamed as the reply comes in and
corrected when the proposal is known. This is a pure reduction: it knows no
clients and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlm_kernel.driver.protocol import (
    CELL_KIND,
    CellSnapshot,
    CloseCell,
    Delta,
    OpenCell,
    Operation,
    source_sha,
)
from rlm_kernel.engine.events import (
    Event,
    ReplyStreamed,
    ReplyWithoutCode,
    RunEnded,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.engine.fences import FenceReader

__all__ = ["CellWriter", "WrittenCell"]

_CONFLICTS = 3
"""Times that a cell's text is sent again before the cell is left alone until its close."""


@dataclass(slots=True)
class WrittenCell:
    """A cell as the front end has it, as far as the kernel knows."""

    cell_id: str
    after: str
    turn: int
    kind: CELL_KIND
    source: str = ""
    """What the model wrote there, or a decision replaced it with."""

    state: Literal["open", "closed", "running", "done"] = "open"
    edited: str | None = None
    """What a person made of it."""

    conflicts: int = 0

    @property
    def text(self) -> str:
        """What stands in the cell: a person's text before the model's."""
        return self.source if self.edited is None else self.edited

    def snapshot(self) -> CellSnapshot:
        """For a front end that comes late."""
        return CellSnapshot(
            cell_id=self.cell_id,
            after=self.after,
            turn=self.turn,
            source=self.text,
            kind=self.kind,
            state=self.state,
        )


class CellWriter:
    """Writes the cells of one run.

    Parameters
    ----------
    run_id
        Begins the ids of the cells.
    after
        Id of the cell that started the run; its cells follow that one.
    """

    def __init__(self, run_id: str, after: str) -> None:
        self.run_id = run_id
        self.cells: dict[str, WrittenCell] = {}
        """By id, in the order of the notebook."""

        self._first_after = after
        self._turn = 0
        self._attempt = 1
        self._reader = FenceReader()
        self._code_id = ""
        self._prose_id = ""
        self._codes: dict[int, str] = {}

    @property
    def code(self) -> WrittenCell | None:
        """The code cell of the present turn."""
        return self.cells.get(self._code_id)

    def code_of(self, turn: int) -> str:
        """Id of the code cell of a turn; empty where it has none."""
        cell_id = self._codes.get(turn, "")
        return cell_id if cell_id in self.cells else ""

    def apply(self, event: Event) -> list[Operation]:
        """What the front end must do about *event*."""
        match event:
            case TurnStarted():
                return self._start(event)
            case ReplyStreamed():
                self._reader.feed(event.text)
                return self._stream(self._reader.prose, self._reader.source)
            case TurnProposed():
                return self._settle(event.prose, event.source)
            case ReplyWithoutCode():
                return self._settle(event.reply.strip(), "")
            case TurnDecided():
                return self._decided(event)
            case TurnExecuting():
                return self._executing(event)
            case TurnExecuted():
                self._mark("done")
            case RunEnded():
                return self._end()
        return []

    def edited(self, cell_id: str, source: str) -> WrittenCell | None:
        """A person changed a cell; returns it where it is one of the run's."""
        cell = self.cells.get(cell_id)
        if cell is not None:
            cell.edited = None if source == cell.source else source
        return cell

    def conflict(self, cell_id: str, have: int) -> list[Operation]:
        """The front end has only *have* characters of a cell: what follows them, again."""
        cell = self.cells.get(cell_id)
        if cell is None or cell.edited is not None:
            return []
        cell.conflicts += 1
        if cell.conflicts > _CONFLICTS or not 0 <= have <= len(cell.source):
            # Neither side knows what the other has. The close will tell.
            return [] if cell.state == "open" else [_closing(cell)]
        if cell.state != "open":
            return [_closing(cell)]
        return [Delta(cell_id=cell_id, offset=have, text=cell.source[have:])]

    def snapshot(self) -> list[CellSnapshot]:
        """All cells, in the order of the notebook."""
        return [cell.snapshot() for cell in self.cells.values()]

    # --- events -------------------------------------------------------------------------------

    def _start(self, event: TurnStarted) -> list[Operation]:
        ops = self._take_back() if event.turn == self._turn else []
        self._turn, self._attempt = event.turn, event.attempt
        self._reader = FenceReader()
        self._prose_id, self._code_id = self._free_id("-p"), self._free_id("")
        self._codes[event.turn] = self._code_id
        return ops

    def _stream(self, prose: str, source: str) -> list[Operation]:
        ops: list[Operation] = []
        if prose.strip():
            ops += self._grow(self._prose_id, "markdown", prose)
        if source.strip():
            ops += self._grow(self._code_id, "code", source)
        return ops

    def _settle(self, prose: str, source: str) -> list[Operation]:
        """The reply is whole: what was streamed becomes what it is."""
        ops = self._finish(self._prose_id, "markdown", prose if prose.strip() else "")
        return ops + self._finish(self._code_id, "code", source)

    def _decided(self, event: TurnDecided) -> list[Operation]:
        if event.action == "skip":
            return self._take_back()
        if event.action == "edit" and event.source is not None:
            return self._rewrite(event.source)
        return []

    def _executing(self, event: TurnExecuting) -> list[Operation]:
        ops = self._rewrite(event.source)
        self._mark("running")
        return ops

    def _end(self) -> list[Operation]:
        """A reply that was cut stays as far as it came."""
        ops: list[Operation] = []
        for cell in self.cells.values():
            if cell.state == "open":
                cell.state = "closed"
                ops.append(_closing(cell))
            elif cell.state == "running":
                cell.state = "done"
        return ops

    # --- cells --------------------------------------------------------------------------------

    def _grow(self, cell_id: str, kind: CELL_KIND, text: str) -> list[Operation]:
        ops = self._open(cell_id, kind)
        cell = self.cells[cell_id]
        # Text that turned out otherwise (a thought, sample output) waits for the close.
        if text.startswith(cell.source) and len(text) > len(cell.source):
            offset, cell.source = len(cell.source), text
            if cell.edited is None:
                ops.append(Delta(cell_id=cell_id, offset=offset, text=text[offset:]))
        return ops

    def _finish(self, cell_id: str, kind: CELL_KIND, source: str) -> list[Operation]:
        if not source:
            return self._remove(cell_id)
        ops = self._open(cell_id, kind)
        cell = self.cells[cell_id]
        cell.source, cell.state = source, "closed"
        return [*ops, _closing(cell)]

    def _rewrite(self, source: str) -> list[Operation]:
        """A decision put *source* in the place of the proposal."""
        cell = self.code
        if cell is None:
            return self._finish(self._code_id, "code", source)
        if cell.edited == source:
            cell.edited = None
        elif cell.source == source:
            return []
        cell.source = source
        return [_closing(cell)]

    def _open(self, cell_id: str, kind: CELL_KIND) -> list[Operation]:
        if cell_id in self.cells:
            return []
        cell = WrittenCell(cell_id, self._place(kind), self._turn, kind)
        self.cells[cell_id] = cell
        if kind == "markdown" and self._code_id in self.cells:
            # Prose that came late stands before its code all the same.
            code = self.cells[self._code_id] = self.cells.pop(self._code_id)
            code.after = cell_id
        return [
            OpenCell(
                cell_id=cell_id,
                after=cell.after,
                turn=cell.turn,
                run_id=self.run_id,
                kind=kind,
            )
        ]

    def _place(self, kind: CELL_KIND) -> str:
        """Id of the cell that a new one of this kind follows."""
        before = [key for key in self.cells if kind != "markdown" or key != self._code_id]
        return before[-1] if before else self._first_after

    def _take_back(self) -> list[Operation]:
        """Remove what the model added in this turn."""
        return self._remove(self._prose_id) + self._remove(self._code_id)

    def _remove(self, cell_id: str) -> list[Operation]:
        cell = self.cells.get(cell_id)
        if cell is None:
            return []
        if cell.edited is not None:  # it is a person's now, and stays
            cell.state = "closed"
            return []
        del self.cells[cell_id]
        for other in self.cells.values():
            if other.after == cell_id:
                other.after = cell.after
        return [CloseCell(cell_id=cell_id, sha=source_sha(""), source="")]

    def _free_id(self, suffix: str) -> str:
        """Id for a cell of this attempt; another one where a person's cell keeps the usual."""
        cell_id = f"{self.run_id}-{self._turn}{suffix}"
        return cell_id if cell_id not in self.cells else f"{cell_id}-{self._attempt}"

    def _mark(self, state: Literal["running", "done"]) -> None:
        if self.code is not None:
            self.code.state = state


def _closing(cell: WrittenCell) -> CloseCell:
    return CloseCell(cell_id=cell.cell_id, sha=source_sha(cell.source), source=cell.source)
