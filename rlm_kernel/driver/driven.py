"""One run as the hub sees it: its cells, what a person does to them, and who executes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlm_kernel.cells import CellResult
from rlm_kernel.driver.cellwriter import CellWriter
from rlm_kernel.driver.handover import Claim, ExecuteDirect, Late, Order
from rlm_kernel.driver.protocol import (
    Accepted,
    Decide,
    Edited,
    Final,
    RunCell,
    Snapshot,
    State,
    source_sha,
)
from rlm_kernel.driver.trajectory import Trajectory
from rlm_kernel.engine.decisions import Decision, RunControl
from rlm_kernel.engine.events import RunEnded
from rlm_kernel.errors import RLMError, UsageError

__all__ = ["DrivenRun"]


@dataclass(eq=False)
class DrivenRun:
    """A run that was attached to the hub."""

    control: RunControl
    trajectory: Trajectory
    writer: CellWriter
    record: str
    driven: bool
    """A front end was there when it began, so that its cells stand in the notebook. A run that
    began in the output of one cell stays there."""

    order: Order | None = None
    prepared: Claim | None = None
    """A person executed the proposal before the run gave the order."""

    late: dict[int, Late] = field(default_factory=dict)
    """By turn: those that ran without their front end."""

    announced: dict[str, str] = field(default_factory=dict)
    """By cell id: hash of the source that the front end said it is about to execute."""

    paused_for: str = ""
    """Cell that a person edited while it was written; for it the hub paused the run."""

    final: Final | None = None
    told: bool = False
    """A driver was sent the end."""

    @property
    def run_id(self) -> str:
        """Of the run."""
        return self.trajectory.run_id

    @property
    def cell_id(self) -> str:
        """Of the code cell of the present turn; empty where the notebook has none."""
        return self.writer.code_of(self.trajectory.turn) if self.driven else ""

    def state(self) -> State:
        """Where the run is, for a front end."""
        return self.trajectory.as_state(self.cell_id)

    def snapshot(self, *, driving: bool) -> Snapshot:
        """All so far, for a client that drives the run or does not."""
        return Snapshot(
            run_id=self.run_id,
            query=self.trajectory.started.query,
            state=self.trajectory.state,
            turn=self.trajectory.turn,
            cells=self.writer.snapshot() if driving else [],
            driving=driving,
            prompt=self.trajectory.started.prompt,
            dialect=self.trajectory.started.dialect,
        )

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to tell: it ended, and a driver, where it has one, knows.
        Its cells are in the notebook then, or a person has removed them."""
        return self.trajectory.over and (self.told or not self.driven)

    def edited(self) -> str | None:
        """What a person made of the cell of the present turn."""
        cell = self.writer.code
        return None if cell is None else cell.edited

    # --- events -------------------------------------------------------------------------------

    def executing(self) -> None:
        """A cell was handed to the REPL. A person who had edited it has executed it now, and
        the run goes on as before."""
        if self.paused_for:
            self.paused_for = ""
            self.control.resume()

    def ended(self, event: RunEnded) -> None:
        """The run is over."""
        self.void_prepared()
        self.final = Final(
            run_id=self.run_id,
            state=event.state,
            response=event.response,
            reason=event.reason,
            usage=self.trajectory.usage,
            record=self.record,
        )

    # --- what a person does -------------------------------------------------------------------

    def decide(self, request: Decide, by: str) -> None:
        """Pass on a decision. Raises `UsageError` where it cannot be taken."""
        proposal = self.control.proposal
        if proposal is None:
            raise UsageError("no proposal waits for a decision; pause the run to be asked")
        if proposal.turn != request.turn:
            raise UsageError(
                f"turn {request.turn} does not wait for a decision, turn {proposal.turn} does; "
                "decide about that one"
            )
        action, source = request.action, request.source if request.action == "edit" else None
        if action == "edit" and source is None:
            raise UsageError("an edit needs the new source; send it with the decision")
        if action == "run" and self.edited() is not None:
            action, source = "edit", self.edited()  # a person's text always wins
        self.control.decide(Decision(action=action, by=by, source=source, note=request.note))

    def resume(self, by: str) -> None:
        """Go on by itself; a proposal that waits is run, as a person edited it."""
        self.paused_for = ""
        proposal = self.control.proposal
        if proposal is not None and self.edited() is not None:
            self.decide(Decide(turn=proposal.turn, action="run"), by)
        self.control.resume()

    def accepted(self, request: Accepted) -> bool:
        """The front end is about to execute a cell. Returns whether that was waited for."""
        if source_sha(request.source) != request.sha:
            raise UsageError(
                f"the hash of cell {request.cell_id} is not that of its source; send both again"
            )
        self.announced[request.cell_id] = request.sha
        if self.order is None or request.cell_id != self.writer.code_of(self.order.turn):
            return False
        self.order.heard = True
        return True

    def person_edited(self, request: Edited) -> None:
        """A person changed a cell. While it is being written, the run is to wait for them."""
        cell = self.writer.edited(request.cell_id, request.source)
        if cell is None or cell is not self.writer.code or self.trajectory.over:
            return
        if self.order is not None:
            if request.source != self.order.source:
                self.order.give_up()
        elif cell.state == "open" and cell.edited is not None and not self.paused_for:
            self.paused_for = cell.cell_id
            self.control.pause()

    # --- who executes -------------------------------------------------------------------------

    def claim(self, cell_id: str | None, code: str, by: str) -> Claim | None:
        """The turn that an execute request executes; ``None`` where it is an ordinary cell."""
        return (
            self._claim_order(cell_id, code)
            or self._claim_proposal(cell_id, code, by)
            or self._claim_late(cell_id, code)
        )

    def take_prepared(self, turn: int, source: str) -> Claim | None:
        """The execution of a turn that a person began before the run asked for it."""
        prepared = self.prepared
        if prepared is None or prepared.turn != turn or prepared.source != source:
            self.void_prepared()
            return None
        self.prepared = None
        return prepared

    def void_prepared(self) -> None:
        """What a person began is not the run's any more."""
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            prepared.void()

    def announcement(self) -> list[RunCell]:
        """The order for the front end, once its cell is known to stand there."""
        order = self.order
        if order is None or order.taken.done() or order.announced:
            return []
        if self.trajectory.turn != order.turn or self.trajectory.state != "executing":
            return []  # the event is on its way, and its cell with it
        order.announced = True
        return [RunCell(cell_id=self.writer.code_of(order.turn), sha=order.sha)]

    def unfinished(self) -> list[RunCell]:
        """Cells that a new driver is to execute: those that ran without one, for their outputs,
        and the one that waits."""
        if self.order is not None:
            self.order.announced = self.order.heard = False
        cells = [
            (self.writer.code_of(turn), late.sha)
            for turn, late in self.late.items()
            if not late.stopped
        ]
        ops = [RunCell(cell_id=cell_id, sha=sha) for cell_id, sha in cells if cell_id]
        return ops + self.announcement()

    def give_up_order(self) -> None:
        """The run is not interested any more; a request that comes late runs nothing."""
        order, self.order = self.order, None
        if order is None:
            return
        if order.timer is not None:
            order.timer.cancel()
        if order.announced and not order.claimed:
            self.late[order.turn] = Late(order.turn, order.sha, stopped=True)

    async def run_directly(self, turn: int, source: str, execute: ExecuteDirect) -> CellResult:
        """Run a turn without its front end; a request that comes late is shown the result."""
        late = self.late[turn] = Late(turn, source_sha(source))
        try:
            result = await execute()
        except BaseException:
            late.ended(None)
            raise
        late.ended(result)
        return result

    def _claim_order(self, cell_id: str | None, code: str) -> Claim | None:
        order = self.order
        if order is None or order.taken.done():
            return None
        ours = self.writer.code_of(order.turn)
        if not self._is_cell(ours, order.sha, cell_id, code):
            return None
        if code != order.source:
            # The run has recorded what it runs. The person's text runs as a cell of theirs,
            # and the turn beside it.
            order.give_up()
            return None
        claim = Claim(self.run_id, order.turn, ours, code)
        order.taken.set_result(claim)
        return claim

    def _claim_proposal(self, cell_id: str | None, code: str, by: str) -> Claim | None:
        proposal, ours = self.control.proposal, self.cell_id
        if proposal is None or self.prepared is not None or self.trajectory.over:
            return None
        if not self._is_cell(ours, source_sha(proposal.source), cell_id, code):
            return None
        source = code if code != proposal.source else None
        action = Decision(action="run" if source is None else "edit", by=by, source=source)
        claim = self.prepared = Claim(self.run_id, proposal.turn, ours, code)
        try:
            self.control.decide(action)
        except RLMError:
            self.prepared = None
            return None
        return claim

    def _claim_late(self, cell_id: str | None, code: str) -> Claim | None:
        sha = source_sha(code)
        for turn, late in self.late.items():
            ours = self.writer.code_of(turn)
            if late.sha == sha and ours and cell_id in (ours, None, ""):
                del self.late[turn]
                claim = Claim(self.run_id, turn, ours, code)
                late.show(claim)
                return claim
        return None

    def _is_cell(self, ours: str, sha: str, cell_id: str | None, code: str) -> bool:
        """Whether an execute request is that of our cell."""
        if cell_id or not ours:
            return bool(ours) and cell_id == ours
        return source_sha(code) in (sha, self.announced.get(ours))
