"""What a call of ``sub_RLM`` may be given beside its prompts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.repl.worker.plain import encode_hook, plain
from rlm_kernel.repl.worker.subcalls.forms import Form, make_form

__all__ = ["Kind", "Order", "check_names", "make_order"]

Kind = Literal["llm", "rlm"]

_SAMPLING = ("model", "temperature", "max_tokens", "stop", "seed", "system", "timeout", "query")
_FORM = ("choices", "schema", "check", "task")
_NAMES = (*_SAMPLING, *_FORM, "depth")

_LEAST, _MOST = -(2**63), 2**63 - 1
"""Of a whole number; what servers take for ``seed``."""

_WHOLE_TASK = "P is a task with its material. Do what it asks."


@dataclass(frozen=True, slots=True)
class Order:
    """How all prompts of a call are to be asked, and what their replies are to be."""

    kind: Kind
    params: SubcallParams
    form: Form


def check_names(options: dict[str, Any], function: str) -> None:
    """Raise TypeError for an option that there is not."""
    for name in options:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_NAMES)}"
            raise TypeError(f"{function} has no option {name!r}; {hint}")


def make_order(options: dict[str, Any], function: str = "sub_RLM") -> Order:
    """*options* as they were given to *function*, checked.

    Raises
    ------
    TypeError, ValueError
        The message names the option.
    """
    check_names(options, function)
    depth = options.get("depth", "llm")
    if depth not in ("llm", "rlm"):
        raise ValueError(f"depth must be 'llm' or 'rlm', not {depth!r}")
    form = make_form(**{name: options.get(name) for name in _FORM})
    sampling = {name: options.get(name) for name in _SAMPLING}
    if depth == "rlm" and form.told:
        # Nothing else tells a child run's root: structured outputs are for completions.
        query = sampling["query"] or _WHOLE_TASK
        sampling["query"] = f"{query}\n\nThe answer is to be a str, with {form.told}"
    params = _params(form, sampling)
    return Order(depth, params, form)


def _params(form: Form, sampling: dict[str, Any]) -> SubcallParams:
    """Checked here, because the link ends a worker that sends another type."""
    sampling["stop"] = _stops(sampling["stop"])
    for name in ("max_tokens", "seed"):
        _check_size(name, sampling[name])
    given = SubcallParams(**sampling, task=form.task, choices=form.choices, schema=form.schema)
    try:
        # As the link would send them: a number of numpy's is one, a subclass of str is a str.
        sent = msgspec.to_builtins(plain(msgspec.structs.asdict(given)), enc_hook=encode_hook)
        return msgspec.convert(sent, SubcallParams)
    except NotImplementedError:
        raise TypeError("an option of a sub-call is neither a str nor a number") from None
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`") or "an option"
        raise TypeError(f"{name} of a sub-call: {problem[:1].lower()}{problem[1:]}") from None


def _check_size(name: str, number: object) -> None:
    if isinstance(number, int) and not _LEAST <= number <= _MOST:
        raise ValueError(f"{name} of a sub-call: give a number from -2**63 to 2**63 - 1")


def _stops(stop: object) -> list[str] | None:
    if stop is None:
        return None
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Iterable):
        raise TypeError(f"stop of a sub-call: a str or a list of str, not {type(stop).__name__}")
    return list(texts)
