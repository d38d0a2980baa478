"""The tools of a session's run, from its worker's description to their use by sub-models."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.repl import Repl
from rlm_kernel.repl.messages import Tool
from rlm_kernel.subcalls.endpoint import ToolSpec
from rlm_kernel.subcalls.scheduling.tools import Toolbox, ToolResult

__all__ = ["specs_of", "toolbox_of"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MAX_ARGUMENTS = 1_000_000


def specs_of(tools: Sequence[Tool]) -> list[ToolSpec]:
    """What models are told of *tools*. They were described by the worker, so they are checked.

    Raises
    ------
    UsageError
        A server could not read one, or two have the same name.
    """
    for tool in tools:
        if not _NAME.fullmatch(tool.name) or not _is_schema(tool.parameters):
            raise UsageError(f"the REPL described the tool {tool.name!r} in a way that is none")
    if len({tool.name for tool in tools}) < len(tools):
        raise UsageError("the REPL described two tools of the same name")
    return [
        ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
        for tool in tools
    ]


def toolbox_of(specs: Sequence[ToolSpec], repl: Repl, batch: int) -> Toolbox | None:
    """The tools that models may use for request *batch* of *repl*, and all that comes of it."""
    if not specs:
        return None

    async def use(name: str, arguments: str) -> ToolResult:
        if len(arguments) > _MAX_ARGUMENTS:
            return ToolResult(error=f"the arguments have more than {_MAX_ARGUMENTS:,} characters")
        try:
            returned = await repl.call_tool(batch, name, arguments)
        except RLMError as error:
            return ToolResult(error=str(error))
        return ToolResult(text=returned.text, error=returned.error)

    return Toolbox(specs, use)


def _is_schema(text: str) -> bool:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return False
    return isinstance(schema, dict) and schema.get("type") == "object"
