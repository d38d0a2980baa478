"""Real runs with a real record, driven by a front end that executes what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.cells import AnswerSet, CellResult, Value
from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.protocol import Decide, Edited, Stop
from rlm_kernel.engine.budget import Budget, Ledger
from rlm_kernel.engine.decisions import Policy, ask, automatic
from rlm_kernel.engine.dialects import dialect_named
from rlm_kernel.engine.events import RunEnded, TurnExecuted, TurnExecuting
from rlm_kernel.engine.playbook_root import PlaybookRoot
from rlm_kernel.engine.root_protocol import Message
from rlm_kernel.engine.run import Run
from rlm_kernel.record import Record
from rlm_kernel.session.eventlog import EventLog
from tests.driver.parties import PROMPT, RUN, FrontEnd, Kernel, cell_result, finals, until

CELLS = [("I look at the size.", "n = len(P)"), ("", "m = n * 2"), ("Done.", "Final = m")]


def result_of(code: str) -> CellResult:
    if not code.startswith("Final ="):
        return cell_result(code)
    answer = AnswerSet("Final", Value("str", code.removeprefix("Final = ")))
    return CellResult(ok=True, execution_count=1, answer=answer)


class Notebook(FrontEnd):
    """Executes what it is told to, in order, as soon as it is told."""

    def __init__(self, hub: Hub, kernel: Kernel, comm_id: str = "comm") -> None:
        super().__init__(hub, comm_id)
        self.kernel = kernel
        self.working = True
        self._tasks: list[asyncio.Task[str]] = []

    def receive(self, data: dict[str, Any]) -> None:
        super().receive(data)
        asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self.speak()
        while self.working and self.to_run:
            self.execute(*self.accept())

    def execute(self, cell_id: str, source: str) -> None:
        request = self.kernel.execute_request(cell_id, source)
        self._tasks.append(asyncio.get_running_loop().create_task(request))


class GatedRoot(PlaybookRoot):
    """Stops in the middle of its first reply until the gate is opened."""

    def __init__(self, cells: Any) -> None:
        super().__init__(cells)
        self.gate = asyncio.Event()

    async def _reply(self, messages: Sequence[Message], attempt: int) -> AsyncGenerator[str, None]:
        pieces = [piece async for piece in super()._reply(messages, attempt)]
        text = "".join(pieces)
        yield text[: len(text) // 2]
        await self.gate.wait()
        yield text[len(text) // 2 :]


class HubExecutor:
    def __init__(self, hub: Hub, kernel: Kernel) -> None:
        self._hub, self._kernel = hub, kernel

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        return await self._hub.execute(turn, source, lambda: self._kernel.direct(turn, source))

    async def interrupt(self) -> None:
        self._hub.withdraw()


class Bench:
    """A hub on the real loop, with a record, and what starts runs on it."""

    def __init__(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.hub = Hub(loop.time, loop.call_later)
        self.kernel = Kernel(self.hub, result_of)
        self.log = EventLog(lambda: Record.open(path))
        self.log.subscribe(self.hub.on_event)

    def notebook(self, comm_id: str = "comm", name: str = "page") -> Notebook:
        notebook = Notebook(self.hub, self.kernel, comm_id)
        notebook.open(name)
        return notebook

    def run(
        self, policy: Policy = automatic, root: PlaybookRoot | None = None, run_id: str = RUN
    ) -> Run:
        run = Run(
            run_id=run_id,
            query="How large?",
            prompt=PROMPT,
            root=root or PlaybookRoot(CELLS),
            dialect=dialect_named("paper"),
            executor=HubExecutor(self.hub, self.kernel),
            ledger=Ledger(Budget()),
            emit=lambda event: self.log.emit(run_id, event),
            policy=policy,
        )
        self.hub.attach(run, run.started, "run.rlm.sqlite", "start")
        return run

    async def to_end(self, run: Run) -> RunEnded:
        async with asyncio.timeout(20):
            ended = await run.run()
        self.log.flush()
        return ended


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "run.rlm.sqlite")
    yield bench
    bench.log.close()


async def test_the_notebook_shows_and_executes_a_whole_run(bench: Bench) -> None:
    """Prose, cells, their executions and the end, all through the front end."""
    notebook = bench.notebook()
    ended = await bench.to_end(bench.run())
    await until(lambda: finals(notebook))

    assert (ended.state, ended.response) == ("answered", "m")
    assert notebook.ids() == ["start", *(f"{RUN}-{cell}" for cell in ("1-p", "1", "2", "3-p", "3"))]
    assert bench.kernel.ran == [(turn, source) for turn, (_, source) in enumerate(CELLS, 1)]
    assert bench.kernel.directly == []
    assert finals(notebook)[0].response == "m"
    assert notebook.refusals() == []


async def test_stepping_by_executing_the_cells(bench: Bench) -> None:
    """Under the policy 'ask', Shift-Enter on each proposal is all that a person needs to do."""
    notebook = bench.notebook()
    run = bench.run(ask)
    ending = asyncio.ensure_future(bench.to_end(run))
    for turn, (_, source) in enumerate(CELLS, 1):
        cell_id = f"{RUN}-{turn}"
        await until(lambda cell=cell_id: notebook.states[-1].awaiting and notebook.cell(cell))
        notebook.execute(cell_id, source)
    ended = await ending

    assert ended.state == "answered", ended.reason
    assert bench.kernel.ran == [(turn, source) for turn, (_, source) in enumerate(CELLS, 1)]
    assert bench.kernel.directly == []


async def test_what_a_person_executed_is_what_the_record_says(bench: Bench) -> None:
    """An edited proposal is recorded as it ran, and the root goes on from it."""
    notebook = bench.notebook()
    run = bench.run(ask)
    ending = asyncio.ensure_future(bench.to_end(run))
    await until(lambda: notebook.states[-1].awaiting)
    notebook.execute(f"{RUN}-1", "n = 7")
    await until(lambda: notebook.states[-1].turn == 2 and notebook.states[-1].awaiting)
    run.stop("enough")
    await ending

    events = [stored.event for stored in bench.log.record.events(RUN)]
    assert [e.source for e in events if isinstance(e, TurnExecuting)] == ["n = 7"]
    assert [e.result for e in events if isinstance(e, TurnExecuted)] == [result_of("n = 7")]
    assert notebook.text(f"{RUN}-1") == "n = 7"


async def test_typing_into_a_streamed_cell_holds_the_run_until_it_is_executed(
    bench: Bench,
) -> None:
    """The run waits for the person's text, runs it, and goes on by itself to the end."""
    notebook = bench.notebook()
    root = GatedRoot([("", "x = 1\ny = 2"), *CELLS])
    ending = asyncio.ensure_future(bench.to_end(bench.run(root=root)))
    await until(lambda: notebook.cell(f"{RUN}-1"))
    cell = notebook.cell(f"{RUN}-1")
    assert cell is not None
    cell.source, cell.person = "x = 'mine'", True
    notebook.say(Edited(cell_id=f"{RUN}-1", source="x = 'mine'"))
    root.gate.set()
    await until(lambda: notebook.states[-1].awaiting)
    notebook.execute(f"{RUN}-1", "x = 'mine'")
    ended = await ending

    assert ended.state == "answered", ended.reason
    assert bench.kernel.ran[0] == (1, "x = 'mine'")
    assert notebook.text(f"{RUN}-1") == "x = 'mine'"


