"""Several servers as one endpoint: who is asked, and what becomes of calls that one failed at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.subcalls.endpoint import EndpointError, Reply
from rlm_kernel.subcalls.fleet import keeper, member
from rlm_kernel.subcalls.fleet.fleet import Fleet
from rlm_kernel.subcalls.fleet.member import Member
from rlm_kernel.subcalls.server import openai_http
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from rlm_kernel.subcalls.server.server_kind import ServerFacts
from tests.servers.scripted import (
    MODEL,
    Cut,
    ErrorEvent,
    Garbage,
    Hang,
    Refuse,
    Say,
    ScriptedServer,
    Step,
)
from tests.subcalls.conftest import Bench, endpoint_for, until_down

PLAIN = SubcallParams()


@pytest.fixture
async def trio() -> AsyncIterator[list[ScriptedServer]]:
    """Three servers that answer every prompt with ``re: PROMPT``."""
    async with (
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as one,
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as two,
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as three,
    ):
        yield [one, two, three]


async def ask(fleet: Fleet, prompt: str = "x") -> Reply:
    return await fleet.complete(prompt, PLAIN)


async def ask_all(fleet: Fleet, prompts: list[str]) -> list[Reply | BaseException]:
    calls = (fleet.complete(prompt, PLAIN) for prompt in prompts)
    return await asyncio.gather(*calls, return_exceptions=True)


def counts(servers: list[ScriptedServer]) -> list[int]:
    return [len(server.requests) for server in servers]


def of(servers: list[ScriptedServer], url: str) -> ScriptedServer:
    return next(server for server in servers if server.base_url == url)


async def favourite(fleet: Fleet, servers: list[ScriptedServer], prompt: str) -> ScriptedServer:
    """The server that an idle fleet sends *prompt* to."""
    return of(servers, (await ask(fleet, prompt)).server)


# --- which server -------------------------------------------------------------------------------


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


async def test_calls_wait_for_the_only_server_to_come_back(bench_of: Any, fleet_of: Any) -> None:
    """Those in flight and those not yet sent: all finish, and none of it is the cell's concern."""
    gate = asyncio.Event()
    server = ScriptedServer(reply=lambda prompt: Say(f"re: {prompt}", gate=gate))
    await server.start()
    port = server.port
    fleet: Fleet = fleet_of(server, slots=8, patience_s=30)
    bench: Bench = bench_of(fleet)
    batch = bench.submit([str(n) for n in range(50)])
    await server.until(lambda s: s.active == 8)
    await server.close()
    server.reply = lambda prompt: f"re: {prompt}"
    await until_down(fleet)
    await server.start(port)
    try:
        outcomes = await batch.wait()
    finally:
        await server.close()

    assert [outcome.text for outcome in outcomes] == [f"re: {n}" for n in range(50)]
    bench.check_pairs()


async def test_where_all_servers_are_gone_every_call_gets_an_error_that_names_them(
    bench_of: Any, fleet_of: Any
) -> None:
    """After a wait that is bounded for all of them together, not for each."""
    servers = [ScriptedServer(reply=lambda prompt: "ok") for _ in range(2)]
    for server in servers:
        await server.start()
    fleet = fleet_of(*servers, slots=4)
    bench: Bench = bench_of(fleet)
    await bench.submit(["warm"]).wait()
    for server in servers:
        await server.close()
    outcomes = await bench.submit([str(n) for n in range(200)]).wait()

    assert len(outcomes) == 200
    for outcome in outcomes:
        message = str(outcome.error)
        assert message.startswith("none of the 2 servers of 'scripted' takes calls: ")
        assert all(f"the server at {server.base_url} refuses" in message for server in servers)
        assert message.endswith("; try again when one does")
    bench.check_pairs()


async def test_a_server_that_never_was_there_is_not_waited_for_long(
    fleet_of: Any, server: ScriptedServer
) -> None:
    """A wrong URL is told within seconds, whatever the patience."""
    await server.close()
    fleet = fleet_of(server, patience_s=600)
    with pytest.raises(EndpointError, match=r"refuses connections: try again when it takes calls"):
        async with asyncio.timeout(20):
            await ask(fleet)


