"""Every fact of a run, as an event.

Events are defined here once. The record stores them, the driver and the
views are told of them, the types of the TypeScript side are generated from
them. An event is written to the record *before* anybody is shown what it
says; start and end of a call are separate events, so that what was under way
at a crash is known.

Times are seconds since the epoch and stand in the envelope, `Stored`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rlm_kernel.cells import CellResult, PromptInfo, SubcallParams, Value
from rlm_kernel.engine.budget import Budget, Usage

__all__ = [
    "Action",
    "AnswerRejected",
    "Compacted",
    "Event",
    "ReplyStreamed",
    "ReplyWithoutCode",
    "RunEnded",
    "RunPaused",
    "RunResumed",
    "RunStarted",
    "RunState",
    "Stored",
    "SubcallEnded",
    "SubcallJudged",
    "SubcallStarted",
    "ToolCalled",
    "TurnDecided",
    "TurnExecuted",
    "TurnExecuting",
    "TurnObserved",
    "TurnProposed",
    "TurnStarted",
    "WorkerLost",
]

RunState = Literal[
    "idle", "proposing", "proposed", "executing", "observing", "answered", "stopped", "failed"
]
"""States of a run; the last three are its ends."""

Action = Literal["run", "edit", "regenerate", "skip", "stop"]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of all events. The tag is the name of the class."""


class RunStarted(_Event, frozen=True, kw_only=True, tag=True):
    """A run began: one root working on one query."""

    query: str
    prompt: PromptInfo
    dialect: str
    root: str
    """Spec of the root, without its key."""

    sub: str
    """Spec of the model of its sub-calls, without its key."""

    budget: Budget
    depth: int = 0
    parent_run_id: str = ""
    parent_call_id: str = ""
    """The sub-call that this run answers; empty for the first run of a tree."""

    system_prompt: str = ""
    first_message: str = ""
    """What the root was told first: the query and the metadata of P."""

    version: str = ""
    """Of rlm-kernel."""


class TurnStarted(_Event, frozen=True, kw_only=True, tag=True):
    """The root was asked for its next cell."""

    turn: int
    """From 1."""

    attempt: int = 1
    """Counts proposals of the same turn: regenerated ones and those asked again."""


class ReplyStreamed(_Event, frozen=True, kw_only=True, tag=True):
    """Text of the root's reply came in. Sent at most 30 times a second, joined."""

    turn: int
    offset: int
    """Characters of the reply before this text."""

    text: str
    attempt: int = 1


class TurnProposed(_Event, frozen=True, kw_only=True, tag=True):
    """The root proposed a cell."""

    turn: int
    reply: str
    """All that the root said, whole."""

    prose: str
    """The part of the reply before the cell."""

    source: str
    usage: Usage
    attempt: int = 1
    finish: str = ""
    """Why the reply ended: ``fence`` (stopped at the cell's end), ``stop``, ``length`` …"""

    sampled: bool = True
    """False where a person or a playbook wrote it."""


class ReplyWithoutCode(_Event, frozen=True, kw_only=True, tag=True):
    """The reply held no cell; the root is asked again, or the run stops."""

    turn: int
    reply: str
    usage: Usage
    attempt: int = 1


class TurnDecided(_Event, frozen=True, kw_only=True, tag=True):
    """What a person or a policy decided about a proposal."""

    turn: int
    action: Action
    by: str
    """``policy``, or the name of the client where a person decided."""

    source: str | None = None
    """The new source of an ``edit``."""

    note: str = ""
    """For the root, with ``regenerate`` and ``skip``."""


class TurnExecuting(_Event, frozen=True, kw_only=True, tag=True):
    """A cell was handed to the REPL."""

    turn: int
    source: str
    cell_id: str = ""


class TurnExecuted(_Event, frozen=True, kw_only=True, tag=True):
    """A cell ended; ``result`` holds its whole output, up to the output limit."""

    turn: int
    result: CellResult
    cell_id: str = ""


class TurnObserved(_Event, frozen=True, kw_only=True, tag=True):
    """What the root is shown of the turn."""

    turn: int
    observation: str


