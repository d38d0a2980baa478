"""What a cell is made of: the vocabulary that all rooms share.

Nothing here does anything. These structs cross the link from the untrusted
worker as msgpack and are decoded into exactly these types, or refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "AnswerSet",
    "CellResult",
    "Clear",
    "Display",
    "ErrorOutput",
    "Output",
    "PromptInfo",
    "Result",
    "Stream",
    "SubcallParams",
    "Value",
    "Variable",
]


class Stream(msgspec.Struct, frozen=True, array_like=True, tag="stream"):
    """Text that a cell wrote to one of its standard streams."""

    name: Literal["stdout", "stderr"]
    text: str


class Display(msgspec.Struct, frozen=True, array_like=True, tag="display"):
    """A rich display, or with ``update`` a change of an earlier one."""

    data: dict[str, Any]
    """MIME bundle; binary types are base64 text, as in a notebook file."""

    metadata: dict[str, Any] = {}
    display_id: str | None = None
    update: bool = False


class Result(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """The value of a trailing expression (``Out[n]``)."""

    execution_count: int
    data: dict[str, Any]
    metadata: dict[str, Any] = {}


class ErrorOutput(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """The exception that ended a cell."""

    ename: str
    evalue: str
    traceback: list[str]
    """Lines, with ANSI colours."""


class Clear(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """The cell asked that its output be cleared."""

    wait: bool = False


Output = Stream | Display | Result | ErrorOutput | Clear


class Variable(msgspec.Struct, frozen=True):
    """A variable of the REPL that a cell made, changed or deleted."""

    name: str
    type: str
    """Name of its class, such as ``list``."""

    size: int | None = None
    """``len()`` where the type has one."""

    change: Literal["new", "changed", "deleted", "same"] = "new"


class Value(msgspec.Struct, frozen=True):
    """A Python value that crossed the link, without pickle."""

    type: str
    text: str
    """``str()`` of the value, whole."""

    data: Any = None
    """The value where ``exact``; see `rlm_kernel.values` for how containers travel."""

    exact: bool = True
    """False where only ``text`` could be carried: an object of a class of the user's."""


class AnswerSet(msgspec.Struct, frozen=True):
    """A cell asked to end the run with this answer."""

    how: Literal["Final", "FINAL", "FINAL_VAR", "SUBMIT", "answer"]
    value: Value


class PromptInfo(msgspec.Struct, frozen=True):
    """What can be told of the prompt ``P`` without showing it."""

    kind: Literal["str", "list", "dict"]
    chars: int
    """Characters in all."""

    items: int
    """1 for a ``str``, else the number of items."""

    sha256: str
    """Of the UTF-8 of the text, or of the JSON of a list or dict."""

    preview: str
    """The first characters."""

    source: str = ""
    """Where it came from, such as a file name."""


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the execution of one cell went."""

    ok: bool
    execution_count: int
    outputs: list[Output] = []
    """In order, adjacent stream texts joined; bounded, see ``dropped_chars``."""

    dropped_chars: int = 0
    """Characters of output beyond what is shown and kept of one cell."""

    error: ErrorOutput | None = None
    variables: list[Variable] = []
    """Only those that changed."""

    restored: list[str] = []
    """Names of the REPL that the cell had rebound, and that were put back."""

    answer: AnswerSet | None = None
    seconds: float = 0.0
    waited_s: float = 0.0
    """Of ``seconds``, those spent waiting for sub-calls and for input."""

    worker_lost: str = ""
    """Why the worker ended during the cell; empty where it lives."""


class SubcallParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a sub-call is to be sampled. ``None`` leaves it to the server."""

    model: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    seed: int | None = None
    system: str | None = None
    timeout: float | None = None
    """Seconds, from being sent to the whole reply."""

    query: str | None = None
    """What a child run (kind ``rlm``) is asked about its prompt."""

    task: str | None = None
    """Name of the typed sub-task that the call belongs to."""

    choices: list[str] | None = None
    """The reply is to be one of these, word for word."""

    schema: str | None = None
    """The reply is to be JSON that this JSON Schema (its text) allows."""
