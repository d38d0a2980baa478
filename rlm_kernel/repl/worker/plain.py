"""Making things fit for the link: what msgpack cannot carry as it is."""

from __future__ import annotations

import datetime
import os
from typing import Any

from rlm_kernel.text import escape_surrogates

__all__ = ["encode_hook", "plain"]


def encode_hook(value: Any) -> Any:
    """What msgspec asks about objects that it does not know: numpy scalars, paths, dates.

    Raises
    ------
    NotImplementedError
        msgspec turns it into a TypeError that names the type.
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, memoryview):
        return bytes(value)
    raise NotImplementedError


def plain(value: Any) -> Any:
    """A copy of *value*, made of builtins, that msgpack can carry for certain."""
    if isinstance(value, str):
        return escape_surrogates(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return hex(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    return value
