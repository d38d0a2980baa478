"""Finding the number in a sentence.

Models that are asked for a number often give it in a sentence, where it is no JSON. It is taken
where it is the only one, and nothing around it can change what it says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rlm_kernel.repl.worker.subcalls.replies import Unfit, thought_out, value_in

__all__ = ["number_in"]

_BRACKET = re.compile(r"[{\[]")
_CLUSTER = re.compile(r"[-+\u2212]?\.?\d+(?:[.,_\u00a0\u202f]\d+)*(?:[eE][-+]?\d+)?")
_GROUPED = r"[1-9][0-9]{0,2}(?P<mark>[,_\u00a0\u202f])[0-9]{3}(?:(?P=mark)[0-9]{3})*"
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?)(?P<whole>{_GROUPED}|[0-9]*)(?P<part>(?:\.[0-9]+)?)"
    r"(?P<exponent>(?:[eE][-+]?[0-9]+)?)"
)
_MARKS = re.compile(r"[^0-9]")
_NEGATED = re.compile(
    r"(?:\b(?:minus|negative)\s*|[-\u2212]\s*[^\w\s]|[\u2013\u2014])$", re.IGNORECASE
)
_SCALED = re.compile(
    r"\s*(?:hundred|thousand|million|billion|trillion|dozen|mn|bn)s?\b", re.IGNORECASE
)
_NEAR = 20
"""Characters before a number in which it may be negated."""


def number_in(text: str, fit: Callable[[str], Any]) -> Any:
    """The only number in *text*, by *fit*, which makes the value of its JSON text.

    Thousands may be marked, as in ``1,234``. Text with brackets is JSON, whole or broken, and is
    read as such: a number that stands in something cut off is not the one that was asked for.

    Raises
    ------
    Unfit
        There is no number, there are several, it is not all that is said (``5k``, ``minus 5``),
        or *fit* does not take it.
    """
    said = thought_out(text)
    if "<think>" in said:
        raise Unfit("ends in the middle of a thought")
    if _BRACKET.search(said):
        return value_in(text, fit)
    found = list(_CLUSTER.finditer(said))
    count = sum(map(_count, found))
    if count != 1:
        many = f"{count:,} numbers" if count else "no number"
        raise Unfit(f"holds {many}, where one is asked for")
    cluster = found[0]
    if not _stands_alone(said, cluster):
        raise Unfit("holds a number that is only a part of what is said: its digits are asked for")
    return fit(_as_json(cluster))


def _count(cluster: re.Match[str]) -> int:
    """How many numbers *cluster* is: ``1,234`` is one, ``1,2`` and ``1.2.2020`` are several."""
    if _NUMBER.fullmatch(cluster[0]):
        return 1
    return len(re.findall(r"\d+", cluster[0]))


def _stands_alone(text: str, cluster: re.Match[str]) -> bool:
    """Whether nothing at its sides makes it another number, or a part of a word."""
    before = text[max(0, cluster.start() - _NEAR) : cluster.start()]
    after = text[cluster.end() : cluster.end() + 1]
    glued = before[-1:].isalnum() or before[-1:] == "_" or after.isalnum()
    changed = _NEGATED.search(before) or _SCALED.match(text, cluster.end())
    return not glued and not changed and _NUMBER.fullmatch(cluster[0]) is not None


def _as_json(cluster: re.Match[str]) -> str:
    number = _NUMBER.fullmatch(cluster[0])
    assert number is not None
    sign = "" if number["sign"] in ("", "+") else "-"
    whole = _MARKS.sub("", number["whole"]).lstrip("0") or "0"
    return f"{sign}{whole}{number['part']}{number['exponent']}"
