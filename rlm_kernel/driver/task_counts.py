"""How often the replies to a typed sub-task were values of it, and how that reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TaskCounts", "count_verdict", "task_lines"]

_LINES = 5
"""Sub-tasks that are told of by name; code can make up a name for every call."""

_MAX_NAME = 60


@dataclass(slots=True)
class TaskCounts:
    """Replies to one typed sub-task, second tries included."""

    judged: int = 0
    unfit: int = 0
    """Of those judged, those that were no value of it."""


def count_verdict(tasks: dict[str, TaskCounts], task: str, *, ok: bool) -> None:
    """Another reply to *task* was judged."""
    counts = tasks.setdefault(task, TaskCounts())
    counts.judged += 1
    counts.unfit += not ok


def task_lines(tasks: Mapping[str, TaskCounts]) -> list[str]:
    """A line for each of *tasks*, the worst first."""
    worst = sorted(tasks.items(), key=lambda item: (-item[1].unfit, -item[1].judged))
    lines = [_line(task, counts) for task, counts in worst[:_LINES]]
    if len(worst) > _LINES:
        lines.append(f"{len(worst) - _LINES:,} more sub-tasks")
    return lines


def _line(task: str, counts: TaskCounts) -> str:
    name = " ".join(task.split())
    shown = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
    replies = f"{counts.judged:,} repl{'y' if counts.judged == 1 else 'ies'}"
    rate = f"{counts.unfit:,} unfit ({counts.unfit / counts.judged:.0%})"
    return f"sub-task {shown}: {replies}, {rate if counts.unfit else 'all fit'}"
