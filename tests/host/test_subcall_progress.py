"""The host tells how far a cell's sub-calls are, and keeps nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_kernel.driver.document import Document
from rlm_kernel.driver.host import Host
from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.driver.protocol import Operation
from rlm_kernel.driver.request import RunRequest
from rlm_kernel.engine.events import TurnExecuted, TurnObserved
from rlm_kernel.record import Record
from tests.servers.scripted import ScriptedServer

pytestmark = pytest.mark.usefixtures("no_orphans")

CELL = "print('before')\nr = sub_RLM([f'prompt {n}' for n in range(12)])\nprint('after')"


class Watches:
    """A listener that keeps what it is told of sub-calls, and does something at the first."""

    def __init__(self) -> None:
        self.tallies: list[Tally | None] = []
        self.first = asyncio.Event()

    def operation(self, op: Operation) -> None:
        pass

    def subcalls(self, tally: Tally | None) -> None:
        self.tallies.append(tally)
        self.first.set()

    def note(self, text: str) -> None:
        pass


async def test_the_listener_is_told_and_notebook_record_and_root_are_not(
    prompt: Path, playbook: Callable[..., str], tmp_path: Path
) -> None:
    released = asyncio.Event()

    async def reply(text: str) -> str:
        await released.wait()
        return f"R:{text}"

    watches = Watches()
    document = Document(tmp_path / "run.ipynb")
    async with ScriptedServer(reply=reply) as server:
        options = {
            "root": playbook(CELL, "Final = len(r)"),
            "sub": f"openai:scripted@{server.base_url}",
        }
        request = RunRequest(prompt=str(prompt), query="how many?", options=options)
        running = asyncio.create_task(Host(request, document, listener=watches).run())
        await asyncio.wait_for(watches.first.wait(), 60)
        released.set()
        outcome = await running

    assert outcome.final is not None
    assert outcome.final.response == "12"
    first, *_, last = watches.tallies
    assert first is not None
    assert (first.done, first.calls) == (0, 12)
    assert last is None
    (cell,) = [cell for cell in document.render()["cells"] if cell["source"] == CELL]
    assert [output["text"] for output in cell["outputs"]] == ["before\nafter\n"]
    with Record.read(tmp_path / "run.rlm.sqlite") as record:
        events = [stored.event for stored in record.events()]
    shown = [event for event in events if isinstance(event, TurnExecuted | TurnObserved)]
    assert len(shown) == 4
    assert not any("sub-calls" in str(event) for event in shown)


async def test_a_run_that_a_person_stops_ends_its_calls_on_the_server(
    prompt: Path, playbook: Callable[..., str]
) -> None:
    async def never(text: str) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    watches = Watches()
    async with ScriptedServer(reply=never) as server:
        options = {
            "root": playbook(CELL, "Final = 1"),
            "sub": f"openai:scripted@{server.base_url}",
        }
        request = RunRequest(prompt=str(prompt), query="how many?", options=options)
        host = Host(request, Document(None), listener=watches)
        running = asyncio.create_task(host.run())
        await asyncio.wait_for(watches.first.wait(), 60)
        assert server.active > 0
        host.interrupt()
        outcome = await running
        active = server.active

    assert outcome.final is not None
    assert outcome.final.state == "stopped"
    assert active == 0
