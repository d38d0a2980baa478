"""The notebook that the headless host writes: operations of the driver applied to nbformat.

Nothing here talks to a kernel. Cells are found by id; a cell that the kernel
opens stands after the cell that it names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import rlm_kernel
from rlm_kernel.driver.outputs import CellOutputs, Displays
from rlm_kernel.driver.protocol import (
    CELL_KIND,
    CellSnapshot,
    CloseCell,
    Delta,
    Final,
    OpenCell,
    Snapshot,
    source_sha,
)
from rlm_kernel.errors import RecordError, UsageError
from rlm_kernel.record import Record, record_path_for
from rlm_kernel.record import notebook as notebook_file
from rlm_kernel.record.notebook import KEY, CellMeta, NotebookMeta, write_notebook

__all__ = ["Document", "check_writable"]

_WRITTEN = ("playbook", "human")
"""Specs of roots whose cells a person wrote."""


class Document:
    """A notebook in memory, and its file where it has one.

    Parameters
    ----------
    path
        Where to save; ``None`` keeps the notebook in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.meta = NotebookMeta(version=rlm_kernel.__version__)
        self.notebook: Any = new_notebook()  # type: ignore[no-untyped-call]
        self.notebook.metadata["kernelspec"] = {
            "name": "rlm",
            "display_name": "RLM (Python)",
            "language": "python",
        }
        self._cells: dict[str, Any] = {}
        self._outputs: dict[str, CellOutputs] = {}
        self._displays = Displays()

    def set_language(self, language_info: dict[str, Any]) -> None:
        """Keep the kernel's *language_info*, as front ends do."""
        self.notebook.metadata["language_info"] = language_info

    # --- cells --------------------------------------------------------------------------------

    def add(self, kind: str, source: str, cell_id: str) -> str:
        """Append a cell that is no part of a run; returns its id."""
        self._insert(cell_id, kind, after="")["source"] = source
        return cell_id

    def source(self, cell_id: str) -> str | None:
        """Text of a cell; ``None`` where there is no such cell."""
        cell = self._cells.get(cell_id)
        return None if cell is None else str(cell["source"])

    def open(self, op: OpenCell) -> None:
        """Insert the cell that a turn writes, unless it is there."""
        if op.cell_id not in self._cells:
            self._insert(op.cell_id, op.kind, op.after)
            meta = CellMeta(run_id=op.run_id, turn=op.turn, kind=_role(op.kind), state="open")
            self._cells[op.cell_id]["metadata"][KEY] = meta.to_dict()

    def append(self, op: Delta) -> int | None:
        """Append the model's text. Where it does not fit: the length of what is there."""
        have = len(self.source(op.cell_id) or "")
        if op.cell_id not in self._cells or op.offset != have:
            return have
        self._cells[op.cell_id]["source"] += op.text
        return None

    def close(self, op: CloseCell) -> None:
        """The cell is written: make its text what the kernel says, or remove it."""
        cell = self._cells.get(op.cell_id)
        if cell is None:
            return
        if not op.source:
            self.notebook.cells.remove(cell)
            del self._cells[op.cell_id]
            return
        if source_sha(cell["source"]) != op.sha:
            cell["source"] = op.source
        prose = cell["cell_type"] == "markdown"
        self._describe(
            op.cell_id,
            sha=op.sha,
            state="done" if prose else "proposed",
            sampled=not self.meta.root.startswith(_WRITTEN),
        )

    def restore(self, op: Snapshot) -> None:
        """Make the cells of the run what the kernel says, at its start or after a loss."""
        self.note(prompt=op.prompt, dialect=op.dialect)
        for told in op.cells:
            self._restore_cell(op.run_id, told)

    def _restore_cell(self, run_id: str, told: CellSnapshot) -> None:
        self.open(
            OpenCell(
                cell_id=told.cell_id,
                after=told.after,
                turn=told.turn,
                run_id=run_id,
                kind=told.kind,
            )
        )
        self._cells[told.cell_id]["source"] = told.source

    def add_ending(self, final: Final) -> None:
        """Append what the run came to as a last markdown cell."""
        text = f"**Answer:** {final.response}" if final.state == "answered" else _ending(final)
        cell_id = self.add("markdown", text, f"{final.run_id}-end")
        meta = CellMeta(
            run_id=final.run_id,
            turn=self.meta.turns,
            kind="answer",
            state="done" if final.state == "answered" else "failed",
            sha=source_sha(text),
            sampled=False,
        )
        self._cells[cell_id]["metadata"][KEY] = meta.to_dict()

    # --- outputs ------------------------------------------------------------------------------

    def start_outputs(self, cell_id: str) -> CellOutputs:
        """The cell runs: forget its outputs and collect new ones."""
        outputs = self._outputs[cell_id] = CellOutputs(self._displays)
        return outputs

    def describe_execution(self, cell_id: str, *, ok: bool, seconds: float) -> None:
        """Note how the execution of a run's cell went."""
        self._describe(cell_id, state="done" if ok else "failed", seconds=round(seconds, 3))

    # --- the file -----------------------------------------------------------------------------

    def render(self) -> Any:
        """The notebook with the outputs so far."""
        for cell_id, outputs in self._outputs.items():
            cell = self._cells.get(cell_id)
            if cell is not None:
                cell["outputs"] = outputs.nodes()
                cell["execution_count"] = outputs.execution_count
        self.notebook.metadata[KEY] = self.meta.to_dict()
        return self.notebook

    def save(self) -> None:
        """Write the file, atomically. Without a path nothing happens.

        Raises
        ------
        RecordError
            The file cannot be written; what it held before is still there.
        """
        notebook = self.render()
        if self.path is not None:
            write_notebook(notebook, self.path)

    def note(self, **fields: Any) -> None:
        """Set *fields* of the notebook's metadata."""
        self.meta = msgspec.structs.replace(self.meta, **fields)

    def _describe(self, cell_id: str, **fields: Any) -> None:
        """Change what a cell of the run says of itself."""
        metadata = self._cells[cell_id]["metadata"]
        if KEY in metadata:
            meta = msgspec.structs.replace(CellMeta.from_dict(metadata[KEY]), **fields)
            metadata[KEY] = meta.to_dict()

    def _insert(self, cell_id: str, kind: str, after: str) -> Any:
        new: Any = new_markdown_cell if kind == "markdown" else new_code_cell
        cell = new("", id=cell_id)
        cells = self.notebook.cells
        previous = self._cells.get(after)
        cells.insert(cells.index(previous) + 1 if previous is not None else len(cells), cell)
        self._cells[cell_id] = cell
        return cell