class AnswerRejected(_Event, frozen=True, kw_only=True, tag=True):
    """A cell set an answer that does not count; the root is told why."""

    turn: int
    reason: str


class Compacted(_Event, frozen=True, kw_only=True, tag=True):
    """Messages near the root's context window were replaced by a summary."""

    turn: int
    dropped: int
    """Messages replaced."""

    summary: str


class RunPaused(_Event, frozen=True, kw_only=True, tag=True):
    """The run waits at its pause point for a decision."""

    turn: int
    reason: str = ""


class RunResumed(_Event, frozen=True, kw_only=True, tag=True):
    """The run goes on by itself."""

    turn: int


class WorkerLost(_Event, frozen=True, kw_only=True, tag=True):
    """The REPL's worker ended; a new one took its place."""

    reason: str
    lost: list[str]
    """Names of the variables that went with it."""


class RunEnded(_Event, frozen=True, kw_only=True, tag=True):
    """The run is over."""

    state: Literal["answered", "stopped", "failed"]
    reason: str = ""
    answer: Value | None = None
    response: str = ""
    """The answer as text."""

    usage: Usage = Usage()
    """Of the root and of all sub-calls below."""

    subcalls: int = 0
    turns: int = 0


class SubcallStarted(_Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A call of a model from code in the REPL was sent, or a child run was started."""

    call_id: str
    kind: Literal["llm", "rlm"]
    prompt: str
    model: str
    turn: int = 0
    """0 where a person's cell made the call outside any run."""

    batch_id: str = ""
    """Shared by the calls of one batch."""

    index: int = 0
    """Place in the batch."""

    params: SubcallParams = SubcallParams()
    note: str = ""
    """Why the call is another than was asked for, such as a plain one at the depth limit."""

    retry_of: str = ""
    """The call whose reply was no value of its typed sub-task, and that this one asks again."""

    queued_s: float = 0.0
    """Seconds from being asked for to its start."""

    key: str = ""
    """Equal for calls that ask the same: a hash of endpoint, model, parameters and prompt. Empty
    where the reply is not to be served again."""


class SubcallEnded(_Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A sub-call ended, once, in whatever way."""

    call_id: str
    ok: bool
    response: str = ""
    error: str = ""
    usage: Usage = Usage()
    attempts: int = 1
    """Requests that were sent for it: more than 1 where it was retried."""

    finish: str = ""
    child_run_id: str = ""
    cached: bool = False
    """The reply of an earlier call with the same prompt and parameters; it cost nothing."""

    server: str = ""
    """URL of the server that replied; empty where there is none, or only one."""

    first_token_s: float | None = None
    """Seconds from being sent to the first text, where the reply was streamed."""

    trouble: list[str] = []
    """Why attempts failed before the last one, in order."""


class SubcallJudged(_Event, frozen=True, kw_only=True, tag=True):
    """The REPL checked the reply of a call of a typed sub-task."""

    call_id: str
    task: str
    ok: bool
    reason: str = ""
    """Why the reply is no value of the task."""


class ToolCalled(_Event, frozen=True, kw_only=True, tag=True):
    """A sub-call's model used a tool."""

    call_id: str
    """Of the sub-call."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""

    text: str = ""
    """What the tool returned, as the model was shown it."""

    error: str = ""
    seconds: float = 0.0


Event = (
    RunStarted
    | TurnStarted
    | ReplyStreamed
    | TurnProposed
    | ReplyWithoutCode
    | TurnDecided
    | TurnExecuting
    | TurnExecuted
    | TurnObserved
    | AnswerRejected
    | Compacted
    | RunPaused
    | RunResumed
    | WorkerLost
    | RunEnded
    | SubcallStarted
    | SubcallEnded
    | SubcallJudged
    | ToolCalled
)


class Stored(msgspec.Struct, frozen=True):
    """An event with its place in the record."""

    seq: int
    """Grows by 1 with every event of a record."""

    run_id: str
    at: float
    """Seconds since the epoch."""

    event: Event
