"""Lets a front end execute the cell of a turn, so that its output stands where a person's would.

The run asks for a cell to be executed (`Order`); the front end sends an
execute request; the kernel that receives it takes a `Claim` on the turn and
runs the cell in the REPL as that turn. Either side may come first: a person
who executes the waiting proposal has the claim before the run gives the
order.

A run never hangs on a front end. One that does not answer within `GRACE`
seconds is passed over, and where no other is there the cell is run without
one. Should the execute request come after all, its claim holds the result
that the turn had, and nothing runs twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from rlm_kernel.cells import CellResult
from rlm_kernel.driver.outbox import Handle

__all__ = ["GRACE", "Claim", "ExecuteDirect", "Late", "Order", "Verdict"]

GRACE = 10.0
"""Seconds that a front end has to answer; a reload of a page takes about four."""

Verdict = Literal["run", "show", "none", "skip"]

ExecuteDirect = Callable[[], Awaitable[CellResult]]
"""Runs the cell of a turn in the REPL, without a front end."""


class Claim:
    """An execute request that is the execution of a turn.

    Await `verdict`, then:

    ``run``
        run `source` as turn `turn`, and call `done` or `failed` in any case;
    ``show``
        the turn has run without a front end: show the outputs of `result`, run nothing;
    ``none``
        the run ended before a person's execution of its proposal could be the turn's: the cell
        is an ordinary one;
    ``skip``
        the run was stopped while the front end's request was under way: run nothing, say so.
    """

    def __init__(self, run_id: str, turn: int, cell_id: str, source: str) -> None:
        self.run_id = run_id
        self.turn = turn
        self.cell_id = cell_id
        self.source = source
        loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = loop.create_future()
        self._outcome: asyncio.Future[CellResult] = loop.create_future()
        # A run that was stopped meanwhile asks no more for the outcome, an error included.
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._shown: CellResult | None = None

    async def verdict(self) -> Verdict:
        """What is to be done with the cell; waits until the run is ready for it."""
        return await asyncio.shield(self._verdict)

    @property
    def result(self) -> CellResult:
        """How the turn went, where the verdict is ``show``."""
        if self._shown is None:
            raise RuntimeError("only a claim with the verdict 'show' has a result")
        return self._shown

    def done(self, result: CellResult) -> None:
        """The cell ran. A second call, or one after the run gave up, changes nothing."""
        if not self._outcome.done():
            self._outcome.set_result(result)

    def failed(self, error: BaseException) -> None:
        """The cell could not be run; the run is told *error*."""
        if self._outcome.done():
            return
        if isinstance(error, asyncio.CancelledError | StopIteration | GeneratorExit):
            # Not the run's own cancellation: raised in the run it would end the wrong task.
            error = RuntimeError("the execution of the cell was cancelled")
        self._outcome.set_exception(error)

    # --- for the hub --------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the verdict is known."""
        return self._verdict.done()

    async def run(self) -> CellResult:
        """Let the kernel run the cell; its result. Raises what the kernel gave to `failed`."""
        self._verdict.set_result("run")
        return await self._outcome

    def show(self, result: CellResult) -> None:
        """Have the outputs of *result* shown."""
        self._shown = result
        self._settle("show")

    def void(self) -> None:
        """The run does not want the cell any more."""
        self._settle("none")

    def skip(self) -> None:
        """Nothing is to run."""
        self._settle("skip")

    def _settle(self, verdict: Verdict) -> None:
        if not self._verdict.done():
            self._verdict.set_result(verdict)


@dataclass(eq=False)
class Order:
    """A turn that waits for a front end to execute its cell."""

    turn: int
    source: str
    sha: str
    taken: asyncio.Future[Claim | None]
    """The claim, or ``None`` where the cell is to be run without a front end."""

    announced: bool = False
    """The front end was told to execute the cell."""

    heard: bool = False
    """The front end said that it is about to execute the cell."""

    resent: bool = False
    """It was told twice, because its cell held another text."""

    timer: Handle | None = None

    @property
    def claimed(self) -> bool:
        """Whether a front end executes the cell."""
        taken = self.taken
        return taken.done() and not taken.cancelled() and taken.result() is not None

    def give_up(self) -> None:
        """Run the cell without a front end."""
        if not self.taken.done():
            self.taken.set_result(None)


@dataclass(eq=False)
class Late:
    """A turn that ran, or runs, or was stopped without the front end that should have executed
    its cell."""

    turn: int
    sha: str
    result: CellResult | None = None
    stopped: bool = False
    claims: list[Claim] = field(default_factory=list)
    """Requests that came while it ran."""

    def show(self, claim: Claim) -> None:
        """Have *claim* show the result, now or when it is there."""
        if self.result is not None:
            claim.show(self.result)
        elif self.stopped:
            claim.skip()
        else:
            self.claims.append(claim)

    def ended(self, result: CellResult | None) -> None:
        """The turn ran; ``None`` where it did not, or not to its end."""
        self.result, self.stopped = result, result is None
        claims, self.claims = self.claims, []
        for claim in claims:
            self.show(claim)
