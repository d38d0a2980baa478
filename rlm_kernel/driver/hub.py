"""The kernel's side of the comm ``rlm.driver``: clients on one hand, runs on the other.

The hub is told of every event and turns it into operations for the clients;
it is told of every execute request and says which of them are turns of a run
(`Hub.claim`); and it lets the elected client execute the cells of a run
(`Hub.execute`). It knows nothing of Jupyter: a client is a function that
sends. Everything runs on one event loop; only `Hub.execute` waits.

What a client sends never raises here. What cannot be done is answered with
`Refused`, in one sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlm_kernel.cells import CellResult
from rlm_kernel.driver.cellwriter import CellWriter
from rlm_kernel.driver.driven import DrivenRun
from rlm_kernel.driver.handover import GRACE, Claim, ExecuteDirect, Order
from rlm_kernel.driver.outbox import CallLater, Outbox, Send
from rlm_kernel.driver.protocol import (
    SCHEMA,
    Accepted,
    Conflict,
    Decide,
    Edited,
    FromFrontEnd,
    Need,
    Node,
    Open,
    Operation,
    Pause,
    Refused,
    Resume,
    State,
    Stop,
    source_sha,
)
from rlm_kernel.driver.trajectory import Trajectory
from rlm_kernel.engine.decisions import RunControl
from rlm_kernel.engine.events import (
    ReplyStreamed,
    RunEnded,
    RunStarted,
    Stored,
    SubcallEnded,
    SubcallJudged,
    SubcallStarted,
    TurnExecuting,
    TurnStarted,
)
from rlm_kernel.errors import RLMError, UsageError

__all__ = ["Claim", "Hub"]


@dataclass(eq=False)
class _Client:
    """A front end with an open comm."""

    outbox: Outbox
    name: str = ""
    opened: bool = False
    can_drive: bool = False
    silent: bool = False
    """It did not answer when it should have driven; the next thing that it says ends that."""


_OF_CALLS = SubcallStarted | SubcallEnded | SubcallJudged


class Hub:
    """Connects runs with the front ends that show and drive them.

    Parameters
    ----------
    loop_time, call_later
        Clock and timer of the event loop, in seconds.
    busy
        Whether the kernel executes a cell at the moment: a front end that waits for its turn
        in the queue is not taken for a silent one.
    """

    def __init__(
        self,
        loop_time: Callable[[], float],
        call_later: CallLater,
        *,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop_time = loop_time
        self._call_later = call_later
        self._busy = busy
        self._clients: dict[str, _Client] = {}
        self._driver: _Client | None = None
        self._alone_since = float("-inf")
        self._runs: dict[str, DrivenRun] = {}

    # --- clients ------------------------------------------------------------------------------

    @property
    def has_driver(self) -> bool:
        """Whether a front end is there that inserts and executes the cells of a run."""
        return self._driver is not None

    def connect(self, comm_id: str, send: Send, data: Any) -> None:
        """A front end opened the comm; *data* is an `Open`, or empty where that comes later."""
        outbox = Outbox(send, self._loop_time, self._call_later, self._state_of)
        self._clients[comm_id] = _Client(outbox)
        if data:
            self.message(comm_id, data)

    def message(self, comm_id: str, data: Any) -> None:
        """A front end sent *data*. A comm that is not connected is ignored."""
        client = self._clients.get(comm_id)
        if client is None:
            return
        try:
            request: FromFrontEnd = msgspec.convert(data, FromFrontEnd)
            self._request(client, request)
        except msgspec.ValidationError as error:
            self._refuse(client, f"the message could not be read ({error}); see protocol.py")
        except RLMError as error:
            self._refuse(client, str(error))

    def disconnect(self, comm_id: str) -> None:
        """A front end closed its comm. Where it drove, the next one does."""
        client = self._clients.pop(comm_id, None)
        if client is not None:
            client.outbox.close()
            self._elect()

    # --- runs ---------------------------------------------------------------------------------

    def attach(self, run: RunControl, started: RunStarted, record: str, cell_id: str = "") -> bool:
        """A run begins; its events follow through `on_event`.

        Parameters
        ----------
        record
            Path of the record, as the front end is to be told.
        cell_id
            Of the cell that started the run. Its cells follow that one.

        Returns
        -------
        bool
            Whether a front end drives it. False: show it in the output of its cell.
        """
        for old in [old for old in self._runs.values() if old.settled]:
            del self._runs[old.run_id]
        trajectory = Trajectory(run.run_id, started)
        writer = CellWriter(run.run_id, cell_id)
        new = DrivenRun(run, trajectory, writer, record, driven=self.has_driver)
        self._runs[run.run_id] = new
        for client in self._opened():
            driving = new.driven and client is self._driver
            client.outbox.put([new.snapshot(driving=driving), new.state()])
        return new.driven

    def on_event(self, stored: Stored) -> None:
        """An event was recorded. Those of runs that nobody attached are ignored."""
        run = next((run for run in self._runs.values() if run.trajectory.owns(stored)), None)
        if run is None:
            return
        node = run.trajectory.apply(stored)
        if isinstance(stored.event, _OF_CALLS) or stored.run_id != run.run_id:
            self._touch(run, node)
        else:
            self._own_event(run, stored)

    # --- execution ----------------------------------------------------------------------------

    async def execute(
        self, turn: int, source: str, execute_direct: ExecuteDirect, *, run_id: str = ""
    ) -> CellResult:
        """Have the cell of a turn executed by the front end, or directly where none is there.

        Call it after the run's ``TurnExecuting`` was emitted; the front end is told once that
        event has come through `on_event`.

        Parameters
        ----------
        execute_direct
            Runs the cell in the REPL, without a front end.
        run_id
            Of the run; the one under way where not given.

        Raises
        ------
        Exception
            What the execution itself raised, on either way.
        """
        run = self._find(run_id)
        if run is None or not run.driven:
            return await execute_direct()
        claim = run.take_prepared(turn, source)
        if claim is None and not self._long_alone():
            claim = await self._claimed(run, turn, source)
        if claim is not None:
            return await claim.run()
        return await run.run_directly(turn, source, execute_direct)

    def claim(self, cell_id: str | None, code: str) -> Claim | None:
        """Call for every execute request: whether it is the execution of a turn.

        Where the run waits for a decision, executing the proposed cell is one: to run it, or
        with another source an edit. A request without a cell id is known by its source.

        Returns
        -------
        Claim or None
            ``None`` for an ordinary cell.
        """
        by = self._driver.name if self._driver is not None else "person"
        for run in reversed(self._runs.values()):
            claim = run.claim(cell_id, code, by)
            if claim is not None:
                return claim
        return None

    def withdraw(self, run_id: str = "") -> None:
        """The run is being stopped: wait no longer for a front end to execute its cell.

        `execute` is cancelled then; a cell that runs already is not touched.
        """
        run = self._find(run_id)
        if run is not None and run.order is not None:
            run.order.taken.cancel()

    async def _claimed(self, run: DrivenRun, turn: int, source: str) -> Claim | None:
        """The execute request for the turn; ``None`` where none will come."""
        taken: asyncio.Future[Claim | None] = asyncio.get_running_loop().create_future()
        run.order = Order(turn, source, source_sha(source), taken)
        self._arm(run.order)
        self._drive(run, run.announcement())
        try:
            return await taken
        finally:
            run.give_up_order()

    def _long_alone(self) -> bool:
        return self._driver is None and self._loop_time() - self._alone_since >= GRACE

    def _arm(self, order: Order) -> None:
        if order.timer is not None:
            order.timer.cancel()
        order.timer = self._call_later(GRACE, lambda: self._impatient(order))

    def _impatient(self, order: Order) -> None:
        """The cell was not executed in time."""
        if order.taken.done():
            return
        if self._busy():
            self._arm(order)
        elif order.heard or self._driver is None:
            order.give_up()
        else:
            self._driver.silent = True
            self._elect()
            if self._driver is None:
                self._alone_since = float("-inf")
                order.give_up()
            else:
                self._arm(order)

    # --- events -------------------------------------------------------------------------------

    def _own_event(self, run: DrivenRun, stored: Stored) -> None:
        event = stored.event
        ops = run.writer.apply(event)
        match event:
            case ReplyStreamed():
                self._drive(run, ops)
                return
            case TurnStarted():
                run.void_prepared()
            case TurnExecuting():
                run.executing()
                ops += run.announcement()
            case RunEnded():
                run.ended(event)
                run.told = self._driver is not None
        said: list[Operation] = [run.state()]
        if isinstance(event, RunEnded) and run.final is not None:
            said.append(run.final)
        for client in self._opened():
            cells = ops if run.driven and client is self._driver else []
            client.outbox.put([*cells, *said])

    def _drive(self, run: DrivenRun, ops: Sequence[Operation]) -> None:
        if run.driven and self._driver is not None:
            self._driver.outbox.put(ops)

    def _touch(self, run: DrivenRun, node: Node | None) -> None:
        for client in self._opened():
            client.outbox.touch(run.run_id, node)

    # --- requests -----------------------------------------------------------------------------

    def _request(self, client: _Client, request: FromFrontEnd) -> None:
        """Do what a client asks. Raises `UsageError` where that is not possible."""
        if isinstance(request, Open):
            self._open(client, request)
            return
        if not client.opened:
            raise UsageError("this comm has not said who it is; send 'open' first")
        if client.silent:
            client.silent = False
            self._elect()
        match request:
            case Need():
                if not client.outbox.repeat(request.from_seq):
                    self._greet(client)
            case Accepted() | Edited() | Conflict():
                self._from_driver(client, request)
            case Decide():
                self._need_run().decide(request, client.name)
            case Pause():
                self._need_run().control.pause()
            case Resume():
                self._need_run().resume(client.name)
            case Stop():
                self._need_run().control.stop(f"stopped by {client.name}")

    def _open(self, client: _Client, request: Open) -> None:
        if request.schema != SCHEMA:
            raise UsageError(
                f"the front end speaks version {request.schema} of the protocol and this kernel "
                f"{SCHEMA}; install the same version of rlm-kernel on both sides and reload"
            )
        for other in self._opened():
            if other is not client and other.name == request.client:
                other.silent = True  # the page was reloaded; its old comm is never closed
        client.name, client.opened, client.silent = request.client, True, False
        client.can_drive = request.can_drive
        if not self._elect(greeted=client):
            self._greet(client)

    def _from_driver(self, client: _Client, request: Accepted | Edited | Conflict) -> None:
        if client is not self._driver:
            raise UsageError("another front end drives this notebook; close it or work there")
        for run in self._runs.values():
            if request.cell_id in run.writer.cells:
                match request:
                    case Accepted():
                        if run.accepted(request) and run.order is not None:
                            self._arm(run.order)
                    case Edited():
                        run.person_edited(request)
                    case Conflict():
                        self._conflict(run, request)

    def _conflict(self, run: DrivenRun, request: Conflict) -> None:
        """The front end has another text: send ours again. After a second one for the same
        order, the cell is run without it."""
        order = run.order
        ops = run.writer.conflict(request.cell_id, request.have)
        if order is None or request.cell_id != run.writer.code_of(order.turn):
            self._drive(run, ops)
        elif order.resent or run.edited() is not None:
            order.give_up()
        else:
            order.resent, order.announced = True, False
            self._arm(order)
            self._drive(run, [*ops, *run.announcement()])

    def _need_run(self) -> DrivenRun:
        run = self._active()
        if run is None:
            raise UsageError("no run is under way; start one with %%rlm")
        return run

    # --- who drives ---------------------------------------------------------------------------

    def _elect(self, *, greeted: _Client | None = None) -> bool:
        """Choose who drives. Returns whether that is now another client than before, who is
        told all that the driver must know."""
        before = self._driver
        if before is None or not self._fit(before):
            self._driver = next(filter(self._fit, self._clients.values()), None)
        if self._driver is before:
            return False
        if self._driver is None:
            self._alone_since = self._loop_time()
            return False
        self._greet(self._driver)
        return self._driver is greeted

    def _fit(self, client: _Client) -> bool:
        connected = any(client is other for other in self._clients.values())
        return connected and client.opened and client.can_drive and not client.silent

    def _greet(self, client: _Client) -> None:
        """Tell a client all of the runs so far, in place of what is queued for it."""
        client.outbox.forget()
        ops: list[Operation] = []
        for run in self._runs.values():
            if not run.settled:
                ops += self._all_of(run, client)
                client.outbox.put_nodes(run.trajectory.nodes.values())
        client.outbox.greet(ops)

    def _all_of(self, run: DrivenRun, client: _Client) -> list[Operation]:
        driving = run.driven and client is self._driver
        ops: list[Operation] = [run.snapshot(driving=driving), run.state()]
        if driving:
            ops += run.unfinished()
            if run.order is not None:
                self._arm(run.order)
        if run.final is not None:
            ops.append(run.final)
            run.told = run.told or driving
        return ops

    # --- small things -------------------------------------------------------------------------

    def _opened(self) -> list[_Client]:
        return [client for client in self._clients.values() if client.opened]

    def _find(self, run_id: str) -> DrivenRun | None:
        return self._runs.get(run_id) if run_id else self._active()

    def _active(self) -> DrivenRun | None:
        """The run that began last and has not ended."""
        runs = [run for run in self._runs.values() if not run.trajectory.over]
        return runs[-1] if runs else None

    def _state_of(self, run_id: str) -> State | None:
        run = self._runs.get(run_id)
        return None if run is None else run.state()

    def _refuse(self, client: _Client, reason: str) -> None:
        client.outbox.put([Refused(reason=reason)])
