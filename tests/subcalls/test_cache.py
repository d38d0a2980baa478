"""Replies of earlier runs are served again: which, in which order, at what cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget, Ledger, Usage
from rlm_kernel.engine.events import SubcallEnded, SubcallJudged, SubcallStarted
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record, load_record
from rlm_kernel.session.eventlog import EventLog
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.scheduling.batch import ChildOutcome, Outcome
from rlm_kernel.subcalls.scheduling.cache import Cache, Question
from rlm_kernel.subcalls.scheduling.scheduler import Scheduler
from rlm_kernel.subcalls.scheduling.tools import Toolbox, ToolResult
from tests.servers.scripted import Refuse, ScriptedServer, Step
from tests.subcalls.conftest import QUICK, endpoint_for


class Notebook:
    """A record and a scheduler, one run after the other. Replies are numbered as they are made."""

    def __init__(self, path: Path, server: ScriptedServer) -> None:
        self.log = EventLog(lambda: Record.open(path))
        self.events: list[Any] = []
        self.log.subscribe(lambda stored: self.events.append(stored.event))
        self.scheduler = Scheduler(
            emit=self.log.emit, commit=self.log.settle, replies=self.log, retry=QUICK
        )
        self.endpoint: Endpoint = endpoint_for(server)
        self.server = server
        self.runs = 0
        self.ledger = Ledger(Budget())

    def begin(self, budget: Budget | None = None) -> None:
        """A new run begins."""
        self.runs += 1
        self.ledger = Ledger(budget or Budget())

    async def ask(self, prompts: Sequence[str], **options: Any) -> list[Outcome]:
        options = {"run_id": f"run{self.runs}", "ledger": self.ledger, **options}
        batch = self.scheduler.submit(
            prompts,
            turn=1,
            resolve=lambda model: self.endpoint,
            deliver=lambda outcomes: None,
            **options,
        )
        return await batch.wait()

    async def texts(self, prompts: Sequence[str], **options: Any) -> list[str]:
        return [outcome.text for outcome in await self.ask(prompts, **options)]

    async def close(self) -> None:
        await self.scheduler.close()
        await self.endpoint.close()
        self.log.close()


@pytest.fixture
async def notebook(tmp_path: Path) -> AsyncIterator[Notebook]:
    numbers = iter(range(1, 1000))
    async with ScriptedServer(reply=lambda prompt: f"{prompt} {next(numbers)}") as server:
        made = Notebook(tmp_path / "run.rlm.sqlite", server)
        yield made
        await made.close()


async def test_a_second_run_gets_what_the_first_one_got_in_the_same_order(
    notebook: Notebook,
) -> None:
    """Five samples of one question stay five samples, and a sixth is asked anew."""
    notebook.begin()
    first = await notebook.texts(["x", "y", "x", "x", "x", "x"])
    notebook.begin()
    again = await notebook.texts(["x", "x"]) + await notebook.texts(["y", "x", "x", "x", "x"])

    assert len(set(first)) == 6
    assert again[:2] + again[3:6] == [text for text in first if text.startswith("x")]
    assert again[2] == first[1]
    assert again[6] not in first
    assert len(notebook.server.requests) == 7


async def test_a_run_is_never_given_its_own_replies(notebook: Notebook) -> None:
    """Nor is a child run that of its tree: its samples would be copies."""
    notebook.begin()
    first = await notebook.texts(["x"])
    second = await notebook.texts(["x"])
    third = await notebook.texts(["x"], ledger=notebook.ledger.child(), run_id="child")

    assert len({*first, *second, *third}) == 3


async def test_the_runs_of_a_tree_share_what_is_served(notebook: Notebook) -> None:
    """The reply that a child was given is not given to its parent as well."""
    notebook.begin()
    recorded = await notebook.texts(["x", "x"])
    notebook.begin()
    in_child = await notebook.texts(["x"], ledger=notebook.ledger.child(), run_id="child")

    assert in_child + await notebook.texts(["x"]) == recorded


async def test_a_hit_costs_nothing_and_is_shown_as_one(notebook: Notebook) -> None:
    """No tokens, no money, no sub-call of the budget, no request."""
    notebook.begin()
    await notebook.ask(["x"])
    notebook.begin(Budget(max_subcalls=1))
    (hit,) = await notebook.ask(["x"])
    (other,) = await notebook.ask(["z"])

    assert hit.cached
    assert hit.usage == Usage()
    assert not other.cached
    assert other.error is None
    assert notebook.ledger.subcalls == 1
    started, ended = (
        next(e for e in notebook.events if isinstance(e, kind) and e.call_id == hit.call_id)
        for kind in (SubcallStarted, SubcallEnded)
    )
    assert started.prompt == "x"
    assert (ended.cached, ended.attempts, ended.usage) == (True, 0, Usage())
    assert ended.finish == "stop"
    assert len(notebook.server.requests) == 2


async def test_a_run_without_cache_asks_anew_and_later_ones_get_both(notebook: Notebook) -> None:
    """What it is told is recorded as well."""
    notebook.begin()
    first = await notebook.texts(["x"])
    notebook.begin()
    anew = await notebook.texts(["x"], cache=False)
    notebook.begin()

    assert await notebook.texts(["x", "x"]) == first + anew
    assert first != anew


async def test_a_persons_own_calls_are_asked_anew(notebook: Notebook) -> None:
    """Running a cell again by hand gives new answers; a run may be given them."""
    mine = [await notebook.texts(["x"], run_id="") for _ in range(2)]
    notebook.begin()

    assert mine[0] != mine[1]
    assert await notebook.texts(["x", "x"]) == mine[0] + mine[1]


@pytest.mark.parametrize(
    "params",
    [
        SubcallParams(temperature=0.0),
        SubcallParams(max_tokens=9),
        SubcallParams(stop=["."]),
        SubcallParams(seed=1),
        SubcallParams(system="be brief"),
        SubcallParams(choices=["a"]),
        SubcallParams(schema="{}"),
        SubcallParams(model="other"),
    ],
)
async def test_other_parameters_are_another_question(
    notebook: Notebook, params: SubcallParams
) -> None:
    notebook.begin()
    await notebook.ask(["x"])
    notebook.begin()
    await notebook.ask(["x"], params=params)

    assert len(notebook.server.requests) == 2


async def test_what_is_not_sent_makes_no_other_question(notebook: Notebook) -> None:
    """How long to wait, and the name of the task, are not the model's to know."""
    notebook.begin()
    first = await notebook.texts(["x"], params=SubcallParams(timeout=9, task="label"))
    notebook.begin()

    assert await notebook.texts(["x"], params=SubcallParams(timeout=8)) == first


