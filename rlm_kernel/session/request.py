"""A run that is asked for."""

from __future__ import annotations

import msgspec

from rlm_kernel.session.settings import Settings

__all__ = ["TASK_QUERY", "Request"]

TASK_QUERY = "P is a task with its material. Do what it asks and set the result as the answer."
"""What a run is asked where only a prompt was given."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was asked for."""

    query: str
    settings: Settings
    depth: int = 0
    parent_run_id: str = ""
    parent_call_id: str = ""
    pickled_tools: bytes = b""
    """Functions of a program for the models of sub-calls; see `Begin.pickled`."""
