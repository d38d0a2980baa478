"""What the reply of a call is to be, and whether it is.

A form is the worker's half of a typed sub-task: the kernel has the server keep
to ``choices`` or ``schema``, and the worker reads the reply and does not rely on
that it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlm_kernel.repl.worker.subcalls.replies import Unfit
from rlm_kernel.repl.worker.subcalls.schemas import reading_of, reading_of_choices

__all__ = ["Check", "Form", "make_form"]

Check = Callable[[Any], Any]
"""A postcondition of a value; see `Form.value` for what it may say."""

_MAX_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a reply is to be. Without anything, it may be any text."""

    task: str | None = None
    """Name of the typed sub-task."""

    choices: list[str] | None = None
    schema: str | None = None
    told: str = ""
    """What the answer of a child run is to be; see `Reading`."""

    read: Callable[[str], Any] | None = None
    check: Check | None = None

    @property
    def typed(self) -> bool:
        """Whether a reply can be unfit."""
        return self.read is not None or self.check is not None

    def value(self, text: str) -> Any:
        """The value of a reply.

        The check says that it is none by returning something false, by returning the reason as
        a str, or by raising AssertionError or ValueError. Returning ``None`` is consent, since
        functions of asserts return that. What else it raises is its own defect, and is raised.

        Raises
        ------
        Unfit
            With the reason.
        """
        value = text if self.read is None else self.read(text)
        if self.check is not None:
            _apply(self.check, value)
        return value


def _apply(check: Check, value: Any) -> None:
    try:
        said = check(value)
    except (AssertionError, ValueError) as error:
        raise _failed(str(error)) from None
    if isinstance(said, str):
        if said:
            raise _failed(said)
    elif said is not None and not said:
        raise _failed("")


def _failed(reason: str) -> Unfit:
    reason = reason.strip()[:_MAX_REASON]
    return Unfit(f"failed the check: {reason}" if reason else "failed the check")


def make_form(
    *, choices: Any = None, schema: Any = None, check: Check | None = None, task: Any = None
) -> Form:
    """The form that the options of a call ask for.

    Raises
    ------
    TypeError, ValueError
        An option is of no use; see `reading_of`.
    """
    if choices is not None and schema is not None:
        raise TypeError("give either choices or schema: a reply has one form")
    if task is not None and not isinstance(task, str):
        raise TypeError(f"task is the name of the sub-task, a str, not {type(task).__name__}")
    _check_the_check(check)
    reading = None
    if choices is not None:
        reading = reading_of_choices(choices)
    elif schema is not None:
        reading = reading_of(schema)
    if reading is None:
        return Form(task=task or _name_of(check), check=check)
    return Form(
        task=task or reading.name,
        choices=reading.choices,
        schema=reading.schema,
        told=reading.told,
        read=reading.read,
        check=check,
    )


def _check_the_check(check: object) -> None:
    if check is not None and not callable(check):
        raise TypeError(f"check is a function of the value, not {type(check).__name__}")
    if inspect.iscoroutinefunction(check):
        raise TypeError("check is called without await; give a plain function")


def _name_of(check: Check | None) -> str | None:
    if check is None:
        return None
    name = getattr(check, "__name__", "check")
    return "check" if name == "<lambda>" else name
