"""Endpoints that code in cells names: open while they are asked, and not for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rlm_kernel.config import parse_sub_spec
from rlm_kernel.engine.budget import Budget, Ledger
from rlm_kernel.session.models import MOST_OPEN, Models
from rlm_kernel.session.settings import Settings
from rlm_kernel.subcalls.fleet.fleet import Fleet
from rlm_kernel.subcalls.scheduling.scheduler import Batch, Scheduler
from tests.servers.scripted import Hang, ScriptedServer, Step

MANY = MOST_OPEN + 20


class Asking:
    """Models and the scheduler that asks them, with what a cell of any session can name."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.models = Models({})
        self.scheduler = Scheduler(emit=lambda run_id, event: None)
        self.models.name(self.spec("any"))

    def spec(self, model: str) -> str:
        return str(parse_sub_spec(f"openai:{model}@{self.server.base_url}", {}))

    def endpoint(self, model: str) -> Fleet:
        endpoint = self.models.sub(Settings(), self.spec(model))
        assert isinstance(endpoint, Fleet)
        return endpoint

    def ask(self, model: str) -> Batch:
        return self.scheduler.submit(
            ["x"],
            run_id="run",
            turn=1,
            ledger=Ledger(Budget()),
            resolve=lambda _: self.endpoint(model),
            deliver=lambda outcomes: None,
        )


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    names = [f"m{number}" for number in range(MANY)]
    server = ScriptedServer(models=dict.fromkeys(["busy", *names], 32_768))
    server.reply = lambda prompt: "ok"
    async with server:
        asking = Asking(server)
        yield asking
        await asking.scheduler.close()
        await asking.models.close()


def is_open(fleet: Fleet) -> bool:
    return fleet._members[0].endpoint._connection._session is not None


async def test_of_many_endpoints_those_that_were_asked_last_stay_open(asking: Asking) -> None:
    """The others are closed, and opened again where they are asked again."""
    fleets = []
    for number in range(MANY):
        fleets.append(asking.endpoint(f"m{number}"))
        outcomes = await asking.ask(f"m{number}").wait()
        assert outcomes[0].text == "ok"
        asking.endpoint("m0")
    while asking.models._closing:
        await next(iter(asking.models._closing))

    assert sum(map(is_open, fleets)) == MOST_OPEN
    assert is_open(fleets[0])
    assert asking.endpoint("m0") is fleets[0]
    assert asking.endpoint("m1") is not fleets[1]
    assert (await asking.ask("m1").wait())[0].text == "ok"


async def test_an_endpoint_with_calls_stays_open_however_many_others_are_asked(
    asking: Asking,
) -> None:
    """Calls under way, and such as wait for their turn."""
    steps: list[Step | str] = [Hang()]
    asking.server.reply = lambda prompt: steps.pop() if steps else "ok"
    busy = asking.endpoint("busy")
    batch = asking.ask("busy")
    await asking.server.until(lambda s: s.active == 1)
    for number in range(MANY):
        await asking.ask(f"m{number}").wait()

    assert asking.endpoint("busy") is busy
    assert is_open(busy)
    batch.cancel()
    await batch.wait()


async def test_the_scheduler_keeps_nothing_of_endpoints_without_calls(asking: Asking) -> None:
    """However they ended, and where there were none."""
    asking.server.script += ["ok", Hang()]
    await asking.ask("m0").wait()
    cancelled = asking.ask("m1")
    await asking.server.until(lambda s: s.active == 1)
    assert asking.endpoint("m1").on_room is not None
    cancelled.cancel()
    await cancelled.wait()
    asking.scheduler.submit(
        [],
        run_id="run",
        turn=1,
        ledger=Ledger(Budget()),
        resolve=lambda _: asking.endpoint("m2"),
        deliver=lambda outcomes: None,
    )

    assert asking.scheduler._lanes == {}
    assert [asking.endpoint(f"m{number}").on_room for number in range(3)] == [None] * 3
