"""Which variables a cell made, changed or deleted, told without looking into any."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rlm_kernel.cells import Variable

__all__ = ["Tracker"]

_SIZED = frozenset(
    ("builtins", "collections", "array", "numpy", "pandas", "polars", "pyarrow", "torch", "scipy")
)
"""Top-level modules whose types have a cheap ``len``. That of others may run anything."""

_Mark = tuple[int, str, int | None]


def size_of(value: object) -> int | None:
    """``len(value)`` where that is known to be cheap, else ``None``."""
    kind = type(value)
    if not hasattr(kind, "__len__") or kind.__module__.partition(".")[0] not in _SIZED:
        return None
    try:
        return len(value)  # type: ignore[arg-type]
    except Exception:  # such as that of an array of no dimensions
        return None


class Tracker:
    """The variables of the REPL's namespace as they were last looked at.

    A variable counts as changed when its identity, type or size did. Time and
    memory go with the number of variables, not with what they hold; no
    reference is kept, so a cell can free what it deletes.

    Parameters
    ----------
    namespace
        Of the user's module.
    hidden
        Names that are no variables: those of IPython and of the REPL.
    """

    def __init__(self, namespace: dict[str, Any], hidden: frozenset[str]) -> None:
        self._namespace = namespace
        self._hidden = hidden
        self._marks = self._look()

    def _look(self) -> dict[str, _Mark]:
        hidden = self._hidden
        return {
            name: (id(value), type(value).__name__, size_of(value))
            for name, value in list(self._namespace.items())
            if name[:1] != "_" and name not in hidden and not isinstance(value, ModuleType)
        }

    def changes(self) -> list[Variable]:
        """What changed since the last call."""
        before, now = self._marks, self._look()
        self._marks = now
        found = [
            Variable(name, mark[1], mark[2], "changed" if name in before else "new")
            for name, mark in now.items()
            if before.get(name) != mark
        ]
        found += [
            Variable(name, mark[1], mark[2], "deleted")
            for name, mark in before.items()
            if name not in now
        ]
        return found

    def all(self) -> list[Variable]:
        """All variables there are."""
        return [Variable(name, mark[1], mark[2], "same") for name, mark in self._look().items()]