async def test_another_endpoint_is_another_question(notebook: Notebook) -> None:
    notebook.begin()
    await notebook.ask(["x"])
    async with ScriptedServer(["other"]) as other:
        mine, notebook.endpoint = notebook.endpoint, endpoint_for(other)
        notebook.begin()
        assert await notebook.texts(["x"]) == ["other"]
        await notebook.endpoint.close()
        notebook.endpoint = mine


async def test_failures_are_not_served(notebook: Notebook) -> None:
    """Nor do they take a place among the replies."""
    answers: list[str | Step] = ["one", Refuse(400), "two", "three"]
    notebook.server.reply = lambda prompt: answers.pop(0)
    notebook.begin()
    for _ in range(3):
        await notebook.ask(["x"])
    notebook.begin()

    assert await notebook.texts(["x", "x"]) == ["one", "two"]
    assert await notebook.texts(["x"]) == ["three"]


async def test_a_reply_that_was_no_value_of_its_task_is_not_served(notebook: Notebook) -> None:
    """A verdict that comes while a run goes on changes nothing for that run."""
    notebook.begin()
    first, second = await notebook.ask(["x", "x"])
    bad = SubcallJudged(call_id=first.call_id, task="label", ok=False, reason="no choice")
    good = SubcallJudged(call_id=second.call_id, task="label", ok=True)
    notebook.begin()
    assert await notebook.texts(["x"]) == [first.text]
    notebook.log.emit("run1", bad)
    notebook.log.emit("run1", good)
    assert await notebook.texts(["x"]) == [second.text]
    notebook.begin()

    assert await notebook.texts(["x"]) == [second.text]


