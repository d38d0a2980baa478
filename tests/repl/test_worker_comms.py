"""Widgets in the REPL talk to a front end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlm_kernel.cells import Stream
from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver


@pytest.fixture
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def comm_message(comm_id: str, data: Any, **more: Any) -> messages.CommToWorker:
    return messages.CommToWorker(kind="comm_msg", comm_id=comm_id, data=data, **more)


def test_a_slider_in_both_directions(worker: WorkerDriver) -> None:
    """An ipywidget opens its comm, sends changes, and takes those of the front end."""
    cell = worker.run("import ipywidgets as w\ns = w.IntSlider(value=3)\ns")
    opened = [m for m in cell.requests if isinstance(m, messages.CommFromWorker)]
    assert {m.kind for m in opened} == {"comm_open"}
    assert {m.target_name for m in opened} == {"jupyter.widget"}
    assert opened[0].metadata["version"].startswith("2")
    result = [o for o in cell.outputs if "application/vnd.jupyter.widget-view+json" in o.data]  # type: ignore[union-attr]
    assert result

    (sent,) = worker.run("s.value = 7").requests
    assert isinstance(sent, messages.CommFromWorker)
    assert (sent.kind, sent.data["state"]["value"]) == ("comm_msg", 7)

    worker.send(comm_message(sent.comm_id, {"method": "update", "state": {"value": 9}}))
    assert worker.run("s.value").result == "9"


def test_binary_buffers(worker: WorkerDriver) -> None:
    """Bytes travel beside the data, both ways."""
    cell = worker.run(
        "from comm import create_comm\ngot = []\n"
        "buffers = [b'\\x00\\xff', memoryview(b'x')]\n"
        "c = create_comm(target_name='t', data={'a': 1}, buffers=buffers)\n"
        "c.on_msg(lambda m: got.append((m['content']['data'], bytes(m['buffers'][0]))))"
    )
    (opened,) = cell.requests
    assert isinstance(opened, messages.CommFromWorker)
    assert (opened.target_name, opened.data, opened.buffers) == ("t", {"a": 1}, [b"\x00\xff", b"x"])
    worker.send(comm_message(opened.comm_id, 5, buffers=[b"\x01"]))
    assert worker.run("got").result == "[(5, b'\\x01')]"


def test_a_front_end_opens_and_closes_a_comm(worker: WorkerDriver) -> None:
    """Through targets that a cell registered; an unknown target is closed again."""
    worker.run(
        "seen = []\n"
        "def opened(comm, message):\n"
        "    seen.append(message['content']['data'])\n"
        "    comm.on_close(lambda m: seen.append('closed'))\n"
        "get_ipython().kernel.comm_manager.register_target('mine', opened)"
    )
    for kind in ("comm_open", "comm_close"):
        worker.send(
            messages.CommToWorker(kind=kind, comm_id="c1", data=kind, target_name="mine")  # type: ignore[arg-type]
        )
    assert worker.run("seen").result == "['comm_open', 'closed']"
    worker.send(messages.CommToWorker(kind="comm_open", comm_id="c2", target_name="nobody's"))
    closed = worker.wait_for(messages.CommFromWorker)
    assert (closed.kind, closed.comm_id) == ("comm_close", "c2")


def test_what_a_handler_prints_between_cells_belongs_to_none(worker: WorkerDriver) -> None:
    """And its request is the comm message, for widgets that ask."""
    worker.run(
        "from comm import create_comm\nc = create_comm(comm_id='c1')\n"
        "def handle(m): print('handled', get_ipython().kernel.get_parent()['header']['msg_id'])\n"
        "c.on_msg(handle)"
    )
    worker.send(comm_message("c1", {}, parent={"msg_id": "m1"}))
    emitted = worker.wait_for(messages.Emit)
    assert (emitted.id, emitted.output) == (0, Stream("stdout", "handled m1\n"))


def test_a_handler_that_fails_or_leaves_harms_nothing(worker: WorkerDriver) -> None:
    """The worker goes on."""
    worker.run(
        "from comm import create_comm\nimport sys\n"
        "a = create_comm(comm_id='a'); a.on_msg(lambda m: 1 / 0)\n"
        "b = create_comm(comm_id='b'); b.on_msg(lambda m: sys.exit(1))"
    )
    worker.send(comm_message("a", {}))
    worker.send(comm_message("b", {}))
    worker.send(comm_message("unknown", {}))
    assert worker.run("'alive'").result == "'alive'"


def test_messages_are_handled_while_a_cell_awaits(worker: WorkerDriver) -> None:
    """A button can end the waiting of a cell."""
    number = worker.start(
        "import asyncio\nfrom comm import create_comm\nclicked = asyncio.Event()\n"
        "c = create_comm(comm_id='c1')\nc.on_msg(lambda m: clicked.set())\n"
        "await clicked.wait()\n'clicked'"
    )
    worker.wait_for(messages.CommFromWorker)
    worker.send(comm_message("c1", {}))
    assert worker.finish(number).result == "'clicked'"


def test_a_request_that_waits_for_the_cell_is_not_lost(worker: WorkerDriver) -> None:
    """Commands that come while a cell awaits are worked on after it, in order."""
    number = worker.start(
        "import asyncio\nfrom comm import create_comm\ngo = asyncio.Event()\n"
        "c = create_comm(comm_id='c')\nc.on_msg(lambda m: go.set())\nawait go.wait()"
    )
    worker.wait_for(messages.CommFromWorker)
    worker.send(messages.Ping(id=5))
    worker.send(messages.IsComplete(id=6, code="1"))
    worker.send(comm_message("c", {}))
    cell = worker.finish(number)
    assert cell.finished.ok
    assert cell.requests == []
    assert worker.wait_for(messages.Pong).id == 5
    assert worker.wait_for(messages.Completeness).id == 6


def test_a_progress_bar_of_tqdm(worker: WorkerDriver) -> None:
    """tqdm.notebook draws with widgets."""
    cell = worker.run("from tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass")
    assert cell.finished.ok, cell.errors
    kinds = {m.kind for m in cell.requests if isinstance(m, messages.CommFromWorker)}
    assert "comm_open" in kinds
    assert cell.displays
