"""Calls of the REPL to its owner: a defect of the owner's is reported and breaks nothing here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["guarded", "report"]


def guarded(callback: Callable[..., None] | None) -> Callable[..., None]:
    """Return *callback* so that a defect in it cannot break the link's bookkeeping."""
    if callback is None:
        return _ignore

    def call(*args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:  # reported as asyncio reports those of its own callbacks
            report(error)

    return call


def report(error: Exception) -> None:
    """Hand *error* to the event loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "The REPL's owner or supervisor failed", "exception": error}
    )


def _ignore(*_: object) -> None:
    pass