async def test_calls_with_tools_and_child_runs_are_not_served(notebook: Notebook) -> None:
    """What they are told depends on more than the prompt."""

    async def use(name: str, arguments: str) -> ToolResult:
        return ToolResult(text="")

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        return ChildOutcome(run_id=call_id, text=call_id)

    for _ in range(2):
        notebook.begin()
        await notebook.ask(["x"], toolbox=Toolbox([], use))
        await notebook.ask(["y"], kind="rlm", spawn_child=spawn)

    ends = [event for event in notebook.events if isinstance(event, SubcallEnded)]
    assert [event.cached for event in ends] == [False] * 4


async def test_a_thousand_hits_leave_the_loop_its_turns(notebook: Notebook) -> None:
    """A worker goes from hit to hit without a request that would make it wait."""
    import asyncio

    notebook.begin()
    recorded = await notebook.texts([f"q{i}" for i in range(1000)])
    notebook.begin()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    turn()
    assert await notebook.texts([f"q{i}" for i in range(1000)]) == recorded
    assert turns >= 30


async def test_the_record_is_enough(notebook: Notebook, tmp_path: Path) -> None:
    """A kernel that starts anew, or a run of another process, is served the same."""
    notebook.begin()
    long = "x" * 10_000
    first = await notebook.texts([long, "\ud800"])
    notebook.log.close()
    notebook.log._open_record = lambda: Record.open(tmp_path / "run.rlm.sqlite")
    notebook.begin()

    assert await notebook.texts([long, "\ud800"]) == first
    assert len(notebook.server.requests) == 2
    notebook.log.flush()
    with load_record(tmp_path / "run.rlm.sqlite") as record:
        assert record.verify() == []


def test_a_record_that_cannot_be_read_serves_nothing() -> None:
    """The model is asked: a cache is no reason to fail."""

    class Damaged:
        def mark(self) -> int:
            return 5

        def reply(
            self, key: str, after_seq: int, until_seq: int
        ) -> tuple[int, SubcallEnded] | None:
            raise RecordError("damaged")

    assert Cache(Damaged()).take(Ledger(Budget()), "00") is None


def test_what_has_no_reply_left_is_not_looked_for_again() -> None:
    """A record may hold thousands of calls that failed at the same question."""
    looked: list[int] = []

    class OneReply:
        def mark(self) -> int:
            return 5

        def reply(
            self, key: str, after_seq: int, until_seq: int
        ) -> tuple[int, SubcallEnded] | None:
            looked.append(after_seq)
            ended = SubcallEnded(call_id="c", ok=True, response="r")
            return (1, ended) if after_seq < 1 else None

    cache, ledger = Cache(OneReply()), Ledger(Budget())
    assert cache.take(ledger, "00") is not None
    assert [cache.take(ledger, "00") for _ in range(3)] == [None] * 3
    assert looked == [0, 1]


def test_keys_tell_apart_what_is_joined_alike() -> None:
    """The end of one part is not the beginning of the next."""
    questions = [
        Question("a", "bc", SubcallParams()).key("d"),
        Question("ab", "c", SubcallParams()).key("d"),
        Question("a", "b", SubcallParams()).key("cd"),
        Question("a", "bc", SubcallParams(system="d")).key(""),
    ]
    assert len(set(questions)) == 4