def _role(kind: CELL_KIND) -> Literal["prose", "cell"]:
    return "prose" if kind == "markdown" else "cell"


def _ending(final: Final) -> str:
    said = "Stopped without an answer" if final.state == "stopped" else "Failed"
    return f"**{said}:** {final.reason}" if final.reason else f"**{said}.**"


def check_writable(path: Path) -> None:
    """Make sure that a notebook can be written at *path*, before anything is spent on a run.

    Raises
    ------
    UsageError
        The folder is missing or not writable, the file is one that must not be replaced, or the
        record beside it cannot be written, such as while another run writes it.
    """
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; make that folder or choose another --out")
    try:
        notebook_file.check_writable(path)
    except RecordError as error:
        raise UsageError(str(error)) from error
    if path.exists() and not _is_ours(path):
        raise UsageError(
            f"{path} exists and is not the notebook of a run; move it away or choose another --out"
        )
    _check_record(record_path_for(path))


def _check_record(path: Path) -> None:
    """Refuse a record that the run could not add to; one that is not there yet stays so."""
    if not os.path.lexists(path):
        return
    try:
        Record.open(path).close()
    except RecordError as error:
        raise UsageError(str(error)) from error


def _is_ours(path: Path) -> bool:
    """Whether *path* is the notebook of an earlier run, which a new run may replace."""
    try:
        return KEY in nbformat.read(path, as_version=4).metadata  # type: ignore[no-untyped-call]
    except (OSError, ValueError, nbformat.ValidationError):
        return False
