"""Messages of the comm ``rlm.driver``, between the kernel and what drives a notebook.

The JupyterLab extension and the headless host speak it. Everything is JSON;
these structs are the only place where its names are written, and the
TypeScript types are generated from them.

A message from the kernel is an `Update`: a sequence number and a list of
operations, at most 30 times a second. A gap in the numbers is closed with
`Need`; an update that holds a `Snapshot` closes any gap before it. Text is
hashed with SHA-256 of its UTF-8, as hex (`source_sha`); offsets and lengths
count Unicode code points.

Who writes. Of the clients that can drive, one is elected: the first, and
after it has closed its comm or fallen silent, the next. Cells are told to it
alone (`OpenCell`, `Delta`, `CloseCell`, `RunCell` and the cells of a
`Snapshot`); states, nodes and ends go to every client, and each may decide.
A client that opens again under its old name takes its own place.

The life of a cell. `OpenCell`, then `Delta`s that append to it, then
`CloseCell` with the whole source: what was streamed is a guess at where prose
ends and code begins, and the source at the close is right. A proposal that is
regenerated or skipped is taken back by a `CloseCell` with an empty source,
and the next attempt opens the same id again, with deltas from 0. Where a
person has changed the cell, that cell stays theirs and the next attempt gets
a new id. `RunCell` asks for the cell to be executed: the front end answers
`Accepted` at once and sends the execute request. Where the cell's text has
another hash it answers `Conflict` (or `Edited` where a person changed it) and
executes nothing. `RunCell` may name a cell that ran while no front end was
there: executing it shows the outputs that it had, and runs nothing again.
Executing the cell that waits for a decision is a decision, whatever its text.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from rlm_kernel.cells import PromptInfo
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
    front end answers `Conflict`; a person's text is never overwritten. After a conflict the
    kernel sends once more what follows the front end's *have* characters."""

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
    run_id: str = ""
    """Id of the child run that it started; `parent` of the nodes below it."""

    note: str = ""
    """Why it is another call than was asked for, such as a plain one at the depth limit."""

    task: str = ""
    """Name of its typed sub-task, at most 80 characters of it."""

    verdict: Literal["", "ok", "unfit"] = ""
    """Whether its reply was a value of the task, once that is known."""

    cached: bool = False
    """Whether it was given a recorded reply."""

    attempts: int = 1
    """Requests that were sent for it."""


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
    """All of a run so far: sent at its start, after `Open`, and after `Need` where the gap is
    too wide to repeat. Cells that are missing are inserted; one that is there and that no
    person changed gets the source told here. `Open` is answered with an update without
    operations where there is no run to tell of."""

    run_id: str
    query: str
    state: RunState
    turn: int
    cells: list[CellSnapshot]
    """In the order of the notebook; empty for a client that does not drive."""

    prompt: PromptInfo | None = None
    dialect: str = ""

    driving: bool = True
    """False where another client drives this run, or none: it is shown in the output of the
    cell that started it."""


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
    """Name of this page or host, unlike any other's and the same after a reload."""

    can_drive: bool
    schema: int = SCHEMA


class Decide(_Request, frozen=True, kw_only=True, tag="decide"):
    """A person's decision about the proposal of *turn*."""

    turn: int
    action: Action
    source: str | None = None
    note: str = ""


class Accepted(_Request, frozen=True, kw_only=True, tag="accepted"):
    """The front end is about to execute this cell. An execute request that carries no cell id
    is known by this source."""

    cell_id: str
    source: str
    sha: str


class Edited(_Request, frozen=True, kw_only=True, tag="edited"):
    """A person changed the cell; the model's text is not appended to it any more. While the
    cell is being written, the run waits at its pause point for the person to execute it."""

    cell_id: str
    source: str


class Conflict(_Request, frozen=True, kw_only=True, tag="conflict"):
    """A `Delta` or `RunCell` did not fit: the cell holds *have* characters."""

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
