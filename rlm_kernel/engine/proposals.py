"""From the reply of a root to the cell that it proposes, or to the finding that there is none."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from rlm_kernel.engine.fences import CODE_WORDS, Fence, FenceReader

__all__ = ["Cell", "cell_in", "cell_of"]

_FINAL_CALLS = frozenset({"FINAL", "FINAL_VAR", "SUBMIT"})
_FINAL_START = re.compile(r"^(?:(?:FINAL|FINAL_VAR|SUBMIT)\s*\(|Final\s*=(?!=))", re.MULTILINE)
_MAX_STARTS = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell, taken out of a reply."""

    prose: str
    """What the root said before it, without its thoughts."""

    source: str
    end: int
    """Offset in the reply after the cell."""


def cell_in(reply: str, words: frozenset[str] = CODE_WORDS) -> Cell | None:
    """The cell that the whole *reply* proposes; ``None`` where it holds no code."""
    reader = FenceReader(words)
    reader.feed(reply)
    reader.finish()
    return cell_of(reader, reply)


def cell_of(reader: FenceReader, reply: str) -> Cell | None:
    """The cell in *reply*, all of which *reader* has read.

    That is the first code fence. A reply without one may end in a bare
    statement that sets the answer, such as ``FINAL(x)``: that is a cell too.
    It is found by parsing and evaluated in the REPL like any other.
    """
    fence: Fence | None = reader.found
    if fence is not None:
        return Cell(reader.prose, fence.source, fence.end)
    prose = reader.prose
    for start in list(_FINAL_START.finditer(prose))[-_MAX_STARTS:]:
        source = prose[start.start() :].strip()
        if _sets_answer(source):
            return Cell(prose[: start.start()].strip(), source, len(reply))
    return None


def _sets_answer(source: str) -> bool:
    """Whether *source* is one statement that sets the answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if len(body) != 1:
        return False
    statement = body[0]
    if isinstance(statement, ast.Assign):
        targets = statement.targets
        return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == "Final"
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id in _FINAL_CALLS
    )
