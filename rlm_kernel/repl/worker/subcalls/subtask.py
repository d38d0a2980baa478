"""``@subtask``: a function whose signature is the form of a sub-call, and its docstring the
instruction."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlm_kernel.errors import SubcallError
from rlm_kernel.repl.worker.subcalls.calls import Calls
from rlm_kernel.repl.worker.subcalls.options import check_names, make_order
from rlm_kernel.repl.worker.subcalls.templates import collected

__all__ = ["Subtask", "make_subtask"]

_LONG = 80
"""Characters of an argument that stands on the line of its name."""


class Subtask:
    """A function that a model computes.

    Parameters
    ----------
    function
        Its docstring is the instruction, its return annotation the type of the value, its
        arguments are what the model is shown. Where its body returns a str, that is shown in
        place of them.
    options
        Those of ``sub_RLM``.

    Raises
    ------
    TypeError
        It has no docstring, is a coroutine, or its type has no JSON Schema.
    """

    def __init__(self, calls: Calls, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._calls, self._function = calls, function
        self._name = getattr(function, "__name__", "subtask")
        self._signature = inspect.signature(function)
        instruction = inspect.getdoc(function) or ""
        if not instruction:
            raise TypeError(
                f"the subtask {self._name} needs a docstring: it is what the model is told to do"
            )
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"the subtask {self._name} is to be a plain function; await {self._name}.aio(…)"
            )
        self._begin(instruction, options)

    def _begin(self, instruction: str, options: dict[str, Any]) -> None:
        options = {"task": self._name, **options}
        if "choices" not in options and "schema" not in options:
            options["schema"] = self._returned()
        self._instruction = instruction
        self._recursive = options.get("depth") == "rlm"
        if self._recursive:  # there the arguments are P
            options["query"] = instruction
        self._order = make_order(options, "subtask")

    def _returned(self) -> Any:
        try:
            hints = typing.get_type_hints(self._function)
        except NameError as error:
            raise TypeError(f"the annotations of {self._name} cannot be read: {error}") from None
        returned = hints.get("return", str)
        if returned is type(None):
            raise TypeError(f"the subtask {self._name} is to return something; annotate what")
        return returned

    def __repr__(self) -> str:
        return f"<subtask {self._name}{self._signature}>"

    def prompt(self, *args: Any, **kwargs: Any) -> str:
        """What the model is sent for these arguments."""
        shown = self._shown(args, kwargs)
        return shown if self._recursive else f"{self._instruction}\n\n{shown}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value for these arguments. Raises `SubcallError`."""
        return _only(self._calls.ask([self.prompt(*args, **kwargs)], self._order)[0])

    async def aio(self, *args: Any, **kwargs: Any) -> Any:
        """As calling it, in a coroutine."""
        prompts = [self.prompt(*args, **kwargs)]
        return _only((await self._calls.ask_async(prompts, self._order))[0])

    def map(self, items: Iterable[Any]) -> Any:
        """The values for many items, all at once; a failed one is a `SubcallError`.

        Of a function with one argument an item is its value; of one with more an item is a
        tuple of them, or a dict of them by name. A dict of items gives a dict of values.
        """
        found = collected(items)
        prompts = [self._prompt_of(item) for item in found]
        keys = list(items) if isinstance(items, Mapping) else None
        outcomes = self._calls.ask(prompts, self._order, keys)
        return list(outcomes) if keys is None else outcomes.done

    def _prompt_of(self, item: Any) -> str:
        if len(self._signature.parameters) == 1:
            return self.prompt(item)
        if isinstance(item, Mapping):
            return self.prompt(**item)
        if isinstance(item, (tuple, list)):
            return self.prompt(*item)
        raise TypeError(
            f"{self._name} takes several arguments: an item of its map is a tuple or a dict of "
            f"them, not {type(item).__name__}"
        )

    def _shown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"the subtask {self._name}{self._signature}: {error}") from None
        bound.apply_defaults()
        own = self._function(*bound.args, **bound.kwargs)
        if own is not None and not isinstance(own, str):
            raise TypeError(
                f"the body of the subtask {self._name} returned {type(own).__name__}: it is to "
                "return the text for the model, or nothing"
            )
        if own:
            return own
        return "\n\n".join(_argument(name, value) for name, value in bound.arguments.items())


def _argument(name: str, value: Any) -> str:
    text = _text(value)
    return f"{name}: {text}" if len(text) <= _LONG and "\n" not in text else f"{name}:\n{text}"


def _text(value: Any) -> str:
    if isinstance(value, (list, dict, tuple)):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(value)
    return str(value)


def _only(outcome: Any) -> Any:
    if isinstance(outcome, SubcallError):
        raise outcome
    return outcome


def make_subtask(calls: Calls) -> Callable[..., Any]:
    """The decorator whose functions are computed through *calls*."""

    def subtask(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a function that a model computes.

        The docstring is the instruction, the return annotation the type of the value, and the
        arguments are what the model is shown. The body is left empty; where it returns a str,
        that is shown in place of the arguments. Options are those of `sub_RLM`.

        Examples
        --------
        >>> @subtask(max_tokens=5)  # doctest: +SKIP
        ... def is_spam(mail: str) -> bool:
        ...     '''Say whether the mail is spam.'''
        >>> is_spam(mails[0])  # doctest: +SKIP
        >>> is_spam.map(mails)  # doctest: +SKIP
        """
        check_names(options, "subtask")
        if function is None:
            return lambda function: Subtask(calls, function, options)
        if not callable(function):
            raise TypeError("subtask is a decorator: write @subtask above a function")
        return Subtask(calls, function, options)

    return subtask
