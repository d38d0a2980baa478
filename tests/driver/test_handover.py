"""Who executes the cells of a run: the front end, a person, or the kernel alone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rlm_kernel.cells import CellResult
from rlm_kernel.driver.handover import GRACE
from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.protocol import Accepted, Conflict, Edited, RunCell, source_sha
from rlm_kernel.errors import WorkerDied
from tests.driver.parties import RUN, Clock, FrontEnd, Kernel, Script, cell_result, until

CELL = f"{RUN}-1"
SOURCE = "n = len(P)"


class Turn:
    """The execution of a turn as the session asks for it."""

    def __init__(self, hub: Hub, kernel: Kernel, source: str = SOURCE, turn: int = 1) -> None:
        self._kernel = kernel
        execution = hub.execute(turn, source, lambda: kernel.direct(turn, source))
        self.task = asyncio.get_running_loop().create_task(_plain(execution))

    async def result(self) -> CellResult:
        async with asyncio.timeout(10):
            return await self.task


async def _plain(execution: Coroutine[Any, Any, CellResult]) -> CellResult:
    return await execution


async def _begin(hub: Hub, kernel: Kernel, script: Script, source: str = SOURCE) -> Turn:
    """A run whose first turn is to be executed now."""
    script.start(hub)
    script.turn(1, source)
    turn = Turn(hub, kernel, source)
    await asyncio.sleep(0)
    return turn


async def test_the_front_end_executes_the_cell(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """RunCell, accepted, execute request: the cell runs once, as the turn."""
    turn = await _begin(hub, kernel, script)
    clock.advance(1)
    verdict = await kernel.execute_request(*front.accept())

    assert verdict == "run"
    assert await turn.result() == cell_result(SOURCE)
    assert kernel.ran == [(1, SOURCE)]


async def test_the_order_waits_for_the_cell_to_stand_there(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """Events are told after their commit, so the order may come before them."""
    script.start(hub)
    script.ask(1)
    script.propose(SOURCE)
    turn = Turn(hub, kernel)
    await asyncio.sleep(0)
    clock.advance(1)
    assert front.to_run == []
    script.executing(SOURCE)
    clock.advance(1)

    await kernel.execute_request(*front.accept())

    assert (await turn.result()).ok


async def test_a_request_without_a_cell_id_is_known_by_its_source(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """nbclient and some servers send none."""
    turn = await _begin(hub, kernel, script)
    await kernel.execute_request(None, "other = 1")
    await kernel.execute_request(None, SOURCE)

    await turn.result()
    assert kernel.ran == [(0, "other = 1"), (1, SOURCE)]


async def test_the_same_source_in_another_cell_is_not_the_turn(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """A copy of the code, executed in a cell of the person's, is an ordinary cell."""
    turn = await _begin(hub, kernel, script)

    assert await kernel.execute_request("mine", SOURCE) == "none"
    assert await kernel.execute_request(CELL, SOURCE) == "run"
    await turn.result()


