"""What docs/sub-calls.md shows can be run as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver

TEXT = (Path(__file__).parents[2] / "docs" / "sub-calls.md").read_text()

EXAMPLES = re.findall(r"^```(?:python)?\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def fitting(params: SubcallParams) -> str:
    """A reply in the form that is asked for."""
    if params.choices is not None:
        return params.choices[0]
    if params.schema is None:
        return "some text"
    kind = json.loads(params.schema)["type"]
    return {"integer": "3", "array": '["Paris"]', "object": '{"year": 1815, "place": "x"}'}[kind]


def answer(message: messages.FromWorker) -> messages.ToWorker | None:
    if not isinstance(message, messages.SendSubcalls):
        return None
    text = fitting(message.params)
    results = [
        messages.SubcallResult(index=index, text=text) for index in range(len(message.prompts))
    ]
    return messages.SubcallResults(id=message.id, results=results)


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        driver.load(b"the prompt")
        driver.run(
            "parts = mails = prompts = ['one', 'two']\n"
            "rows = [{'title': 't', 'text': part} for part in parts]"
        )
        yield driver


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_runs(worker: WorkerDriver, code: str) -> None:
    """And asks a model, or looks at what came of that."""
    cell = worker.run(code, answer=answer)
    assert cell.errors == []
    assert cell.err == ""
    assert cell.requests or "last" in code


def test_there_are_examples() -> None:
    """Of each form."""
    shown = "\n".join(EXAMPLES)
    for form in ("aio", ".map(", "--map", "choices=", "schema=", "check=", "@subtask", ".last"):
        assert form in shown
