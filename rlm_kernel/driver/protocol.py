"""Messages of the comm ``rlm.driver``, between the kernel and what drives a notebook.

The JupyterLab extension and the headless host speak it. Everything is JSON;
these structs are the only place where its names are written, and the
TypeScript types are generated from them.

A message from the kernel is an `Update`: a sequence number and a list of
operations, at most 30 times a second. A gap in the numbers is closed with
`Need`. Text is hashed with SHA-256 of its UTF-8, as hex (`source_sha`).
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from rlm_kernel.engine.budget import Budget, Usage
from rlm_kernel.engine.events import Action, RunState

__all__ = [
    "CELL_KIND",
    "SCHEMA",
    "TARGET",
    "Accepted",
    "CellSnapshot",
    "CloseCell",
    "Conflict",
    "Decide",
    "Delta",
    "Edited",
    "Final",
    "FromFrontEnd",
    "Need",
    "Node",
    "Nodes",
    "Open",
    "OpenCell",
    "Operation",
    "Pause",
    "Refused",
    "Resume",
    "RunCell",
    "Snapshot",
    "State",
    "Stop",
    "Update",
    "source_sha",
]

TARGET = "rlm.driver"
SCHEMA = 1
"""Version of this protocol; a front end that speaks another is told so."""

CELL_KIND = Literal["code", "markdown"]


def source_sha(source: str) -> str:
    """SHA-256 of the UTF-8 of *source*, as 64 hex digits."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


# --- kernel to front end ----------------------------------------------------------------------


class _Operation(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """Base of the operations in an update."""


class OpenCell(_Operation, frozen=True, kw_only=True, tag="open"):
    """Insert a cell after cell *after* (at the end where that is not there). A cell that is
    there already is left as it is."""

    cell_id: str
    after: str
    turn: int
    run_id: str
    kind: CELL_KIND = "code"


class Delta(_Operation, frozen=True, kw_only=True, tag="delta"):
    """Append to a cell. Where *offset* is not the length of what the model wrote there, the
    front end answers `Conflict`; a person's text is never overwritten."""

    cell_id: str
    offset: int
    text: str


class CloseCell(_Operation, frozen=True, kw_only=True, tag="close"):
    """The cell is written; its whole source has this hash. An empty *source* removes the cell."""

    cell_id: str
    sha: str
    source: str


class RunCell(_Operation, frozen=True, kw_only=True, tag="run"):
    """Run the cell now: the proposal was accepted."""

    cell_id: str
    sha: str


class State(_Operation, frozen=True, kw_only=True, tag="state"):
    """Where a run is."""

    run_id: str
    state: RunState
    turn: int
    cell_id: str = ""
    reason: str = ""
    awaiting: bool = False
    """True where the run waits for a person's decision about *cell_id*."""

    usage: Usage = Usage()
    subcalls_done: int = 0
    subcalls_running: int = 0
    subcalls_failed: int = 0
    budget: Budget | None = None
    root: str = ""
    sub: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One sub-call or child run of the tree. No texts: those are asked for when selected."""

    id: str
    parent: str
    """Id of the run whose cell made it."""

    turn: int
    kind: Literal["llm", "rlm"]
    state: Literal["running", "done", "failed"]
    start: float
    end: float = 0.0
    tokens: int = 0
    batch: str = ""


class Nodes(_Operation, frozen=True, kw_only=True, tag="nodes"):
    """Nodes that are new or changed."""

    nodes: list[Node]


class Final(_Operation, frozen=True, kw_only=True, tag="final"):
    """The run is over."""

    run_id: str
    state: Literal["answered", "stopped", "failed"]
    response: str = ""
    reason: str = ""
    usage: Usage = Usage()
    record: str = ""
    """Path of the record, relative to the notebook where it lies beside it."""


class CellSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of a run, for a front end that comes late."""

    cell_id: str
    after: str
    turn: int
    source: str
    kind: CELL_KIND
    state: Literal["open", "closed", "running", "done"]


class Snapshot(_Operation, frozen=True, kw_only=True, tag="snapshot"):
    """All of a run so far. Answers `Open` and `Need` where the gap is too wide to repeat."""

    run_id: str
    query: str
    state: RunState
    turn: int
    cells: list[CellSnapshot]


class Refused(_Operation, frozen=True, kw_only=True, tag="refused"):
    """What the front end asked for is not possible."""

    reason: str


Operation = OpenCell | Delta | CloseCell | RunCell | State | Nodes | Final | Snapshot | Refused


class Update(msgspec.Struct, frozen=True):
    """What the kernel sends."""

    seq: int
    """Grows by 1 with every update on this comm."""

    ops: list[Operation]


# --- front end to kernel ----------------------------------------------------------------------


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """Base of the messages from a front end."""


class Open(_Request, frozen=True, kw_only=True, tag="open"):
    """First message, also as data of the comm_open. One client with *can_drive* is elected."""

    client: str
    can_drive: bool
    schema: int = SCHEMA


class Decide(_Request, frozen=True, kw_only=True, tag="decide"):
    """A person's decision about the proposal of *turn*."""

    turn: int
    action: Action
    source: str | None = None
    note: str = ""


class Accepted(_Request, frozen=True, kw_only=True, tag="accepted"):
    """The front end is about to execute this cell."""

    cell_id: str
    source: str
    sha: str


class Edited(_Request, frozen=True, kw_only=True, tag="edited"):
    """A person changed the cell; the model's text is not appended to it any more."""

    cell_id: str
    source: str


class Conflict(_Request, frozen=True, kw_only=True, tag="conflict"):
    """A `Delta` did not fit: the cell holds *have* characters."""

    cell_id: str
    have: int


class Pause(_Request, frozen=True, kw_only=True, tag="pause"):
    """Stop at the next pause point."""


class Resume(_Request, frozen=True, kw_only=True, tag="resume"):
    """Go on by itself."""


class Stop(_Request, frozen=True, kw_only=True, tag="stop"):
    """End the run."""


class Need(_Request, frozen=True, kw_only=True, tag="need"):
    """Repeat the updates from this number on."""

    from_seq: int


FromFrontEnd = Open | Decide | Accepted | Edited | Conflict | Pause | Resume | Stop | Need
