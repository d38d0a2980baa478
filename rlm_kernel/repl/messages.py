"""The protocol of the link between kernel and worker.

A frame is a little-endian u32 length and that many bytes of msgpack: one of
the structs below as an array with its tag first, of a bounded number of values
(`rlm_kernel.repl.frames`). The kernel decodes what
comes from the worker into exactly these types; anything else is a violation
and ends the worker. There is no pickle in either direction.

File descriptors ride beside `LoadPrompt` (SCM_RIGHTS): the prompt comes as a
memfd, never through a frame.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rlm_kernel.budget_view import BudgetView
from rlm_kernel.cells import (
    AnswerSet,
    ErrorOutput,
    Output,
    PromptInfo,
    Variable,
)
from rlm_kernel.repl.subcall_messages import (
    MAX_PROMPTS,
    CallTool,
    CancelSubcalls,
    Id,
    JudgeSubcalls,
    SendSubcalls,
    SubcallFailure,
    SubcallResult,
    SubcallResults,
    Tool,
    ToolReturned,
    Verdict,
)
from rlm_kernel.tool_function import MAX_TOOLS

__all__ = [
    "MAX_FRAME",
    "MAX_PROMPTS",
    "Begin",
    "BudgetLeft",
    "CallTool",
    "CancelSubcalls",
    "CommFromWorker",
    "CommToWorker",
    "Complete",
    "Completeness",
    "Completions",
    "Done",
    "Emit",
    "Execute",
    "Failed",
    "FromWorker",
    "GetBudget",
    "GetInput",
    "Hello",
    "InputReply",
    "Inspect",
    "Inspection",
    "IsComplete",
    "JudgeSubcalls",
    "LoadPrompt",
    "Loaded",
    "Ping",
    "Pong",
    "PromptChunk",
    "ReadPrompt",
    "Ready",
    "RunCommand",
    "RunReply",
    "SendSubcalls",
    "SetPrompt",
    "StartRun",
    "SubcallFailure",
    "SubcallResult",
    "SubcallResults",
    "ToWorker",
    "Tool",
    "ToolReturned",
    "VariableList",
    "Variables",
    "Verdict",
]

MAX_FRAME = 64 << 20
"""Bytes. A longer frame is a violation; output is sent in pieces of at most 1 MiB."""


class _Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all messages of the link."""


# --- kernel to worker -------------------------------------------------------------------------


class Execute(_Message, frozen=True, kw_only=True, tag="execute"):
    """Run a cell. Answered by `Done`, after any number of `Emit`."""

    id: Id
    code: str
    silent: bool = False
    store_history: bool = True
    allow_stdin: bool = False
    user_expressions: dict[str, str] = {}
    parent: dict[str, Any] = {}
    """Header of the Jupyter request, for libraries that ask for it (ipywidgets' Output)."""

    turn: int = 0
    """Turn of a run whose cell this is; 0 for a cell of a person's. In a turn the names of
    the REPL are put back afterwards; a person may rebind ``P``."""

    history: list[dict[str, str]] = []
    """Messages to append to ``history`` before the cell runs."""

    max_output: int = 10_000_000
    """Characters of output to send at most; the worker counts what it leaves out."""


class Begin(_Message, frozen=True, kw_only=True, tag="begin"):
    """A run begins: install the REPL's names afresh and forget ``Final`` and ``answer``.
    Answered by `Ready`."""

    id: Id
    run_id: str
    history: list[dict[str, str]] = []
    """The root's messages so far, as ``history`` in the REPL."""

    tools: list[str] = []
    """Functions of a person's cells, or files with functions, that the run's sub-models may
    use."""

    pickled: bytes = b""
    """The functions of a program that they may use, as a list that cloudpickle wrote."""


class LoadPrompt(_Message, frozen=True, kw_only=True, tag="load_prompt"):
    """Take ``P`` from the memfd that comes with this frame. Answered by `Loaded`."""

    id: Id
    kind: Literal["str", "list", "dict"] = "str"
    """``str``: the memfd holds its UTF-8 (surrogates passed); else JSON."""

    source: str = ""


class ReadPrompt(_Message, frozen=True, kw_only=True, tag="read_prompt"):
    """Send ``P`` back in `PromptChunk` messages of at most 1 MiB."""

    id: Id


class InputReply(_Message, frozen=True, kw_only=True, tag="input_reply"):
    """Answer to `GetInput`. ``None`` is end of file."""

    id: Id
    text: str | None


class BudgetLeft(_Message, frozen=True, kw_only=True, tag="budget_left"):
    """Answer to `GetBudget`; what ``budget()`` returns."""

    id: Id
    budget: BudgetView


class RunReply(_Message, frozen=True, kw_only=True, tag="run_reply"):
    """Answer to `StartRun` and `RunCommand`: text for the person who gave the command."""

    id: Id
    text: str = ""


