"""Calls that end while servers fail at them: what was sent before is told and counted."""

from __future__ import annotations

import asyncio
from typing import Any

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.events import SubcallEnded
from rlm_kernel.subcalls.fleet.fleet import Fleet
from tests.servers.scripted import Hang, Refuse, Say, ScriptedServer
from tests.subcalls.conftest import Bench, until_down

PROMPT = "x" * 8
ABORTED = Say("half", finish="abort")
COUNTED = 2 + 1
"""Tokens that a server counts for `PROMPT` and `ABORTED`."""


async def until_free(fleet: Fleet) -> None:
    """Wait until no request of *fleet* is under way."""
    async with asyncio.timeout(20):
        while any(member.load.active for member in fleet._members):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def only(bench: Bench) -> SubcallEnded:
    """The end of the last call, of which the budget has booked everything."""
    bench.check_pairs()
    assert bench.ledger.used.tokens == sum(event.usage.tokens for event in bench.ended)
    return bench.ended[-1]


async def test_a_call_that_takes_too_long_after_a_server_failed_tells_of_both(
    bench_of: Any, fleet_of: Any
) -> None:
    """Attempts, the reason of the first, the server of the last; the tokens of both."""
    asked: list[str] = []

    def reply_of(name: str) -> Any:
        def reply(prompt: str) -> Say | Hang:
            if prompt == "warm":
                return Say("ok")
            asked.append(name)
            return ABORTED if len(asked) == 1 else Hang()

        return reply

    async with ScriptedServer(reply=reply_of("a")) as a, ScriptedServer(reply=reply_of("b")) as b:
        bench: Bench = bench_of(fleet_of(a, b))
        await bench.submit(["warm"]).wait()
        outcomes = await bench.submit([PROMPT], params=SubcallParams(timeout=1)).wait()
        await bench.endpoint.close()

    assert "no reply within 1 s" in str(outcomes[0].error)
    assert sorted(asked) == ["a", "b"]
    end = only(bench)
    assert end.attempts == 2
    assert ["aborted the completion" in why for why in end.trouble] == [True]
    assert end.server == (a if asked[1] == "a" else b).base_url
    assert end.usage.tokens > COUNTED
    assert end.usage.estimated


async def test_a_call_that_is_cancelled_between_two_servers_counts_what_the_first_counted(
    bench_of: Any, fleet_of: Any
) -> None:
    """And nothing for a request that was not sent."""
    async with ScriptedServer([ABORTED]) as server:
        fleet = fleet_of(server, cooldown_s=60)
        bench: Bench = bench_of(fleet)
        batch = bench.submit([PROMPT])
        await server.until(lambda s: s.completed == 1)
        await until_free(fleet)
        batch.cancel()
        await batch.wait()
        await fleet.close()

    end = only(bench)
    assert (end.attempts, end.usage.tokens, end.usage.estimated) == (1, COUNTED, False)
    assert ["aborted the completion" in why for why in end.trouble] == [True]


async def test_a_call_that_is_cancelled_while_it_waits_to_be_sent_again_keeps_its_reasons(
    bench_of: Any, server: ScriptedServer
) -> None:
    """Also where the endpoint is one server, and the scheduler sends again."""
    server.script += [Refuse(429, "slow down", headers={"Retry-After": "50"})]
    bench: Bench = bench_of(server)
    batch = bench.submit([PROMPT])
    await server.until(lambda s: s.completed == 1)
    async with asyncio.timeout(20):
        while not any(call.trouble for call in batch.under_way):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    batch.cancel()
    await batch.wait()

    end = only(bench)
    assert (end.attempts, end.usage.tokens) == (1, 0)
    assert ["slow down" in why for why in end.trouble] == [True]


async def test_a_call_that_no_server_was_sent_has_no_attempt(bench_of: Any, fleet_of: Any) -> None:
    """It waited for one to come back; nobody read its prompt."""
    server = ScriptedServer(reply=lambda prompt: "ok")
    await server.start()
    fleet = fleet_of(server, patience_s=600)
    bench: Bench = bench_of(fleet)
    await bench.submit(["warm"]).wait()
    await server.close()
    first = bench.submit([PROMPT])
    await until_down(fleet)
    second = bench.submit([PROMPT])
    async with asyncio.timeout(20):
        while len(fleet._waiters) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    first.cancel()
    second.cancel()
    await first.wait()
    await second.wait()

    assert [end.attempts >= 1 for end in bench.ended] == [True, True, False]
    assert bench.ended[-1].attempts == 0
    assert [end.usage.tokens for end in bench.ended[1:]] == [0, 0]
    bench.check_pairs()