async def test_a_dead_server_is_left_alone_and_gets_calls_again_when_it_is_back(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """Its calls move; after its return it is found without anybody being told."""
    fleet = fleet_of(*trio)
    lost = await favourite(fleet, trio, "x")
    port = lost.port
    await lost.close()
    for _ in range(3):
        replies = await ask_all(fleet, ["x"] * 10)
        assert all(isinstance(reply, Reply) for reply in replies)
    seen = len(lost.requests)
    await lost.start(port)

    async def until_asked() -> None:
        while len(lost.requests) == seen:
            await ask_all(fleet, ["x"] * 10)

    await asyncio.wait_for(until_asked(), 20)


async def cancelled(fleet: Fleet, server: ScriptedServer) -> None:
    server.script.append(Hang())
    call = asyncio.create_task(ask(fleet))
    await server.until(lambda s: s.active == 1)
    call.cancel()
    await asyncio.wait([call])


async def refused(fleet: Fleet, server: ScriptedServer) -> None:
    server.script.append(Refuse(429))
    await ask(fleet)


async def not_sent(fleet: Fleet, server: ScriptedServer) -> None:
    with pytest.raises(EndpointError, match="too many beside"):
        await ask(fleet, "x" * 10_000_000)


@pytest.mark.parametrize("trial", [cancelled, refused, not_sent])
async def test_a_server_that_is_back_is_tried_again_where_the_first_call_told_nothing(
    trial: Callable[[Fleet, ScriptedServer], Awaitable[None]], fleet_of: Any, server: ScriptedServer
) -> None:
    """One call tries it; that one may be cancelled, come too early, or never be sent."""
    fleet: Fleet = fleet_of(server, patience_s=20)
    await ask(fleet)
    port = server.port
    await server.close()
    call = asyncio.create_task(ask(fleet, "y"))
    await until_down(fleet)
    call.cancel()
    await asyncio.wait([call])
    await server.start(port)

    async with asyncio.timeout(20):
        await trial(fleet, server)
        assert (await ask(fleet, "z")).text == "re: z"


async def test_a_server_gets_no_calls_before_it_says_that_it_is_well(
    fleet_of: Any, trio: list[ScriptedServer]
) -> None:
    """An engine that died leaves a server that answers, for a while."""
    fleet = fleet_of(*trio)
    sick = await favourite(fleet, trio, "x")
    sick.script.append(Refuse(500, "EngineCore encountered an issue"))
    sick.well = False
    await ask_all(fleet, ["x"] * 10)
    asked, looks = len(sick.requests), sick.looks

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await ask_all(fleet, ["x"] * 10)

    await until(lambda: sick.looks > looks + 2)
    assert len(sick.requests) == asked
    sick.well = True
    await until(lambda: len(sick.requests) > asked)


async def test_servers_that_were_started_elsewhere_are_found(
    fleet_of: Any, server: ScriptedServer
) -> None:
    """Where all are down, whoever knows of others is asked."""
    async with ScriptedServer(reply=lambda prompt: f"new: {prompt}") as other:

        async def rediscover() -> list[Any]:
            return [endpoint_for(other)]

        fleet = fleet_of(server, rediscover=rediscover, patience_s=30)
        await ask(fleet)
        await server.close()
        replies = await ask_all(fleet, ["x"] * 50)

        assert [reply.text for reply in replies] == ["new: x"] * 50  # type: ignore[union-attr]
        assert fleet.urls == [other.base_url]


async def test_calls_are_taken_off_a_server_that_went_away_and_left_their_connections_open(
    fleet_of: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does when it is told to end: they would wait for ever."""
    monkeypatch.setattr(member, "SILENT_S", 0.05)
    monkeypatch.setattr(keeper, "TICK_S", 0.05)
    reached = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        reached.set()
        await reader.read()  # until the client goes away
        writer.close()

    mute = await asyncio.start_server(take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{mute.sockets[0].getsockname()[1]}/v1"
    spec = EndpointSpec(kind="openai", model=MODEL, base_url=url)
    fleet = fleet_of(server)
    fleet._members.append(Member(OpenAIEndpoint(spec, "none", facts=ServerFacts()), cooldown_s=1))
    fleet._arrange()
    calls = [asyncio.create_task(ask(fleet, str(number))) for number in range(20)]
    await reached.wait()
    mute.close()
    replies = await asyncio.wait_for(asyncio.gather(*calls), 20)

    assert [reply.text for reply in replies] == [f"re: {number}" for number in range(20)]
    assert any("went away without a word" in why for reply in replies for why in reply.trouble)


async def test_a_server_that_thinks_for_long_keeps_its_calls(
    fleet_of: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it is well."""
    monkeypatch.setattr(member, "SILENT_S", 0.01)
    monkeypatch.setattr(keeper, "TICK_S", 0.01)
    gate = asyncio.Event()
    server.reply = lambda prompt: Say("at last", gate=gate)
    fleet = fleet_of(server)
    call = asyncio.create_task(ask(fleet))
    await server.until(lambda s: s.active == 1)
    await server.until(lambda s: s.looks > 5)
    gate.set()

    assert (await call).attempts == 1


async def test_a_server_that_thinks_for_long_is_asked_for_its_health_in_peace(
    fleet_of: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in a tick: that it says that it is well is no reason to ask again at once."""
    monkeypatch.setattr(member, "SILENT_S", 0.01)
    monkeypatch.setattr(keeper, "TICK_S", 0.1)
    gate = asyncio.Event()
    server.reply = lambda prompt: Say("at last", gate=gate)
    call = asyncio.create_task(ask(fleet_of(server)))
    await server.until(lambda s: s.looks > 0)
    begin, first = time.monotonic(), server.looks
    await server.until(lambda s: s.looks >= first + 4)
    more, seconds = server.looks - first, time.monotonic() - begin
    gate.set()
    await call

    assert more <= seconds / 0.1 + 1


class OneAtATime(ScriptedServer):
    """Answers nothing while it works on a request, as servers with one thread do."""

    async def _health(self, request: web.Request) -> web.Response:
        self.looks += 1
        self._tell()
        await self.until(lambda server: not server.active)
        return web.Response()


async def test_a_server_that_does_one_thing_at_a_time_keeps_its_call(
    fleet_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot say that it is well meanwhile; that it listens is enough."""
    monkeypatch.setattr(member, "SILENT_S", 0.01)
    monkeypatch.setattr(keeper, "TICK_S", 0.01)
    monkeypatch.setattr(openai_http, "HEALTH_S", 0.05)
    gate = asyncio.Event()
    async with OneAtATime(reply=lambda prompt: Say("at last", gate=gate)) as server:
        fleet = fleet_of(server)
        call = asyncio.create_task(ask(fleet))
        await server.until(lambda s: s.looks > member.DEAD + 2)
        gate.set()

        assert (await call).attempts == 1


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