class Failed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The kernel refuses request *id*; raised in the cell as the named error."""

    id: Id
    ename: Literal["UsageError", "SubcallError", "RLMError", "StdinNotImplemented"]
    reason: str


class Complete(_Message, frozen=True, kw_only=True, tag="complete"):
    """Answered by `Completions`."""

    id: Id
    code: str
    cursor_pos: int


class Inspect(_Message, frozen=True, kw_only=True, tag="inspect"):
    """Answered by `Inspection`."""

    id: Id
    code: str
    cursor_pos: int
    detail_level: int = 0


class IsComplete(_Message, frozen=True, kw_only=True, tag="is_complete"):
    """Answered by `Completeness`."""

    id: Id
    code: str


class Variables(_Message, frozen=True, kw_only=True, tag="variables"):
    """Answered by `VariableList`."""

    id: Id


class CommToWorker(_Message, frozen=True, kw_only=True, tag="comm_in"):
    """A comm message of a front end, for a widget in the REPL.

    What its handler shows has this id instead of a cell's. Answered by `CommDone`, except
    where the id is 0: then nobody waits.
    """

    id: Id = 0
    kind: Literal["comm_open", "comm_msg", "comm_close"]
    comm_id: str
    data: Any = None
    target_name: str = ""
    metadata: dict[str, Any] = {}
    buffers: list[bytes] = []
    parent: dict[str, Any] = {}


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Answered by `Pong` once the worker is idle."""

    id: Id


ToWorker = (
    Execute
    | Begin
    | LoadPrompt
    | ReadPrompt
    | SubcallResults
    | InputReply
    | BudgetLeft
    | RunReply
    | Failed
    | Complete
    | Inspect
    | IsComplete
    | Variables
    | CommToWorker
    | CallTool
    | Ping
)


# --- worker to kernel -------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker: it is up and idle."""

    pid: int
    python: str
    """Version, such as ``3.11.7``."""


class Emit(_Message, frozen=True, kw_only=True, tag="emit"):
    """Output of cell *id*. Id 0: of no cell (a background task after its cell's end belongs
    to the last cell, and says so with its id)."""

    id: Id
    output: Output


class Done(_Message, frozen=True, kw_only=True, tag="done"):
    """Cell *id* ended."""

    id: Id
    ok: bool
    execution_count: int
    error: ErrorOutput | None = None
    variables: list[Variable] = []
    restored: list[str] = []
    answer: AnswerSet | None = None
    user_expressions: dict[str, Any] = {}
    payload: list[dict[str, Any]] = []
    dropped_chars: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


class GetInput(_Message, frozen=True, kw_only=True, tag="get_input"):
    """``input()`` or ``getpass()`` in cell *cell*."""

    id: Id
    cell: Id
    prompt: str = ""
    password: bool = False


class GetBudget(_Message, frozen=True, kw_only=True, tag="get_budget"):
    """``budget()`` in a cell."""

    id: Id


class SetPrompt(_Message, frozen=True, kw_only=True, tag="set_prompt"):
    """A cell of a person's loaded or rebound ``P``. Not answered."""

    cell: Id
    prompt: PromptInfo


class StartRun(_Message, frozen=True, kw_only=True, tag="start_run"):
    """``%%rlm`` in a cell: start a run once this cell has ended. Answered by `RunReply`."""

    id: Id
    cell: Id
    query: str
    options: dict[str, str | bool | None] = {}
    """Options as the person wrote them, by long name; the kernel checks them."""


class RunCommand(_Message, frozen=True, kw_only=True, tag="run_command"):
    """``%rlm COMMAND …`` in a cell. Answered by `RunReply`."""

    id: Id
    cell: Id
    command: str
    args: list[str] = []


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """Answer to `Begin`."""

    id: Id
    prompt: PromptInfo | None
    """``None`` where no prompt is loaded."""

    error: str = ""
    """Why ``P`` or a tool cannot be used, such as a type that is no prompt."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    """The tools that were named."""


class Loaded(_Message, frozen=True, kw_only=True, tag="loaded"):
    """Answer to `LoadPrompt`."""

    id: Id
    prompt: PromptInfo | None
    error: str = ""


class PromptChunk(_Message, frozen=True, kw_only=True, tag="prompt_chunk"):
    """A piece of ``P`` as UTF-8 or JSON."""

    id: Id
    data: bytes
    last: bool = False


class Completions(_Message, frozen=True, kw_only=True, tag="completions"):
    """Matches for the text between *start* and *end* (code points)."""

    id: Id
    matches: list[str]
    cursor_start: int
    cursor_end: int
    metadata: dict[str, Any] = {}


class Inspection(_Message, frozen=True, kw_only=True, tag="inspection"):
    """What is known of the object under the cursor."""

    id: Id
    found: bool
    data: dict[str, Any] = {}


class Completeness(_Message, frozen=True, kw_only=True, tag="completeness"):
    """Whether code is ready to run."""

    id: Id
    status: Literal["complete", "incomplete", "invalid", "unknown"]
    indent: str = ""


class VariableList(_Message, frozen=True, kw_only=True, tag="variable_list"):
    """The variables of the REPL, without its own names."""

    id: Id
    variables: list[Variable]


class CommFromWorker(_Message, frozen=True, kw_only=True, tag="comm_out"):
    """A comm message of a widget in the REPL, for the front end."""

    kind: Literal["comm_open", "comm_msg", "comm_close"]
    cell: Id
    comm_id: str
    data: Any = None
    target_name: str = ""
    target_module: str | None = None
    metadata: dict[str, Any] = {}
    buffers: list[bytes] = []


class CommDone(_Message, frozen=True, kw_only=True, tag="comm_done"):
    """Answer to `CommToWorker`: its handler is through."""

    id: Id


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping`."""

    id: Id


FromWorker = (
    Hello
    | Emit
    | Done
    | GetInput
    | SendSubcalls
    | CancelSubcalls
    | JudgeSubcalls
    | ToolReturned
    | GetBudget
    | SetPrompt
    | StartRun
    | RunCommand
    | Ready
    | Loaded
    | PromptChunk
    | Completions
    | Inspection
    | Completeness
    | VariableList
    | CommFromWorker
    | CommDone
    | Pong
)
