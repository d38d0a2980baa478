"""The host keeps to the driver protocol, whatever the kernel does with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlm_kernel.driver.document import Document
from rlm_kernel.driver.host import Host
from rlm_kernel.driver.request import Outcome, RunRequest
from rlm_kernel.errors import RLMError
from tests.host.test_host import Reacts

pytestmark = pytest.mark.usefixtures("no_orphans")

KERNEL = str(Path(__file__).with_name("scripted_kernel.py"))


async def ran(scenario: str, timeout: float = 60.0) -> tuple[Outcome, Document, list[str]]:
    """How a run with the scripted kernel went; what the listener was told."""
    document = Document()
    listener = Reacts(0, "never", lambda: None)
    host = Host(
        RunRequest(prompt="none.txt", query="q", options={}),
        document,
        listener=listener,
        kernel_argv=[sys.executable, KERNEL, scenario, "-f", "{connection_file}"],
        environ={"PYTHONPATH": str(Path(KERNEL).parents[2])},
        answer_timeout=timeout,
    )
    return await host.run(), document, listener.notes


def turns(document: Document) -> list[tuple[str, list[str]]]:
    """Source and texts of the cells between the opening ones and the ending."""
    cells = document.render()["cells"][3:-1]
    return [(cell["source"], [o["text"] for o in cell["outputs"]]) for cell in cells]


@pytest.mark.parametrize("scenario", ["gap", "gap_snapshot", "double"])
async def test_no_update_is_lost_or_taken_twice(scenario: str) -> None:
    outcome, document, _ = await ran(scenario)

    assert turns(document) == [("print('it', 'ran')", ["it ran\n"])]
    assert outcome.final is not None
    assert outcome.final.response == "done"


async def test_a_delta_that_does_not_fit_is_a_conflict() -> None:
    outcome, document, _ = await ran("misfit")

    assert outcome.final is not None
    assert outcome.final.response == "conflict at 0"
    assert turns(document) == [("", [])]


async def test_a_cell_with_another_text_than_announced_is_not_run() -> None:
    outcome, document, _ = await ran("stale")

    assert outcome.final is not None
    assert outcome.final.response == f"conflict at {len(turns(document)[0][0])}"
    assert turns(document)[0][1] == []


async def test_the_end_of_a_child_run_is_not_the_end() -> None:
    outcome, _, _ = await ran("child")

    assert outcome.final is not None
    assert outcome.final.state == "answered"


async def test_a_refusal_is_passed_on() -> None:
    _, _, notes = await ran("refused")

    assert notes == ["not like this"]


async def test_an_update_of_another_version_ends_the_run_in_one_sentence() -> None:
    with pytest.raises(RLMError, match="does not understand"):
        await ran("garbage")


async def test_a_run_that_never_begins_is_given_up() -> None:
    with pytest.raises(RLMError, match="said nothing of the run within 5 seconds"):
        await ran("silent", timeout=5)  # what it does answer takes its time on a busy machine


async def test_a_kernel_that_does_not_answer_the_comm_is_given_up() -> None:
    with pytest.raises(RLMError, match="did not answer on the comm"):
        await ran("mute", timeout=1)
