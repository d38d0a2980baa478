"""The messages of the link that are about sub-calls and their tools.

They belong to the protocol in `rlm_kernel.repl.messages`, which has them too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rlm_kernel.cells import SubcallParams
from rlm_kernel.tool_function import MAX_DESCRIPTION, MAX_SCHEMA

__all__ = [
    "MAX_PROMPTS",
    "CallTool",
    "CancelSubcalls",
    "Id",
    "JudgeSubcalls",
    "SendSubcalls",
    "SubcallFailure",
    "SubcallResult",
    "SubcallResults",
    "Tool",
    "ToolReturned",
    "Verdict",
]

MAX_PROMPTS = 100_000
"""Prompts of one `SendSubcalls`: empty ones have no size, and each costs the kernel a call."""

Id = Annotated[int, Meta(ge=0, le=2**53)]


class _Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all messages of the link."""


# --- worker to kernel -------------------------------------------------------------------------


class SendSubcalls(_Message, frozen=True, kw_only=True, tag="send_subcalls"):
    """Call a model for every prompt. Answered by `SubcallResults`, or `Failed` for all."""

    id: Id
    cell: Id
    kind: Literal["llm", "rlm"]
    prompts: Annotated[list[str], Meta(max_length=MAX_PROMPTS)]
    params: SubcallParams = SubcallParams()
    retry_of: Annotated[list[str], Meta(max_length=MAX_PROMPTS)] = []
    """For each prompt the id of the call that it asks again; empty where none does."""


class Verdict(_Message, frozen=True, kw_only=True):
    """Whether the reply of one call was a value of its typed sub-task."""

    call_id: str
    ok: bool
    reason: str = ""


class JudgeSubcalls(_Message, frozen=True, kw_only=True, tag="judge_subcalls"):
    """What the worker found when it checked replies of a typed sub-task. Not answered."""

    verdicts: Annotated[list[Verdict], Meta(max_length=MAX_PROMPTS)]


class CancelSubcalls(_Message, frozen=True, kw_only=True, tag="cancel_subcalls"):
    """Nobody waits for the rest of batch *id* any more."""

    id: Id


class Tool(_Message, frozen=True, kw_only=True):
    """A tool of a run, as its worker describes it."""

    name: Annotated[str, Meta(max_length=64)]
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)]
    parameters: Annotated[str, Meta(max_length=MAX_SCHEMA)]
    """JSON Schema of its arguments, an object, as text."""


class ToolReturned(_Message, frozen=True, kw_only=True, tag="tool_returned"):
    """Answer to `CallTool`: what the tool returned, as text, or why it failed."""

    id: Id
    text: str = ""
    error: str = ""


# --- kernel to worker -------------------------------------------------------------------------


class SubcallFailure(_Message, frozen=True, kw_only=True):
    """Why one sub-call has no result."""

    reason: str


class SubcallResult(_Message, frozen=True, kw_only=True):
    """One result of a batch."""

    index: int
    text: str = ""
    error: SubcallFailure | None = None
    call_id: str = ""
    """Names the call in record and views; empty where nothing was sent."""


class SubcallResults(_Message, frozen=True, kw_only=True, tag="subcall_results"):
    """Results for `SendSubcalls` *id*, as they come; the batch is done when every index came."""

    id: Id
    results: list[SubcallResult]


class CallTool(_Message, frozen=True, kw_only=True, tag="call_tool"):
    """A sub-call's model asks for a tool of this run. Answered by `ToolReturned`.

    It comes while the worker waits for sub-calls; tools run in the thread or task that does.
    """

    id: Id
    batch: Id
    """The `SendSubcalls` whose sub-call, or a child run of whose, wants it."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
