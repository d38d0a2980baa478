"""Requests that fail: which are sent again, how often, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers.scripted import Cut, Garbage, Refuse, Say, ScriptedServer, Step
from tests.subcalls.conftest import Bench


@pytest.mark.parametrize(
    "step", [Refuse(503), Refuse(429, headers={"Retry-After": "0"}), Cut(), Garbage("<html>")]
)
async def test_a_failure_that_may_pass_is_tried_again(bench_of: Any, step: Step) -> None:
    """The number of attempts is in the record."""
    async with ScriptedServer([step, step, "at last"]) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x"]).wait()

        assert outcomes[0].text == "at last"
        assert bench.ended[0].attempts == 3
        assert bench.ledger.subcalls == 1


async def test_attempts_are_bounded(bench_of: Any) -> None:
    """The error says how many there were."""
    async with ScriptedServer(reply=lambda prompt: Refuse(503)) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x"]).wait()

        assert "(3 attempts)" in str(outcomes[0].error)
        assert len(server.requests) == 3


async def test_a_failure_that_will_not_pass_is_not_tried_again(bench_of: Any) -> None:
    """A bad request stays one."""
    async with ScriptedServer([Refuse(400), "never"]) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x"]).wait()

        assert outcomes[0].error is not None
        assert len(server.requests) == 1


async def test_a_wait_that_is_too_long_is_not_waited(bench_of: Any) -> None:
    """The cell gets its error now rather than in an hour."""
    async with ScriptedServer([Refuse(429, headers={"Retry-After": "3600"})]) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x"]).wait()

        assert "it asks to wait 3,600 s" in str(outcomes[0].error)


async def test_tokens_of_attempts_that_failed_are_booked(bench_of: Any) -> None:
    """An aborted and an empty completion cost what the server counted."""
    aborted, empty = Say("half", finish="abort"), Say("", finish="stop")
    async with ScriptedServer([aborted, empty]) as server:
        bench: Bench = bench_of(server)
        outcomes = await bench.submit(["x" * 8]).wait()

        assert "empty completion" in str(outcomes[0].error)
        assert bench.ended[0].usage.tokens == 2 + 1 + 2
        assert bench.ledger.used.tokens == 5
