"""A Python function as a tool of sub-models: what they are told of it, and how it is called."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rlm_kernel.errors import UsageError
from rlm_kernel.text import cut_middle, escape_surrogates

__all__ = [
    "MAX_DESCRIPTION",
    "MAX_SCHEMA",
    "MAX_TOOLS",
    "ToolFunction",
    "tool_functions",
    "tool_names",
]

MAX_TOOLS = 64
"""Tools of one run: each is described in every request."""

MAX_DESCRIPTION = 4_000
"""Characters of what a tool does."""

MAX_SCHEMA = 65_536
"""Characters of the schema of its arguments."""

_REF = "#/$defs/{name}"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""What servers take as the name of a function."""


def tool_names(given: str) -> list[str]:
    """The names in *given*, of functions and of files, with commas between them."""
    return [name for part in given.split(",") if (name := part.strip())]


class ToolFunction:
    """A documented function that a model may call with JSON.

    The first paragraph of its docstring says what it does, its annotations what it takes. A
    parameter without annotation is a ``str``; one with a default may be left out.

    Attributes
    ----------
    name, description
        As the model is told them.
    parameters
        JSON Schema of the arguments, an object, as text.

    Raises
    ------
    UsageError
        The function cannot be a tool; the message says why.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = _name(function)
        self.description = _description(function, self.name)
        self._positional, self._type = _arguments(function, self.name)
        self.parameters = _schema(self._type, self.name)

    def __call__(self, arguments: str) -> Any:
        """Call the function with *arguments*, a JSON object as text; empty is none.

        Raises
        ------
        ValueError
            They are no JSON, or not what the function takes.
        Exception
            Whatever the function raises.
        """
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._type, strict=False)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            raise ValueError(f"the arguments are not what {self.name} takes: {error}") from None
        values = {
            name: value
            for name in self._type.__struct_fields__
            if (value := getattr(given, name)) is not msgspec.UNSET
        }
        first = [values.pop(name) for name in self._positional if name in values]
        return self.function(*first, **values)


def tool_functions(functions: Iterable[Any]) -> list[ToolFunction]:
    """Each of *functions* as a tool.

    Raises
    ------
    UsageError
        One cannot be, two have the same name, or there are too many.
    """
    tools = [ToolFunction(function) for function in functions]
    if len(tools) > MAX_TOOLS:
        raise UsageError(f"{len(tools)} tools are too many: give at most {MAX_TOOLS}")
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tools are called {name}: rename one of them")
    return tools


def _name(function: Any) -> str:
    if not callable(function) or isinstance(function, type):
        kind = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        raise UsageError(f"a tool is a function, not {kind[:80]}")
    name = getattr(function, "__name__", "")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{repr(function)[:80]} has no name that a model can call: define a function with def"
        )
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"the tool {name} is a coroutine function: make it a plain one")
    return name


def _description(function: Any, name: str) -> str:
    first, *_ = re.split(r"\n\s*\n", inspect.getdoc(function) or "", maxsplit=1)
    text = " ".join(first.split())
    if not text:
        raise UsageError(f"the tool {name} has no docstring: say in it what the tool does")
    return cut_middle(escape_surrogates(text), MAX_DESCRIPTION)


def _arguments(function: Any, name: str) -> tuple[list[str], type[msgspec.Struct]]:
    """The parameters that are only given by position, and the type of all arguments."""
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are code of the user's
        raise UsageError(
            f"the parameters of the tool {name} cannot be read: {type(error).__name__}: {error}"
        ) from None
    fields: list[Any] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"the tool {name} takes {parameter}: name each of its parameters")
        wanted = hints.get(parameter.name, str)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, wanted))
        else:
            fields.append((parameter.name, wanted | msgspec.UnsetType, msgspec.UNSET))
    positional = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_ONLY]
    try:
        made = msgspec.defstruct(
            "Arguments", fields, kw_only=True, forbid_unknown_fields=True, namespace={}
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"the parameters of the tool {name} cannot be read: {error}") from None
    return positional, made


def _schema(arguments: type[msgspec.Struct], name: str) -> str:
    try:
        (found,), parts = msgspec.json.schema_components([arguments], ref_template=_REF)
        schema = parts.pop(found["$ref"].removeprefix(_REF.format(name="")))
    except Exception as error:  # types may have hooks of the user's
        *_, reason = str(error).splitlines() or [type(error).__name__]
        raise UsageError(
            f"the tool {name} takes what JSON has no form for ({reason}): annotate its parameters "
            "with str, int, float, bool, list, dict, Literal or a dataclass"
        ) from None
    schema.pop("title", None)
    if parts:
        schema["$defs"] = parts
    text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_SCHEMA:
        raise UsageError(f"the parameters of the tool {name} are too many to be described")
    return text
