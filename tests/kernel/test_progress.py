"""Progress of a batch as a front end sees it, of a real kernel and a real server."""

from __future__ import annotations

from rlm_kernel.driver.outputs import CellOutputs, Displays
from rlm_kernel.driver.progress_bar import is_bar, tally_in
from tests.kernel.client import Cell, Kernel, Message
from tests.kernel.held import Held

BATCH = "r = sub_RLM([f'prompt {n}' for n in range(12)])"


def bars(messages: list[Message]) -> list[Message]:
    shown = [m for m in messages if m["msg_type"] in ("display_data", "update_display_data")]
    return [m for m in shown if is_bar(m["content"]["metadata"])]


def nodes(cell: Cell) -> list[dict[str, object]]:
    """What a page would save of *cell*."""
    outputs = CellOutputs(Displays())
    for message in cell.messages:
        outputs.message(message["msg_type"], message["content"])
    return outputs.nodes()


def run_with_bar(kernel: Kernel, held: Held, code: str) -> tuple[Message, Cell]:
    """Run *code*, whose sub-calls are answered once their bar is shown; the bar and the rest."""
    request = kernel.send(code, cell_id="a-cell")
    while not bars([first := kernel.until(request, "display_data")]):
        pass
    held.release()
    return first, kernel.collect(request)


def test_a_bar_belongs_to_its_cell_and_is_gone_when_that_is_over(
    sub_kernel: Kernel, held: Held
) -> None:
    first, cell = run_with_bar(sub_kernel, held, f"{BATCH}\nlen(r)")

    tally = tally_in(first["content"]["metadata"])
    assert tally is not None
    assert tally.calls == 12
    assert {"text/html", "text/plain"} == set(first["content"]["data"])
    assert cell.status == "ok"
    assert [node["output_type"] for node in nodes(cell)] == ["execute_result"]
    kinds = [m["msg_type"] for m in cell.messages]
    assert kinds.index("clear_output") < kinds.index("execute_result")
    ids = {m["content"]["transient"]["display_id"] for m in [first, *bars(cell.messages)]}
    assert len(ids) == 1


def test_a_bar_leaves_what_the_cell_shows(sub_kernel: Kernel, held: Held) -> None:
    code = f"print('before', flush=True)\n{BATCH}\nprint('after')"
    _, cell = run_with_bar(sub_kernel, held, code)

    assert "clear_output" not in [m["msg_type"] for m in cell.messages]
    last = bars(cell.messages)[-1]["content"]
    assert last["data"] == {"text/html": "", "text/plain": ""}


def test_a_front_end_that_sends_no_cell_ids_gets_no_bar(sub_kernel: Kernel, held: Held) -> None:
    """A console prints an update below what it updates; nbclient keeps what it is sent."""
    held.latency_s = 1.5
    held.release()
    cell = sub_kernel.run(f"{BATCH}\nlen(r)")

    assert cell.result == "12"
    assert bars(cell.messages) == []
    assert [node["output_type"] for node in nodes(cell)] == ["execute_result"]


def test_a_thread_of_a_cell_that_is_over_shows_no_bar(sub_kernel: Kernel, held: Held) -> None:
    code = f"import threading\nt = threading.Thread(target=lambda: exec({BATCH!r}))\nt.start()"
    request = sub_kernel.send(code, cell_id="a-cell")
    first = sub_kernel.collect(request)
    held.until(lambda: held.server.active > 0)
    waits = sub_kernel.send("import time; time.sleep(1)", cell_id="another")
    second = sub_kernel.collect(waits)
    held.release()
    last = sub_kernel.run("t.join()", cell_id="a-third")

    assert [bars(cell.messages) for cell in (first, second, last)] == [[], [], []]
