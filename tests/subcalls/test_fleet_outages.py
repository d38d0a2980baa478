"""Servers of a fleet that go away, come back, are silent or start elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

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
    Hang,
    Refuse,
    Say,
    ScriptedServer,
)
from tests.subcalls.conftest import Bench, endpoint_for, until_down
from tests.subcalls.fleets import ask, ask_all, favourite


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
