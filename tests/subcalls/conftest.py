"""A scheduler with everything that it needs, and what it wrote."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.engine.budget import Budget, Ledger
from rlm_kernel.engine.events import Event, SubcallEnded, SubcallStarted
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.fleet.fleet import Fleet
from rlm_kernel.subcalls.scheduling.scheduler import Batch, Outcome, Retry, Scheduler
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from tests.servers.scripted import MODEL, Say, ScriptedServer, Step

QUICK = Retry(attempts=3, base_s=0.001)


def endpoint_for(server: ScriptedServer, **options: Any) -> OpenAIEndpoint:
    """An endpoint that asks *server*, set up as one of a run is unless *options* say other."""
    spec = EndpointSpec(kind="openai", model=MODEL, base_url=server.base_url)
    api_key = options.pop("api_key", "none")
    return OpenAIEndpoint(spec, api_key, **options)


class Bench:
    """A scheduler, one endpoint, one ledger, and all that came out of them."""

    def __init__(self, endpoint: Endpoint, budget: Budget, concurrency: int | None) -> None:
        self.endpoint = endpoint
        self.ledger = Ledger(budget)
        self.events: list[tuple[str, Event]] = []
        self.delivered: list[list[Outcome]] = []
        self.got = asyncio.Event()
        """Set with the first delivery."""
        self.scheduler = Scheduler(
            emit=lambda *event: self.emit(*event),  # noqa: PLW0108 - tests replace it
            concurrency=concurrency,
            retry=QUICK,
        )

    def emit(self, run_id: str, event: Event) -> None:
        self.events.append((run_id, event))

    def deliver(self, outcomes: list[Outcome]) -> None:
        self.delivered.append(outcomes)
        self.got.set()

    def submit(self, prompts: Sequence[str], *, run_id: str = "run", **options: Any) -> Batch:
        params = options.pop("params", SubcallParams())
        ledger = options.pop("ledger", self.ledger)
        return self.scheduler.submit(
            prompts,
            run_id=run_id,
            turn=1,
            params=params,
            ledger=ledger,
            resolve=lambda model: self.endpoint,
            deliver=lambda outcomes: self.deliver(outcomes),  # noqa: PLW0108 - as above
            **options,
        )

    @property
    def started(self) -> list[SubcallStarted]:
        return [event for _, event in self.events if isinstance(event, SubcallStarted)]

    @property
    def ended(self) -> list[SubcallEnded]:
        return [event for _, event in self.events if isinstance(event, SubcallEnded)]

    def check_pairs(self) -> None:
        """Every call that started ended, once, later; nothing is set aside any more."""
        ends = Counter(event.call_id for event in self.ended)
        assert set(ends.values()) <= {1}
        assert [event.call_id for event in self.started] == list(
            dict.fromkeys(event.call_id for event in self.started)
        )
        assert {event.call_id for event in self.started} == set(ends)
        seen: set[str] = set()
        for _, event in self.events:
            if isinstance(event, SubcallEnded):
                assert event.call_id in seen
            elif isinstance(event, SubcallStarted):
                seen.add(event.call_id)
        assert self.ledger.reserved.subcalls == 0
        assert self.ledger.reserved.tokens == 0


class Gate:
    """Answers of a server that wait until the test lets them go, in the order of arrival."""

    def __init__(self, server: ScriptedServer) -> None:
        self.prompts: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}
        self._server = server
        server.reply = self._reply

    def _reply(self, prompt: str) -> Step:
        self.prompts.append(prompt)
        self._gates[prompt] = asyncio.Event()
        return Say(f"re: {prompt}", gate=self._gates[prompt])

    def open(self, prompt: str) -> None:
        self._gates[prompt].set()

    async def open_one_by_one(self, number: int) -> None:
        """Let the first *number* go, each once the one before has made room for another."""
        for place in range(number):
            self.open(self.prompts[place])
            await self._server.until(lambda s, place=place: len(s.requests) == place + 2)


async def until_down(fleet: Fleet) -> None:
    """Wait until *fleet* knows that its only server is gone."""
    async with asyncio.timeout(20):
        while fleet._members[0].state != "down":  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)


async def settled(bench: Bench) -> None:
    """Let everything run that could run now, several ticks of it."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server that answers every prompt with ``re: PROMPT``."""
    async with ScriptedServer(reply=lambda prompt: f"re: {prompt}") as server:
        yield server


@pytest.fixture
async def fleet_of() -> AsyncIterator[Any]:
    """Makes a fleet before servers, and closes it."""
    fleets: list[Fleet] = []

    def make(*servers: ScriptedServer, slots: int | None = None, **options: Any) -> Fleet:
        options = {"patience_s": 0.3, "cooldown_s": 0.01} | options
        members = [endpoint_for(server, slots=slots) for server in servers]
        fleets.append(Fleet("openai:scripted@all", MODEL, members, **options))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.close()


@pytest.fixture
async def bench_of() -> AsyncIterator[Any]:
    """Makes a `Bench` for a server or an endpoint, and closes it."""
    benches: list[Bench] = []

    def make(
        target: ScriptedServer | Endpoint,
        *,
        budget: Budget | None = None,
        concurrency: int | None = None,
        **options: Any,
    ) -> Bench:
        if isinstance(target, ScriptedServer):
            target = endpoint_for(target, **options)
        benches.append(Bench(target, budget or Budget(), concurrency))
        return benches[-1]

    yield make
    for bench in benches:
        await bench.scheduler.close()
        await bench.endpoint.close()


@pytest.fixture
def bench(bench_of: Any, server: ScriptedServer) -> Bench:
    """A `Bench` before `server`."""
    made: Bench = bench_of(server)
    return made


@pytest.fixture
async def trio() -> AsyncIterator[list[ScriptedServer]]:
    """Three servers that answer every prompt with ``re: PROMPT``."""
    async with (
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as one,
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as two,
        ScriptedServer(reply=lambda prompt: f"re: {prompt}") as three,
    ):
        yield [one, two, three]
