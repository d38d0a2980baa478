"""Several servers as one endpoint: who is asked, and what becomes of calls that one failed at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlm_kernel.subcalls.endpoint import EndpointError, Reply
from rlm_kernel.subcalls.fleet import member
from tests.servers.scripted import (
    Cut,
    ErrorEvent,
    Garbage,
    Hang,
    Refuse,
    Say,
    ScriptedServer,
    Step,
)
from tests.subcalls.conftest import Bench
from tests.subcalls.fleets import ask, ask_all, counts, favourite


async def test_different_prompts_are_spread_over_all_servers(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """One after the other, so that only the prompts decide."""
    fleet = fleet_of(*trio)
    for number in range(300):
        await ask(fleet, f"{number} is the number")

    # A server has 100 on average, and by chance 8 more or fewer.
    assert sum(counts(trio)) == 300
    assert min(counts(trio)) >= 50


async def test_prompts_that_begin_alike_go_to_one_server_as_long_as_it_is_not_busy(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """It has their beginning in its prefix cache; the next kernel chooses the same one."""
    prompts = ["classify: " * 100 + str(number) for number in range(20)]
    for fleet in (fleet_of(*trio), fleet_of(*trio)):
        for prompt in prompts:
            await ask(fleet, prompt)

    assert sorted(counts(trio)) == [0, 0, 40]


async def test_many_prompts_that_begin_alike_do_not_saturate_one_server(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """The preference is worth a few calls more in flight, not a queue."""
    gate = asyncio.Event()
    for server in trio:
        server.reply = lambda prompt: Say("ok", gate=gate)
    fleet = fleet_of(*trio)
    calls = [asyncio.create_task(ask(fleet, "classify: " * 100 + str(n))) for n in range(60)]
    await asyncio.gather(*(server.until(lambda s: s.active >= 15) for server in trio))
    gate.set()
    await asyncio.gather(*calls)

    assert sum(counts(trio)) == 60
    assert max(counts(trio)) <= 24


async def test_no_server_gets_more_at_once_than_its_slots(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """The rest waits here, where it can be taken back."""
    fleet = fleet_of(*trio, slots=4)
    assert fleet.slots == 12
    replies = await ask_all(fleet, [str(n) for n in range(24)])

    assert [reply.text for reply in replies] == [f"re: {n}" for n in range(24)]  # type: ignore[union-attr]
    assert max(server.peak for server in trio) <= 4


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        Refuse(500),
        Refuse(503),
        Refuse(429),
        Refuse(429, headers={"Retry-After": "30"}),
        Cut(),
        Garbage("<html>"),
        ErrorEvent("EngineCore encountered an issue"),
        Say("half", finish="abort"),
    ],
    ids=lambda step: type(step).__name__ + str(getattr(step, "status", "")),
)
async def test_a_call_that_a_server_fails_at_moves_to_another(
    fleet_of: Any, trio: list[ScriptedServer], step: Step
) -> None:
    """At once, and the reply says what happened on the way."""
    fleet = fleet_of(*trio, cooldown_s=60)
    first = await favourite(fleet, trio, "x")
    first.script.append(step)
    reply = await ask(fleet, "x")

    assert reply.text == "re: x"
    assert reply.attempts == 2
    assert reply.server != first.base_url
    assert len(reply.trouble) == 1
    assert first.base_url in reply.trouble[0]


async def test_a_request_that_is_wrong_does_not_move(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """It is wrong everywhere."""
    for server in trio:
        server.reply = lambda prompt: Refuse(400, "no such parameter")
    with pytest.raises(EndpointError, match="no such parameter") as caught:
        await ask(fleet_of(*trio))

    assert sum(counts(trio)) == 1
    assert (caught.value.retryable, caught.value.status, caught.value.attempts) == (False, 400, 1)


async def test_a_call_that_every_server_fails_at_is_given_up_and_harms_no_other(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """One prompt may be what kills a grammar engine: three servers are enough to try."""

    def reply(prompt: str) -> str | Step:
        return Refuse(500, "bad grammar") if prompt == "poison" else f"re: {prompt}"

    for server in trio:
        server.reply = reply
    fleet = fleet_of(*trio)
    prompts = ["poison" if n % 10 == 0 else str(n) for n in range(100)]
    replies = await ask_all(fleet, prompts)

    for prompt, got in zip(prompts, replies, strict=True):
        if prompt == "poison":
            assert isinstance(got, EndpointError)
            assert "bad grammar): try again later (3 attempts)" in got.reason
            assert (got.attempts, len(got.trouble), got.retryable) == (3, 2, False)
        else:
            assert isinstance(got, Reply)
            assert got.text == f"re: {prompt}"
    poisoned = [[r.prompt for r in server.requests].count("poison") for server in trio]
    assert sum(poisoned) == 30


async def test_a_server_that_asks_for_a_rest_gets_it_while_the_others_go_on(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """Retry-After is for all calls, not only for the one that was refused."""
    fleet = fleet_of(*trio)
    first = await favourite(fleet, trio, "x")
    first.script.append(Refuse(429, headers={"Retry-After": "30"}))
    before = len(first.requests)
    await ask_all(fleet, ["x"] * 20)
    await ask_all(fleet, ["x"] * 20)

    # Those of the first batch that were under way together with the one that was refused.
    assert len(first.requests) < before + 20
    asked = len(first.requests)
    await ask_all(fleet, ["x"] * 20)
    assert len(first.requests) == asked


async def test_a_wait_that_is_too_long_is_not_waited(fleet_of: Any, server: ScriptedServer) -> None:
    """The cell gets its error now rather than in an hour, and so do the calls after it."""
    server.script.append(Refuse(429, headers={"Retry-After": "3600"}))
    fleet = fleet_of(server)
    for _ in range(2):
        with pytest.raises(EndpointError, match="asks to wait 3,600 s: try again"):
            await ask(fleet)

    assert len(server.requests) == 1


async def test_a_server_that_asks_for_too_long_a_rest_is_tried_in_between(
    fleet_of: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day would else be a day, whatever the server has to say by then."""
    monkeypatch.setattr(member, "TRIAL_AFTER_S", 0.05)
    server.script += [Refuse(429, headers={"Retry-After": "86400"})] * 2
    fleet = fleet_of(server)
    refused = 0
    async with asyncio.timeout(20):
        while True:
            try:
                reply = await ask(fleet)
                break
            except EndpointError:
                refused += 1

    assert reply.text == "re: x"
    assert refused >= 2
    assert len(server.requests) == 3


