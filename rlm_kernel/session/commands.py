"""What ``%rlm COMMAND`` does, and what it answers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Protocol

from rlm_kernel.budget_view import BudgetView, as_text
from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.decisions import Decision
from rlm_kernel.engine.run import Run
from rlm_kernel.errors import UsageError

__all__ = ["HARMLESS", "Steered", "answer_command"]

HARMLESS = ("status", "budget")
"""Commands that change nothing."""

_ALONE = (*HARMLESS, "pause", "resume", "run")
"""Commands that take no words."""


class Steered(Protocol):
    """What the commands act on."""

    run: Run | None
    prompt: PromptInfo | None

    def budget(self) -> BudgetView:
        """What is used, set aside and left."""

    def decide(self, decision: Decision) -> Run:
        """Decide about the proposal that waits. Raises `UsageError` where none does."""


def answer_command(session: Steered, command: str, args: Sequence[str]) -> str:
    """Carry *command* out. Raises `UsageError` for an unknown one, or one that cannot be now."""
    action = _COMMANDS.get(command)
    if action is None:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"%rlm has no command {command!r}: use {', '.join(_COMMANDS)}{hint}")
    if args and command in _ALONE:
        # Such as a limit: who set one so would believe that it holds.
        raise UsageError(f"%rlm {command} stands alone: leave {' '.join(args)!r} out")
    return action(session, args)


def _status(session: Steered, args: Sequence[str]) -> str:
    run = session.run
    if run is None:
        prompt = session.prompt
        loaded = f"P: {prompt.chars:,} characters" if prompt is not None else "no prompt is loaded"
        return f"no run is going on; {loaded}"
    waits = " · waits for your decision: %rlm run, skip, regenerate or stop" if run.proposal else ""
    return f"run {run.run_id} · turn {run.turn} · {run.state}{waits}"


def _pause(session: Steered, args: Sequence[str]) -> str:
    _run(session).pause()
    return "the run pauses before its next cell; %rlm resume lets it go on"


def _resume(session: Steered, args: Sequence[str]) -> str:
    _run(session).resume()
    return "the run goes on"


def _stop(session: Steered, args: Sequence[str]) -> str:
    _run(session).stop(" ".join(args) or "stopped by a person")
    return "the run stops"


def _budget(session: Steered, args: Sequence[str]) -> str:
    return as_text(session.budget())


def _accept(session: Steered, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="run", by="person"))
    return f"turn {run.turn} runs"


def _skip(session: Steered, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="skip", by="person", note=" ".join(args)))
    return f"turn {run.turn} is skipped"


def _regenerate(session: Steered, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="regenerate", by="person", note=" ".join(args)))
    return f"the root is asked for turn {run.turn} again"


def _edit(session: Steered, args: Sequence[str]) -> str:
    source = "\n".join(args)
    if not source.strip():
        raise UsageError("%%rlm edit needs the new source: write it below the line")
    run = session.decide(Decision(action="edit", by="person", source=source))
    return f"turn {run.turn} runs with your source"


def _run(session: Steered) -> Run:
    if session.run is None:
        raise UsageError("no run is going on; start one with %%rlm")
    return session.run


_COMMANDS: dict[str, Callable[[Steered, Sequence[str]], str]] = {
    "status": _status,
    "pause": _pause,
    "resume": _resume,
    "stop": _stop,
    "budget": _budget,
    "run": _accept,
    "edit": _edit,
    "skip": _skip,
    "regenerate": _regenerate,
}
