"""Decisions at the pause point, and who takes them.

A run pauses in one place only: between "the root proposed a cell" and "the
cell runs". A `Policy` looks at the proposal and decides, or returns ``None``
to wait for a person's `Decision`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from rlm_kernel.engine.events import Action, RunState

__all__ = ["Decision", "Policy", "Proposal", "RunControl", "ask", "automatic"]


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that the root wants to run."""

    turn: int
    source: str
    prose: str = ""
    attempt: int = 1


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to happen with a proposal."""

    action: Action
    by: str = "policy"
    source: str | None = None
    """The source to run instead, with ``edit``."""

    note: str = ""
    """Told to the root, with ``regenerate`` and ``skip``."""


Policy = Callable[[Proposal], Decision | None]


def automatic(proposal: Proposal) -> Decision | None:
    """Run every proposal as it is."""
    return Decision(action="run")


def ask(proposal: Proposal) -> Decision | None:
    """Wait for a person at every proposal: stepping."""
    return None


class RunControl(Protocol):
    """What a person can do to a run, from a front end or a magic."""

    @property
    def run_id(self) -> str: ...
    @property
    def state(self) -> RunState: ...
    @property
    def turn(self) -> int: ...
    @property
    def proposal(self) -> Proposal | None:
        """The proposal that waits for a decision."""

    def decide(self, decision: Decision) -> None:
        """Decide about the waiting proposal. Raises `UsageError` where none waits."""

    def pause(self) -> None:
        """Ask at the next proposal, and from then on at each."""

    def resume(self) -> None:
        """Let the policy decide again; a proposal that waits is run."""

    def stop(self, reason: str) -> None:
        """End the run as soon as possible: the stream of the root is cut, no cell is started."""
