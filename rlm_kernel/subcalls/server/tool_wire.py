"""Tools of a sub-call, as chat messages and back.

Source: function calling in OpenAI's chat completions, as vLLM and llama.cpp serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rlm_kernel.subcalls.endpoint import EndpointError, Exchange, ToolSpec, ToolUse

__all__ = ["Message", "ToolAsked", "ToolOffer", "UseParts", "offers", "rounds"]

MOST_USES = 128
"""Tools that one reply may ask for."""


# --- what is sent -----------------------------------------------------------------------------


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: str
    content: str | msgspec.Raw
    tool_calls: list[_ToolCall] = []
    tool_call_id: str = ""


class _OfferedFunction(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: msgspec.Raw


class ToolOffer(msgspec.Struct, frozen=True):
    """One entry of the request's ``tools``."""

    function: _OfferedFunction
    type: str = "function"


def offers(tools: Sequence[ToolSpec]) -> list[ToolOffer]:
    """*tools* as the request names them. Raises `EndpointError` where one cannot be sent."""
    return [ToolOffer(_OfferedFunction(t.name, t.description, _schema_of(t))) for t in tools]


def _schema_of(tool: ToolSpec) -> msgspec.Raw:
    if not _is_object(tool.parameters):
        raise EndpointError(
            f"the parameters of tool {tool.name[:60]!r} are no JSON object: pass a JSON Schema"
        )
    return msgspec.Raw(tool.parameters.encode())


def rounds(exchanges: Sequence[Exchange]) -> Iterator[Message]:
    """The messages of the rounds so far."""
    for exchange in exchanges:
        asked = [
            _ToolCall(use.use_id, _Function(use.name, _resent(use.arguments)))
            for use in exchange.uses
        ]
        yield Message("assistant", exchange.text, tool_calls=asked)
        for use, result in zip(exchange.uses, exchange.results, strict=True):
            yield Message("tool", result, tool_call_id=use.use_id)


def _resent(arguments: str) -> str:
    """*arguments* as they may stand in a request: servers parse them, and refuse what is no JSON
    object with all that was said before."""
    if not arguments.strip():
        return "{}"
    if _is_object(arguments):
        return arguments
    return msgspec.json.encode({"invalid_json": arguments}).decode()


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


# --- what comes -------------------------------------------------------------------------------


class _AskedFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    """Text; some servers give the object itself."""


class ToolAsked(msgspec.Struct, frozen=True):
    """One entry of ``tool_calls``, whole or, in a stream, a part of one."""

    id: str | None = None
    index: int | None = None
    function: _AskedFunction = _AskedFunction()


class UseParts:
    """Puts the tools that one reply asks for together, from whole entries or parts of them."""

    def __init__(self) -> None:
        self._uses: list[_Parts] = []

    def __bool__(self) -> bool:
        return bool(self._uses)

    def add(self, asked: ToolAsked) -> None:
        parts = self._of(asked)
        parts.use_id = asked.id or parts.use_id
        parts.name = asked.function.name or parts.name
        arguments = asked.function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        parts.arguments.append(arguments or "")

    def whole(self) -> list[ToolUse]:
        """In order. Servers that give no ids get some that are unique within the reply."""
        return [
            ToolUse(
                use_id=parts.use_id or f"call_{number}",
                name=parts.name,
                arguments="".join(parts.arguments),
            )
            for number, parts in enumerate(self._uses)
        ]

    def _of(self, asked: ToolAsked) -> _Parts:
        """The use that *asked* belongs to. By its index; but some servers number all of them 0,
        or none, and only a new id tells a new use."""
        for parts in reversed(self._uses):
            same_id = not asked.id or not parts.use_id or asked.id == parts.use_id
            is_new = asked.index is None and asked.function.name and not asked.id
            if same_id and asked.index in (None, parts.index) and not is_new:
                return parts
        if len(self._uses) >= MOST_USES:
            raise EndpointError(
                f"the model asked for more than {MOST_USES} tools at once: change the prompt",
                status=200,
            )
        self._uses.append(_Parts(asked.index))
        return self._uses[-1]


class _Parts:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.use_id = ""
        self.name = ""
        self.arguments: list[str] = []
