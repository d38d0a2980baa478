"""Ends of calls other than a reply: cancelled, not recorded, broken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.events import Event, SubcallEnded
from rlm_kernel.errors import RecordError, UsageError
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.endpoint import Reply
from rlm_kernel.subcalls.scheduling.batch import Outcome
from tests.servers.scripted import Hang, Refuse, ScriptedServer
from tests.subcalls.conftest import Bench, Gate


async def test_cancelling_a_batch_reaches_the_server_and_sends_no_more(
    bench_of: Any, server: ScriptedServer
) -> None:
    """What had finished keeps its result, what was never sent leaves no event."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=4)
    batch = bench.submit([str(i) for i in range(20)])
    await server.until(lambda s: len(s.requests) == 4)
    gate.open("0")
    await server.until(lambda s: len(s.requests) == 5)
    await bench.got.wait()
    batch.cancel()
    batch.cancel()
    outcomes = await batch.wait()
    await server.until(lambda s: s.active == 0)

    assert [outcome.index for outcome in outcomes] == list(range(20))
    assert [outcome.text for outcome in outcomes if outcome.error is None] == ["re: 0"]
    assert server.cancelled == 4
    assert len(bench.started) == 5
    assert [[outcome.text for outcome in piece] for piece in bench.delivered] == [["re: 0"]]
    bench.check_pairs()


