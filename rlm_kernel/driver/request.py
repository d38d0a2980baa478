"""What the headless host is asked to run, what it tells meanwhile, and what it came to."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Protocol

import msgspec

from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.driver.protocol import Final, Operation

__all__ = ["Listener", "Outcome", "RunRequest", "Silent"]


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run."""

    prompt: str
    """A file, a folder or a glob pattern, as ``%prompt`` takes it."""

    query: str
    options: dict[str, str]
    """Options of ``%%rlm`` by long name without dashes, such as ``max-turns``; one that takes no
    value has an empty one."""

    def opening_cells(self) -> list[tuple[str, str, str]]:
        """Id, kind and source of the cells that start the run."""
        options = "".join(
            f" --{name} {shlex.quote(value)}" if value else f" --{name}"
            for name, value in self.options.items()
        )
        return [
            ("query", "markdown", _quoted(self.query)),
            ("prompt", "code", f"%prompt {_as_typed(self.prompt)}"),
            ("start", "code", f"%%rlm{options}\n{self.query}"),
        ]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended."""

    final: Final | None
    """``None`` where a person ended it before it could end itself."""

    interrupted: bool
    seconds: float
    notebook: Path | None
    unsaved: str = ""
    """Why the notebook could not be saved; empty where it was."""


class Listener(Protocol):
    """What is told of a run as it goes: a view of it."""

    def operation(self, op: Operation) -> None:
        """The kernel said this."""

    def subcalls(self, tally: Tally | None) -> None:
        """How far the sub-calls of the cell under way are; ``None`` when that is over."""

    def note(self, text: str) -> None:
        """The host has something to say, in one line."""


class Silent:
    """A listener that shows nothing."""

    def operation(self, op: Operation) -> None:
        """Nothing is shown."""

    def subcalls(self, tally: Tally | None) -> None:
        """Nothing is shown."""

    def note(self, text: str) -> None:
        """Nothing is shown."""


def _quoted(query: str) -> str:
    """The query as a block quote of Markdown, so that nothing in it is taken as a heading."""
    return "\n".join(f"> {line}" for line in query.splitlines())


def _as_typed(prompt: str) -> str:
    """A path as it stands behind ``%prompt``, which takes the rest of the line as it is.

    Quotes are for a path that would lose something at its ends, be taken for an option, or
    for a question to IPython.
    """
    stripped = prompt.strip() != prompt or prompt[0] in "'\"-"
    return f'"{prompt}"' if stripped or prompt.endswith("?") else prompt
