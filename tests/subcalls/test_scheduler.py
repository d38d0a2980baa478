"""The scheduler with a real server: every call accounted for, in order."""

from __future__ import annotations

from typing import Any

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import SubcallStarted
from rlm_kernel.errors import SubcallError
from rlm_kernel.subcalls.endpoint import EndpointError, Reply
from tests.servers.scripted import Cut, Garbage, Refuse, ScriptedServer, Step
from tests.subcalls.conftest import Bench


async def test_results_come_back_in_the_order_of_the_prompts(bench: Bench) -> None:
    """Whatever the order in which they were there."""
    prompts = [f"prompt {i}" for i in range(200)]
    outcomes = await bench.submit(prompts).wait()

    assert [outcome.text for outcome in outcomes] == [f"re: {prompt}" for prompt in prompts]
    assert [outcome.index for outcome in outcomes] == list(range(200))
    assert len({outcome.call_id for outcome in outcomes}) == 200
    bench.check_pairs()


async def test_a_thousand_calls_with_failures_are_all_accounted_for(
    bench: Bench, server: ScriptedServer
) -> None:
    """2 % of the calls fail for good, 2 % once: each is an outcome at its place."""
    hurt: set[str] = set()

    def reply(prompt: str) -> str | Step:
        number = int(prompt)
        if number % 50 == 7:
            return (Refuse(400), Refuse(503), Cut(), Garbage())[number // 50 % 4]
        if number % 50 == 31 and prompt not in hurt:
            hurt.add(prompt)
            return (Refuse(503), Cut(), Refuse(429, headers={"Retry-After": "0"}))[number % 3]
        return f"re: {prompt}"

    server.reply = reply
    outcomes = await bench.submit([str(i) for i in range(1000)]).wait()

    assert [outcome.index for outcome in outcomes] == list(range(1000))
    for number, outcome in enumerate(outcomes):
        if number % 50 == 7:
            assert isinstance(outcome.error, SubcallError)
            assert outcome.text == ""
        else:
            assert outcome.error is None
            assert outcome.text == f"re: {number}"
    delivered = sorted(outcome.index for piece in bench.delivered for outcome in piece)
    assert delivered == list(range(1000))
    assert len(bench.started) == 1000
    bench.check_pairs()


async def test_outcomes_that_come_together_are_delivered_together(bench: Bench) -> None:
    """Fewer messages on the link than calls."""
    await bench.submit(["x"] * 500).wait()

    assert sum(len(piece) for piece in bench.delivered) == 500
    assert len(bench.delivered) < 400


async def test_an_empty_batch_is_done_at_once(bench: Bench) -> None:
    """Nothing is called, nothing delivered."""
    assert await bench.submit([]).wait() == []
    assert bench.events == []
    assert bench.delivered == []


async def test_events_say_what_was_called_and_what_came_back(bench: Bench) -> None:
    """Start and end of a call carry all that a view of the tree needs."""
    params = SubcallParams(temperature=0.0)
    batch = bench.submit(["one", "two"], params=params, run_id="r1")
    await batch.wait()

    assert [run_id for run_id, _ in bench.events] == ["r1"] * 4
    started = next(event for event in bench.started if event.index == 1)
    assert started == SubcallStarted(
        call_id=started.call_id,
        kind="llm",
        prompt="two",
        model="scripted",
        turn=1,
        batch_id=batch.batch_id,
        index=1,
        params=params,
        queued_s=started.queued_s,
        key=started.key,
    )
    assert started.queued_s > 0
    assert len(bytes.fromhex(started.key)) == 16
    ended = next(event for event in bench.ended if event.call_id == started.call_id)
    assert (ended.ok, ended.response, ended.finish, ended.attempts) == (True, "re: two", "stop", 1)
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (1, 2)
    assert bench.ledger.used.tokens == sum(event.usage.tokens for event in bench.ended)
    assert bench.ledger.used.calls == 2


async def test_the_end_of_a_call_is_written_before_it_is_handed_out(bench_of: Any) -> None:
    """Nobody is shown what the record does not have."""
    async with ScriptedServer(reply=lambda prompt: "ok") as server:
        bench: Bench = bench_of(server)
        recorded: list[bool] = []

        def deliver(outcomes: list[Any]) -> None:
            ended = {event.call_id for event in bench.ended}
            recorded.extend(outcome.call_id in ended for outcome in outcomes)

        batch = bench.scheduler.submit(
            ["x"] * 20,
            run_id="run",
            turn=1,
            ledger=bench.ledger,
            resolve=lambda model: bench.endpoint,
            deliver=deliver,
        )
        await batch.wait()

    assert recorded == [True] * 20


async def test_the_end_of_a_call_tells_of_all_its_requests(bench_of: Any) -> None:
    """How many there were, why the earlier ones failed, which server replied, and when."""
    bench: Bench = bench_of(Telling())
    outcomes = await bench.submit(["x"]).wait()

    assert outcomes[0].text == "yes"
    (ended,) = bench.ended
    assert ended.attempts == 2 + 3
    assert ended.trouble == ["a: is down", "b: is down", "c: is slow", "a: is still down"]
    assert (ended.server, ended.first_token_s) == ("http://b/v1", 0.25)


class Telling:
    """An endpoint with several servers: two requests fail for good, then one of three succeeds."""

    spec = model = "telling"
    slots = None
    on_room = None

    def __init__(self) -> None:
        self.asked = 0

    def price(self, model: str) -> None:
        return None

    async def complete(self, prompt: str, params: SubcallParams, **more: Any) -> Reply:
        self.asked += 1
        if self.asked == 1:
            raise EndpointError(
                "b: is down", retryable=True, attempts=2, server="b", trouble=["a: is down"]
            )
        return Reply(
            text="yes",
            usage=Usage(input_tokens=1),
            attempts=3,
            server="http://b/v1",
            first_token_s=0.25,
            trouble=["c: is slow", "a: is still down"],
        )

    async def context_limit(self) -> int | None:
        return None

    async def close(self) -> None:
        pass