async def test_executing_a_finished_turn_again_is_an_ordinary_cell(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """A person may run the cell again; the run has nothing to do with it."""
    turn = await _begin(hub, kernel, script)
    await kernel.execute_request(CELL, SOURCE)
    script.executed(await turn.result())

    assert await kernel.execute_request(CELL, SOURCE) == "none"
    assert kernel.ran == [(1, SOURCE), (0, SOURCE)]


@pytest.mark.parametrize("cell_id", [CELL, None])
async def test_a_person_who_executes_the_proposal_has_decided(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock, cell_id: str | None
) -> None:
    """Shift-Enter on the waiting cell is the decision 'run', and that request runs the turn."""
    script.start(hub)
    script.ask(1)
    script.propose(SOURCE, wait=True)
    request = asyncio.ensure_future(kernel.execute_request(cell_id, SOURCE))
    await until(lambda: script.control.decisions)
    script.decided(by="page")
    script.executing(SOURCE)
    turn = Turn(hub, kernel)

    assert await request == "run"
    await turn.result()
    clock.advance(1)
    (decision,) = script.control.decisions
    assert (decision.action, decision.by, decision.source) == ("run", "page", None)
    assert kernel.ran == [(1, SOURCE)]
    assert front.to_run == []


@pytest.mark.parametrize("cell_id", [CELL, None])
async def test_a_person_who_executes_another_source_has_edited(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock, cell_id: str | None
) -> None:
    """The cell's text when it is executed is what the turn runs."""
    mine = "n = 5"
    script.start(hub)
    script.ask(1)
    script.propose(SOURCE, wait=True)
    clock.advance(1)
    front.say(Accepted(cell_id=CELL, source=mine, sha=source_sha(mine)))
    request = asyncio.ensure_future(kernel.execute_request(cell_id, mine))
    await until(lambda: script.control.decisions)
    script.decided("edit", mine, by="page")
    script.executing(mine)
    turn = Turn(hub, kernel, mine)

    assert await request == "run"
    assert await turn.result() == cell_result(mine)
    (decision,) = script.control.decisions
    assert (decision.action, decision.source) == ("edit", mine)
    assert front.text(CELL) == mine


async def test_executing_a_cell_that_is_still_written_is_no_decision(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """Before the proposal is there, the cell is an ordinary one."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nn = 1\n")

    assert await kernel.execute_request(CELL, "n = 1") == "none"
    assert script.control.decisions == []


async def test_a_decision_that_came_first_wins(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """Where the run was decided about meanwhile, the request is an ordinary cell."""
    script.start(hub)
    script.ask(1)
    script.propose(SOURCE, wait=True)
    script.control.proposal = None

    assert await kernel.execute_request(CELL, SOURCE) == "none"


async def test_a_run_that_ends_lets_the_prepared_cell_go(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """Stopped between decision and execution: the person's cell runs as an ordinary one."""
    script.start(hub)
    script.ask(1)
    script.propose(SOURCE, wait=True)
    request = asyncio.ensure_future(kernel.execute_request(CELL, SOURCE))
    await until(lambda: script.control.decisions)
    script.end(state="stopped", reason="stopped by page")

    assert await request == "none"
    assert kernel.ran == [(0, SOURCE)]


async def test_without_a_front_end_the_cell_runs_at_once(
    hub: Hub, kernel: Kernel, script: Script
) -> None:
    """A run that began without a driver waits for nobody."""
    turn = await _begin(hub, kernel, script)

    assert (await turn.result()).ok
    assert kernel.ran == [(1, SOURCE)]


async def test_a_front_end_that_went_away_is_waited_for_and_then_done_without(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """A page may be reloading; after the grace time the run goes on alone, and stays so."""
    turn = await _begin(hub, kernel, script)
    hub.disconnect("comm")
    clock.advance(GRACE - 0.1)
    await asyncio.sleep(0)
    assert kernel.ran == []
    clock.advance(0.2)
    await turn.result()
    script.executed(cell_result(SOURCE))
    script.turn(2, "second")
    await Turn(hub, kernel, "second", 2).result()

    assert kernel.ran == [(1, SOURCE), (2, "second")]


async def test_a_front_end_that_comes_back_in_time_executes_the_cell(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """The reloaded page is told the cells and which one to run."""
    turn = await _begin(hub, kernel, script)
    hub.disconnect("comm")
    clock.advance(GRACE / 2)
    again = FrontEnd(hub, "again").open("page")
    clock.advance(1)
    await kernel.execute_request(*again.accept())

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_outputs_are_shown_to_a_front_end_that_missed_them(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """Executing a cell that ran without its front end shows its outputs, and runs nothing."""
    turn = await _begin(hub, kernel, script)
    hub.disconnect("comm")
    clock.advance(GRACE + 1)
    script.executed(await turn.result())
    again = FrontEnd(hub, "again").open("page")
    clock.advance(1)
    verdict = await kernel.execute_request(*again.accept())

    assert verdict == "show"
    assert kernel.shown == [cell_result(SOURCE)]
    assert kernel.ran == [(1, SOURCE)]


async def test_a_request_that_comes_while_the_cell_runs_alone_is_shown_its_result(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """The late request waits for the execution that is under way."""
    script.start(hub)
    script.turn(1, SOURCE)
    release = asyncio.Event()

    async def slow() -> CellResult:
        await release.wait()
        return cell_result(SOURCE)

    task = asyncio.ensure_future(hub.execute(1, SOURCE, slow))
    await asyncio.sleep(0)
    clock.advance(GRACE + 1)
    await asyncio.sleep(0)
    request = asyncio.ensure_future(kernel.execute_request(CELL, SOURCE))
    await asyncio.sleep(0)
    release.set()

    assert await request == "show"
    assert await task == cell_result(SOURCE)
    assert kernel.ran == []


async def test_a_silent_driver_is_passed_over(
    hub: Hub, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """A page that was closed without a word does not hold the run: the next one drives."""
    gone = FrontEnd(hub, "gone").open("gone")
    other = FrontEnd(hub, "other").open("other")
    turn = await _begin(hub, kernel, script)
    clock.advance(GRACE + 1)
    assert gone.to_run
    await kernel.execute_request(*other.accept())

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_a_silent_driver_that_speaks_again_may_drive_again(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """Being passed over is not for ever."""
    turn = await _begin(hub, kernel, script)
    clock.advance(GRACE + 1)
    await turn.result()
    script.turn(2, "second")
    await Turn(hub, kernel, "second", 2).result()
    assert kernel.directly == [1, 2]
    assert not hub.has_driver
    front.say(Conflict(cell_id=CELL, have=0))

    assert hub.has_driver


async def test_a_queue_before_the_cell_is_no_silence(clock: Clock) -> None:
    """While the kernel is busy with a person's cell, the front end cannot answer in time."""
    busy = True
    hub = Hub(clock.time, clock.call_later, busy=lambda: busy)
    FrontEnd(hub).open()
    kernel = Kernel(hub)
    turn = await _begin(hub, kernel, Script(hub.on_event, clock))
    clock.advance(GRACE * 20)
    await asyncio.sleep(0)
    assert kernel.ran == []
    busy = False
    clock.advance(GRACE + 1)

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_an_accepted_cell_that_never_comes_is_run_alone(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """Requests are lost where a cell before them fails; the run does not hang on that."""
    turn = await _begin(hub, kernel, script)
    clock.advance(1)
    front.accept()
    clock.advance(GRACE * 3)

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_another_text_in_the_cell_is_replaced_and_run(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """A conflict about the cell to run sends its text and the order again."""
    turn = await _begin(hub, kernel, script)
    clock.advance(1)
    cell = front.cell(CELL)
    assert cell is not None
    cell.source = "lost"
    front.to_run.clear()
    front.say(Conflict(cell_id=CELL, have=4))
    clock.advance(1)
    await kernel.execute_request(*front.accept())

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_a_second_conflict_runs_the_cell_without_the_front_end(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """A front end that cannot hold the text is done without."""
    turn = await _begin(hub, kernel, script)
    front.say(Conflict(cell_id=CELL, have=4))
    front.say(Conflict(cell_id=CELL, have=4))

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]
    clock.advance(1)
    assert len(front.all(RunCell)) <= 2


async def test_a_text_changed_at_the_last_moment_is_the_persons(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """The run has recorded what it runs; the person's text runs as an ordinary cell."""
    turn = await _begin(hub, kernel, script)

    assert await kernel.execute_request(CELL, "mine") == "none"
    await turn.result()
    assert kernel.ran == [(0, "mine"), (1, SOURCE)]


async def test_an_edit_at_the_last_moment_runs_the_decided_source(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """The cell keeps the person's text; the turn runs what was decided, alone."""
    turn = await _begin(hub, kernel, script)
    front.say(Edited(cell_id=CELL, source="mine"))

    await turn.result()
    assert kernel.ran == [(1, SOURCE)]


async def test_what_the_execution_raises_reaches_the_run(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """An error of the REPL is the run's, on whichever way the cell was executed."""
    turn = await _begin(hub, kernel, script)
    claim = hub.claim(CELL, SOURCE)
    assert claim is not None
    assert await claim.verdict() == "run"
    claim.failed(WorkerDied("the worker was killed"))
    claim.done(cell_result(SOURCE))

    with pytest.raises(WorkerDied, match="killed"):
        await turn.result()


async def test_a_cancelled_request_does_not_cancel_the_run(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script
) -> None:
    """The kernel's own cancellation arrives in the run as an ordinary error."""
    turn = await _begin(hub, kernel, script)
    claim = hub.claim(CELL, SOURCE)
    assert claim is not None
    await claim.verdict()
    claim.failed(asyncio.CancelledError())

    with pytest.raises(RuntimeError, match="cancelled"):
        await turn.result()


async def test_a_stop_ends_the_wait_and_the_late_request_runs_nothing(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """No cell is started after a stop, also not by a request that was under way."""
    turn = await _begin(hub, kernel, script)
    clock.advance(1)
    hub.withdraw()
    with pytest.raises(asyncio.CancelledError):
        await turn.result()
    script.end(state="stopped", reason="stopped by page", response="")

    assert await kernel.execute_request(*front.accept()) == "skip"
    assert kernel.ran == []


async def test_a_page_that_comes_after_a_stop_runs_nothing(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """The cell that was stopped before it ran is shown, and not ordered again."""
    turn = await _begin(hub, kernel, script)
    hub.disconnect("comm")
    hub.withdraw()
    with pytest.raises(asyncio.CancelledError):
        await turn.result()
    script.end(state="stopped", reason="stopped by page", response="")
    again = FrontEnd(hub, "again").open("page")
    clock.advance(1)

    assert again.text(CELL) == SOURCE
    assert again.to_run == []


async def test_a_cancelled_execution_leaves_nothing_behind(
    hub: Hub, front: FrontEnd, kernel: Kernel, script: Script, clock: Clock
) -> None:
    """A run that is cancelled while it waits for the front end has no order left."""
    turn = await _begin(hub, kernel, script)
    turn.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn.task
    clock.advance(GRACE * 3)

    assert kernel.ran == []
    assert hub.has_driver