async def test_a_short_rest_of_the_only_server_is_waited_for(
    fleet_of: Any, server: ScriptedServer
) -> None:
    """It is no failure of the call."""
    server.script.append(Refuse(429, headers={"Retry-After": "0.05"}))
    reply = await ask(fleet_of(server))

    assert (reply.text, reply.attempts, len(reply.trouble)) == ("re: x", 2, 1)


async def test_tokens_of_attempts_that_failed_are_counted(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """An aborted completion costs what its server counted."""
    fleet = fleet_of(*trio)
    prompt = "x" * 8
    (await favourite(fleet, trio, prompt)).script.append(Say("half", finish="abort"))
    reply = await ask(fleet, prompt)

    assert reply.usage.input_tokens == 2 + 2
    assert reply.usage.output_tokens == 1 + 3


async def test_cancelling_a_call_ends_it_on_the_server(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """And gives its room back."""
    for server in trio:
        server.reply = lambda prompt: Hang()
    fleet = fleet_of(*trio, slots=1)
    calls = [asyncio.create_task(ask(fleet, str(n))) for n in range(5)]
    await asyncio.gather(*(server.until(lambda s: s.active == 1) for server in trio))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.gather(*(server.until(lambda s: s.active == 0) for server in trio))

    assert sum(counts(trio)) == 3
    for server in trio:
        server.reply = lambda prompt: "ok"
    assert [reply.text for reply in await ask_all(fleet, ["x"] * 9)] == ["ok"] * 9  # type: ignore[union-attr]


async def test_one_server_gets_every_call_again_without_a_name_of_it_in_the_reply(
    fleet_of: Any, server: ScriptedServer
) -> None:
    """A fleet of one is the endpoint of a spec with one URL."""
    server.script += [Refuse(503), Cut(), "at last"]
    reply = await ask(fleet_of(server))

    assert (reply.text, reply.attempts, reply.server) == ("at last", 3, "")


async def test_attempts_do_not_multiply_with_those_of_the_scheduler(
    bench_of: Any, server: ScriptedServer, fleet_of: Any
) -> None:
    """What the fleet gave up is not sent again, and the record has all attempts."""
    server.reply = lambda prompt: Refuse(500)
    bench: Bench = bench_of(fleet_of(server))
    outcomes = await bench.submit(["x"]).wait()

    assert "(3 attempts)" in str(outcomes[0].error)
    assert len(server.requests) == 3
    assert bench.ended[0].attempts == 3
    assert len(bench.ended[0].trouble) == 2


# --- servers that go and come -------------------------------------------------------------------


async def test_nothing_goes_on_in_a_fleet_without_calls(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """Neither a dead server nor an idle one is asked for anything by an idle kernel."""
    fleet = fleet_of(*trio)
    await trio[0].close()
    await ask_all(fleet, [str(n) for n in range(20)])

    async def until_quiet() -> None:
        while not fleet._keeper.idle:  # noqa: ASYNC110 - it ends unseen
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_quiet(), 20)


# --- room -----------------------------------------------------------------------------------------


async def test_the_scheduler_fills_the_room_that_a_fleet_finds(
    bench_of: Any, fleet_of: Any
) -> None:
    """llama.cpp says how many slots it has; more calls are sent then, without one having ended."""
    gate = asyncio.Event()
    async with ScriptedServer(
        reply=lambda prompt: Say("ok", gate=gate), owned_by="llamacpp", props={"total_slots": 64}
    ) as server:
        bench: Bench = bench_of(fleet_of(server))
        batch = bench.submit(["x"] * 100)
        await server.until(lambda s: s.active == 72)
        gate.set()
        await batch.wait()

        assert server.peak == 72