async def test_cancelling_one_batch_leaves_the_others_alone(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Its places go to the calls that wait."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=2)
    first = bench.submit(["a0", "a1", "a2"], run_id="a")
    second = bench.submit(["b0", "b1"], run_id="b")
    await server.until(lambda s: s.active == 2)
    first.cancel()
    await server.until(lambda s: s.active == 2 and "b1" in gate.prompts)
    gate.open("b0")
    gate.open("b1")

    assert [outcome.text for outcome in await second.wait()] == ["re: b0", "re: b1"]
    assert all(outcome.error is not None for outcome in await first.wait())
    bench.check_pairs()


async def test_a_batch_cancelled_before_its_workers_began_is_never_sent(bench: Bench) -> None:
    """Cancelling in the same tick as submitting."""
    batch = bench.submit(["x"] * 3)
    batch.cancel()
    outcomes = await batch.wait()

    assert ["cancelled" in str(outcome.error) for outcome in outcomes] == [True] * 3
    assert bench.events == []
    assert bench.ledger.subcalls == 0


async def test_a_cancellation_from_inside_an_event_hits_its_own_batch_only(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Whoever listens to events may cancel while the scheduler is in the middle of a call."""
    bench: Bench = bench_of(server, concurrency=1)
    first = bench.submit(["first", "unsent"])
    second = bench.submit(["second"], run_id="other")
    record = bench.emit

    def emit(run_id: str, event: Event) -> None:
        record(run_id, event)
        if isinstance(event, SubcallEnded) and event.response == "re: first":
            first.cancel()

    bench.emit = emit  # type: ignore[method-assign]
    assert [outcome.text for outcome in await second.wait()] == ["re: second"]
    assert [outcome.text for outcome in await first.wait()] == ["re: first", ""]
    bench.check_pairs()


async def test_closing_ends_everything(bench_of: Any, server: ScriptedServer) -> None:
    """All batches are done afterwards, and nothing more is taken."""
    Gate(server)
    bench: Bench = bench_of(server, concurrency=2)
    batches = [bench.submit(["x", "y", "z"], run_id=run) for run in "abc"]
    await server.until(lambda s: s.active == 2)
    await bench.scheduler.close()

    for batch in batches:
        assert all(outcome.error is not None for outcome in await batch.wait())
    await server.until(lambda s: s.active == 0)
    bench.check_pairs()
    with pytest.raises(UsageError, match="closed"):
        bench.submit(["x"])


async def test_a_call_that_cannot_be_recorded_is_not_sent(bench: Bench) -> None:
    """Its outcome is the error of the record; nothing stays set aside."""

    def emit(run_id: str, event: Event) -> None:
        raise RecordError("the disk is full: make room")

    bench.emit = emit  # type: ignore[method-assign]
    outcomes = await bench.submit(["x", "y"]).wait()

    assert [str(outcome.error) for outcome in outcomes] == ["the disk is full: make room"] * 2
    assert bench.ledger.subcalls == 0
    assert bench.ledger.reserved.subcalls == 0


async def test_a_reply_that_cannot_be_recorded_is_not_shown(bench: Bench) -> None:
    """A result that the record does not have would be lost to every replay."""
    record = bench.emit

    def emit(run_id: str, event: Event) -> None:
        if isinstance(event, SubcallEnded):
            raise RecordError("the disk is full: make room")
        record(run_id, event)

    bench.emit = emit  # type: ignore[method-assign]
    outcome = (await bench.submit(["x"]).wait())[0]

    assert outcome.text == ""
    assert str(outcome.error) == "the disk is full: make room"
    assert bench.ledger.subcalls == 1


class Broken:
    """An endpoint with a defect of its own."""

    spec = model = "broken"
    slots = None
    on_room = None

    def price(self, model: str) -> Price | None:
        return None

    async def complete(self, prompt: str, params: SubcallParams, **more: Any) -> Reply:
        raise ZeroDivisionError("a defect")

    async def context_limit(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


async def test_a_defect_in_an_endpoint_is_an_outcome_and_is_reported(bench_of: Any) -> None:
    """A batch never hangs, and the traceback is not swallowed."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    bench: Bench = bench_of(Broken())
    outcomes = await bench.submit(["x", "y"]).wait()

    assert ["a defect" in str(outcome.error) for outcome in outcomes] == [True, True]
    assert isinstance(reported[0]["exception"], ZeroDivisionError)
    bench.check_pairs()


async def test_a_reply_that_cannot_be_committed_is_not_shown(bench_of: Any) -> None:
    """A full disk shows at the commit, after the event was taken."""
    async with ScriptedServer([Refuse(400), "secret"]) as server:
        bench: Bench = bench_of(server, concurrency=1)

        def commit() -> None:
            raise RecordError("the disk is full: make room")

        bench.scheduler._commit = commit
        refused, withheld = await bench.submit(["x", "y"]).wait()

    assert "refuses the request" in str(refused.error)
    assert (withheld.text, str(withheld.error)) == ("", "the disk is full: make room")
    assert bench.delivered[-1][-1] == withheld


async def test_a_batch_commits_before_each_delivery(bench_of: Any, server: ScriptedServer) -> None:
    """Nobody is shown what a kill would take back."""
    bench: Bench = bench_of(server)
    lasting = 0

    def commit() -> None:
        nonlocal lasting
        lasting = len(bench.ended)

    deliver = bench.deliver

    def check(outcomes: list[Outcome]) -> None:
        assert sum(map(len, bench.delivered)) + len(outcomes) <= lasting
        deliver(outcomes)

    bench.scheduler._commit = commit
    bench.deliver = check  # type: ignore[method-assign]
    outcomes = await bench.submit(["x"] * 200).wait()

    assert all(outcome.error is None for outcome in outcomes)
    assert len(bench.delivered) > 1


async def test_what_had_ended_is_handed_out_when_its_batch_is_cancelled(
    bench_of: Any, server: ScriptedServer
) -> None:
    """However short before: it is recorded, so the cell gets it."""
    gate = Gate(server)
    bench: Bench = bench_of(server, concurrency=2)
    record = bench.emit

    def emit(run_id: str, event: Event) -> None:
        record(run_id, event)
        if isinstance(event, SubcallEnded) and event.ok:
            asyncio.get_running_loop().call_soon(batch.cancel)

    bench.emit = emit  # type: ignore[method-assign]
    batch = bench.submit(["a", "b"])
    await server.until(lambda s: s.active == 2)
    gate.open("a")
    outcomes = await batch.wait()

    assert [outcome.text for outcome in outcomes] == ["re: a", ""]
    assert [[outcome.text for outcome in piece] for piece in bench.delivered] == [["re: a"]]
    bench.check_pairs()


async def test_calls_that_take_too_long_leave_their_worker_to_the_others(
    bench_of: Any, server: ScriptedServer
) -> None:
    """One timer ends each at its own time, and only those that are due."""
    server.reply = lambda prompt: Hang() if prompt == "slow" else f"re: {prompt}"
    bench: Bench = bench_of(server, concurrency=1)
    await bench.submit(["warm"]).wait()
    prompts = ["slow", "a", "slow", "b"]
    outcomes = await bench.submit(prompts, params=SubcallParams(timeout=1)).wait()

    assert [outcome.text for outcome in outcomes] == ["", "re: a", "", "re: b"]
    assert all("no reply within 1 s" in str(outcomes[n].error) for n in (0, 2))
    await server.until(lambda s: s.cancelled == 2)
    bench.check_pairs()
