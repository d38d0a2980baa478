"""What ``%rlm COMMAND`` does, and what it answers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlm_kernel.engine.decisions import Decision
from rlm_kernel.errors import UsageError

if TYPE_CHECKING:
    from rlm_kernel.session.notebook import NotebookSession

__all__ = ["answer_command"]


def answer_command(session: NotebookSession, command: str, args: Sequence[str]) -> str:
    """Carry *command* out. Raises `UsageError` for an unknown one, or one that cannot be now."""
    action = _COMMANDS.get(command)
    if action is None:
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"%rlm has no command {command!r}: use {', '.join(_COMMANDS)}{hint}")
    return action(session, args)


def _status(session: NotebookSession, args: Sequence[str]) -> str:
    run = session.run
    if run is None:
        prompt = session.prompt
        loaded = f"P: {prompt.chars:,} characters" if prompt is not None else "no prompt is loaded"
        return f"no run is going on; {loaded}"
    waits = " · waits for your decision: %rlm run, skip, regenerate or stop" if run.proposal else ""
    return f"run {run.run_id} · turn {run.turn} · {run.state}{waits}"


def _pause(session: NotebookSession, args: Sequence[str]) -> str:
    _run(session).pause()
    return "the run pauses before its next cell; %rlm resume lets it go on"


def _resume(session: NotebookSession, args: Sequence[str]) -> str:
    _run(session).resume()
    return "the run goes on"


def _stop(session: NotebookSession, args: Sequence[str]) -> str:
    _run(session).stop(" ".join(args) or "stopped by a person")
    return "the run stops"


def _budget(session: NotebookSession, args: Sequence[str]) -> str:
    lines = [
        f"{name.replace('_', ' '):18} {'no limit' if value is None else f'{value:,}'}"
        for name, value in session.budget().items()
    ]
    return "\n".join(lines)


def _accept(session: NotebookSession, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="run", by="person"))
    return f"turn {run.turn} runs"


def _skip(session: NotebookSession, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="skip", by="person", note=" ".join(args)))
    return f"turn {run.turn} is skipped"


def _regenerate(session: NotebookSession, args: Sequence[str]) -> str:
    run = session.decide(Decision(action="regenerate", by="person", note=" ".join(args)))
    return f"the root is asked for turn {run.turn} again"


def _edit(session: NotebookSession, args: Sequence[str]) -> str:
    source = "\n".join(args)
    if not source.strip():
        raise UsageError("%%rlm edit needs the new source: write it below the line")
    run = session.decide(Decision(action="edit", by="person", source=source))
    return f"turn {run.turn} runs with your source"


def _run(session: NotebookSession):  # type: ignore[no-untyped-def]
    if session.run is None:
        raise UsageError("no run is going on; start one with %%rlm")
    return session.run


_COMMANDS: dict[str, Callable[[NotebookSession, Sequence[str]], str]] = {
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
