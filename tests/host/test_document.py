"""The notebook follows the driver's operations."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from rlm_kernel.driver.document import Document, check_writable
from rlm_kernel.driver.protocol import (
    CellSnapshot,
    CloseCell,
    Delta,
    Final,
    OpenCell,
    Snapshot,
    source_sha,
)
from rlm_kernel.errors import UsageError

RUN = "0123456789ab"


def opened(cell_id: str, after: str = "", kind: str = "code") -> OpenCell:
    return OpenCell(cell_id=cell_id, after=after, turn=1, run_id=RUN, kind=kind)


def ids(document: Document) -> list[str]:
    return [cell["id"] for cell in document.render()["cells"]]


def test_a_cell_stands_after_the_one_it_names_or_else_at_the_end() -> None:
    document = Document()
    document.add("code", "a", "a")
    document.add("code", "b", "b")
    document.open(opened("x", after="a"))
    document.open(opened("y", after="nowhere"))

    assert ids(document) == ["a", "x", "b", "y"]


def test_opening_a_cell_again_leaves_it_as_it_is() -> None:
    document = Document()
    document.open(opened("x"))
    document.append(Delta(cell_id="x", offset=0, text="text"))
    document.open(opened("x"))

    assert (ids(document), document.source("x")) == (["x"], "text")


def test_a_delta_that_does_not_fit_changes_nothing_and_tells_what_is_there() -> None:
    document = Document()
    document.open(opened("x"))

    assert document.append(Delta(cell_id="x", offset=0, text="äb")) is None
    assert document.append(Delta(cell_id="x", offset=5, text="!")) == 2
    assert document.append(Delta(cell_id="nowhere", offset=0, text="!")) == 0
    assert document.source("x") == "äb"


def test_what_was_streamed_is_corrected_when_the_cell_closes() -> None:
    document = Document()
    document.open(opened("x"))
    document.append(Delta(cell_id="x", offset=0, text="x = 1\n```"))
    document.close(CloseCell(cell_id="x", sha=source_sha("x = 1"), source="x = 1"))

    assert document.source("x") == "x = 1"


def test_a_cell_that_closes_empty_is_gone_and_can_come_back() -> None:
    document = Document()
    document.add("code", "a", "a")
    document.open(opened("x"))
    document.close(CloseCell(cell_id="x", sha=source_sha(""), source=""))
    assert ids(document) == ["a"]

    document.open(opened("x", after="a"))
    assert ids(document) == ["a", "x"]


def test_a_snapshot_brings_what_was_missed() -> None:
    document = Document()
    document.open(opened("x"))
    document.append(Delta(cell_id="x", offset=0, text="half"))
    told = [
        CellSnapshot(cell_id="x", after="", turn=1, source="whole", kind="code", state="closed"),
        CellSnapshot(cell_id="y", after="x", turn=2, source="more", kind="code", state="open"),
    ]
    document.restore(Snapshot(run_id=RUN, query="q", state="proposing", turn=2, cells=told))

    assert ids(document) == ["x", "y"]
    assert [document.source("x"), document.source("y")] == ["whole", "more"]


@pytest.mark.parametrize(
    "text", ["``` # %% <b>", "\ud800 lone", "{{query}}\n---\n# h", "\x00\x1b["]
)
def test_any_text_of_a_model_can_be_saved(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ipynb"
    document = Document(path)
    for cell_id, kind in (("p", "markdown"), ("c", "code")):
        document.open(opened(cell_id, kind=kind))
        document.append(Delta(cell_id=cell_id, offset=0, text=text))
    document.add_ending(Final(run_id=RUN, state="answered", response=text))
    document.save()

    nbformat.validate(nbformat.read(path, as_version=4))


def test_the_end_of_a_run_without_an_answer_says_why() -> None:
    document = Document()
    document.add_ending(Final(run_id=RUN, state="stopped", reason="the turns are used up"))

    assert "the turns are used up" in document.render()["cells"][-1]["source"]


def test_a_notebook_of_a_person_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "analysis.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), path)

    with pytest.raises(UsageError, match="not the notebook of a run"):
        check_writable(path)


def test_the_notebook_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.ipynb"
    Document(path).save()

    check_writable(path)


@pytest.mark.parametrize("name", ["nowhere/run.ipynb", "."])
def test_a_place_where_no_notebook_can_be_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        check_writable(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
