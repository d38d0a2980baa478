"""Tools for sub-models: functions of a person or a program that a sub-call's model may use.

They run in this process, because that is where their data is, and only while a cell waits for
the sub-call, in the thread or task that waits. The root does not have them: a function of a
person's cells is taken out of the namespace for each turn of the run.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

from rlm_kernel.errors import UsageError
from rlm_kernel.repl import messages
from rlm_kernel.repl.worker.captured import capturing
from rlm_kernel.repl.worker.link import Link
from rlm_kernel.text import cut_middle, escape_surrogates
from rlm_kernel.tool_function import ToolFunction, tool_functions

__all__ = ["Tools"]

_MOST = 20_000
"""Characters of a tool's output that go up the link, and that a model is shown."""


class Tools:
    """The tools of the run that is going on.

    Parameters
    ----------
    namespace
        Of the user's module.
    reserved
        Names of the REPL, which are no tools.
    link
        Where their results go.
    flush
        Sends what the cell has written so far.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        reserved: frozenset[str],
        link: Link,
        flush: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._reserved = reserved
        self._link = link
        self._flush = flush
        self._tools: dict[str, ToolFunction] = {}
        self._named: dict[str, Any] = {}
        """Those of a person's cells."""

        self._files: dict[str, list[Any]] = {}
        self._hidden: dict[str, Any] = {}
        self._one_at_a_time = threading.RLock()

    # --- what they are --------------------------------------------------------------------------

    def load(self, given: list[str]) -> None:
        """Look at tools that a person names; the files among them are read anew.

        Raises
        ------
        UsageError
            One cannot be a tool.
        """
        for name in filter(_is_file, given):
            self._files[name] = _functions_of(name)
        self._found(given, b"")

    def begin_run(self, given: list[str], pickled: bytes) -> list[messages.Tool]:
        """The tools of the run that begins, as its sub-models are told of them.

        Raises
        ------
        UsageError
            One cannot be a tool, or cannot be loaded.
        """
        self._tools, self._named = {}, {}
        found = self._found(given, pickled)
        self._tools = {tool.name: tool for tool in found}
        self._named = {name: self._namespace[name] for name in given if not _is_file(name)}
        return [
            messages.Tool(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in found
        ]

    def _found(self, given: list[str], pickled: bytes) -> list[ToolFunction]:
        functions: list[Any] = _unpickled(pickled) if pickled else []
        for name in given:
            if _is_file(name):
                if name not in self._files:
                    self._files[name] = _functions_of(name)
                functions += self._files[name]
            else:
                functions.append(self._function(name))
        return tool_functions(functions)

    def _function(self, name: str) -> Any:
        if name in self._reserved:
            raise UsageError(f"{name} is a name of the REPL, and no function of yours")
        if name not in self._namespace:
            raise UsageError(f"there is no function {name}: define it in a cell, with a docstring")
        function = self._namespace[name]
        if getattr(function, "__name__", name) != name:
            raise UsageError(f"{name} is a function called {function.__name__}: name it so")
        return function

    # --- where they are not ---------------------------------------------------------------------

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Around the cell of a root: what a person named as a tool is not there."""
        namespace = self._namespace
        taken = {
            name: function
            for name, function in self._named.items()
            if namespace.get(name) is function
        }
        for name in taken:
            del namespace[name]
        self._hidden = taken
        try:
            yield
        finally:
            self._hidden = {}
            for name, function in taken.items():
                namespace.setdefault(name, function)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Around a tool that runs meanwhile: it may call itself, or another."""
        namespace = self._namespace
        back = {name: it for name, it in self._hidden.items() if name not in namespace}
        namespace.update(back)
        try:
            yield
        finally:
            for name, function in back.items():
                if namespace.get(name) is function:
                    del namespace[name]

    # --- their use ------------------------------------------------------------------------------

    def run(self, call: messages.CallTool) -> None:
        """Run a tool and tell the kernel what came of it. Only an interrupt is raised."""
        text, error = "", "the tool was interrupted"
        try:
            text, error = self._result(call), ""
        except (Exception, SystemExit) as raised:
            error = f"{type(raised).__name__}: {_said(raised)}"
        finally:
            self._return(call, text, error)

    def refuse(self, call: messages.CallTool) -> None:
        """A use that came when nobody waited for its sub-call any more."""
        self._return(call, "", "the tool was not run, because no cell waits for this sub-call")

    def _result(self, call: messages.CallTool) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            raise LookupError(f"the tool {call.name} was lost with the worker that had it")
        self._flush()
        with self._one_at_a_time, self._shown(), capturing() as written:
            value = tool(call.arguments)
            return written.text if value is None else _as_text(value)

    def _return(self, call: messages.CallTool, text: str, error: str) -> None:
        shown, why = (cut_middle(escape_surrogates(it), _MOST) for it in (text, error))
        self._link.send(messages.ToolReturned(id=call.id, text=shown, error=why))


def _as_text(value: Any) -> str:
    """*value* as a model reads it: text as it is, what JSON can hold as JSON, the rest by str()."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as again:
        return f"<str() of it raised {type(again).__name__}>"


def _is_file(name: str) -> bool:
    return name.endswith(".py")


def _functions_of(file: str) -> list[Any]:
    """The functions that *file* defines, public and documented, in their order."""
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {file}: give one with the functions that are tools")
    module_name = f"rlm_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be loaded: give a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{file} cannot be loaded, because it raised {type(error).__name__}: {_said(error)}"
        ) from None
    found = [
        function
        for name, function in vars(module).items()
        if isinstance(function, FunctionType)
        and function.__module__ == module_name
        and not name.startswith("_")
        and function.__doc__
    ]
    if not found:
        raise UsageError(f"{file} defines no function with a docstring, so there is no tool in it")
    return found


def _unpickled(pickled: bytes) -> list[Any]:
    """What a program gave. It comes from above: code from there runs here anyway."""
    import cloudpickle

    try:
        functions = cloudpickle.loads(pickled)
    except Exception as error:
        raise UsageError(
            f"the tools cannot be loaded in the REPL ({type(error).__name__}: {_said(error)}): "
            "define them where the REPL can import what they need"
        ) from None
    return list(functions)