async def test_a_front_end_that_leaves_in_the_middle_and_comes_back(bench: Bench) -> None:
    """Its cells are all there again, and the one that waited is executed by it."""
    notebook = bench.notebook()
    notebook.working = False
    ending = asyncio.ensure_future(bench.to_end(bench.run()))
    await until(lambda: notebook.to_run)
    bench.hub.disconnect("comm")
    again = bench.notebook("again")
    ended = await ending
    await until(lambda: finals(again))

    assert ended.state == "answered", ended.reason
    assert bench.kernel.directly == []
    assert [again.text(f"{RUN}-{turn}") for turn in (1, 2, 3)] == [code for _, code in CELLS]


async def test_a_stop_while_the_front_end_is_slow_ends_the_run(bench: Bench) -> None:
    """Nothing is run after it, and the reason is the person's, not the wait that ended."""
    notebook = bench.notebook()
    notebook.working = False
    ending = asyncio.ensure_future(bench.to_end(bench.run()))
    await until(lambda: notebook.to_run)
    notebook.say(Stop())
    ended = await ending
    verdict = await bench.kernel.execute_request(*notebook.accept())

    assert (ended.state, ended.reason) == ("stopped", "stopped by page")
    assert verdict == "skip"
    assert bench.kernel.ran == []


def again_awaiting(notebook: Notebook) -> bool:
    """A proposal waits, and it is not the first that did."""
    waits = [waiting for waiting, _ in groupby(state.awaiting for state in notebook.states)]
    return waits.count(True) == 2 and waits[-1]


async def test_regenerate_and_skip_change_what_stands_in_the_notebook(bench: Bench) -> None:
    """A regenerated cell is written again; a skipped one is gone."""
    notebook = bench.notebook()
    ending = asyncio.ensure_future(bench.to_end(bench.run(ask)))
    await until(lambda: notebook.states[-1].awaiting)
    notebook.say(Decide(turn=1, action="regenerate"))
    await until(lambda: again_awaiting(notebook))
    assert notebook.ids() == ["start", f"{RUN}-1-p", f"{RUN}-1"]
    notebook.say(Decide(turn=1, action="skip"))
    await until(lambda: notebook.states[-1].turn == 2 and notebook.states[-1].awaiting)
    assert notebook.ids() == ["start", f"{RUN}-2"]
    notebook.say(Stop())
    await ending


async def test_two_runs_after_each_other(bench: Bench) -> None:
    """The second one writes its own cells and is driven as the first one was."""
    notebook = bench.notebook()
    for run_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        assert (await bench.to_end(bench.run(run_id=run_id))).state == "answered"
    await until(lambda: len(finals(notebook)) == 2)

    assert notebook.text("aaaaaaaaaaaa-3") == notebook.text("bbbbbbbbbbbb-3") == "Final = m"
    assert len(bench.kernel.ran) == 6
    assert bench.kernel.directly == []


async def test_a_run_without_a_front_end_goes_through(bench: Bench) -> None:
    """Nobody is there: every cell is run directly, none is waited for."""
    ended = await bench.to_end(bench.run())

    assert ended.state == "answered", ended.reason
    assert bench.kernel.directly == [1, 2, 3]
