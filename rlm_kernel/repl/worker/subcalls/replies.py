"""Finding a value in what a model wrote around it.

Structured outputs make most replies the bare value. Servers without them, and
models that think aloud, wrap it: in a fence, in quotes, in a sentence. What is
found must be unambiguous; of two values none is taken.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Unfit", "bare", "thought_out", "value_in"]

_THINKING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_OPENING = re.compile(r"[{\[]")
_BRACKETS = {"{": re.compile(r"[{}]"), "[": re.compile(r"[\[\]]")}
_AROUND = " \t\r\n\"'`*_"
_MAX_LITERAL = 100_000
"""Characters of a Python literal that are parsed; more could exhaust the parser's stack."""

_DECODER = json.JSONDecoder()


class Unfit(ValueError):
    """A reply is no value of its sub-task. The message goes on after "the reply"."""


def bare(text: str) -> str:
    """*text* without a thought before it and without quotes, emphasis and full stop around it."""
    return thought_out(text).strip(_AROUND).rstrip(".!").strip(_AROUND)


def value_in(text: str, fit: Callable[[str], Any]) -> Any:
    """The one JSON value in *text* that *fit* takes.

    Parameters
    ----------
    fit
        Makes the value of its JSON text; raises `Unfit`.

    Raises
    ------
    Unfit
        None is there, none fits, or several do.
    """
    text = thought_out(text).strip()
    found: list[Any] = []
    reasons: list[str] = []
    for candidate in _candidates(text):
        try:
            found.append(fit(candidate))
        except Unfit as why:
            reasons.append(str(why))
    if len(found) == 1:
        return found[0]
    if found:
        raise Unfit(f"holds {len(found)} values that fit, where one is asked for")
    raise Unfit(reasons[0] if reasons else "holds no JSON that is whole")


def thought_out(text: str) -> str:
    """*text* without a thought before it."""
    thinking = _THINKING.match(text)
    return text if thinking is None else text[thinking.end() :]


def _candidates(text: str) -> list[str]:
    """JSON texts in *text*, from the surest place that has any."""
    if _is_json(text):
        return [text]
    fenced = [block.strip() for block in _FENCED.findall(text)]
    inside = [block for block in fenced if _is_json(block)]
    return inside or list(_embedded(text)) or _literal(text)


def _is_json(text: str) -> bool:
    try:
        _, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return end == len(text)


def _embedded(text: str) -> Iterator[str]:
    """Objects and arrays that stand in prose.

    What is inside brackets that are no JSON is not looked at: an array in an object that was
    cut off is not the value that was asked for.
    """
    place = 0
    while opening := _OPENING.search(text, place):
        start = opening.start()
        try:
            _, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            place = _closing(text, start)
            if not place:
                return
        else:
            yield text[start:place]


def _closing(text: str, start: int) -> int:
    """After the partner of the bracket at *start*; 0 where it has none."""
    opened = text[start]
    depth = 0
    # Not a slice of the text: it would be copied for each of its brackets.
    for match in _BRACKETS[opened].finditer(text, start):
        depth += 1 if match[0] == opened else -1
        if not depth:
            return match.end()
    return 0


def _literal(text: str) -> list[str]:
    """*text* as JSON where it is a Python literal, as answers of child runs are."""
    if len(text) > _MAX_LITERAL:
        return []
    try:
        return [json.dumps(ast.literal_eval(text), allow_nan=False)]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
