"""Functions of a program on their way into the REPL's process."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlm_kernel.errors import UsageError

__all__ = ["pickled"]

_MOST = 32 << 20
"""Bytes, half of what a frame of the link may have."""

_INSTALLED = tuple(
    {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

# What goes by value is a table of cloudpickle's module.
_lock = threading.Lock()


def pickled(functions: Sequence[Callable[..., Any]]) -> bytes:
    """*functions* as a list that cloudpickle wrote.

    What is defined in the program itself goes as it is, with what it refers to; what is installed
    goes by its name. The REPL may run where the program's folder is not on its path.

    Raises
    ------
    UsageError
        One refers to what cannot be copied into another process, or to too much.
    """
    import cloudpickle

    with _lock, _by_value(cloudpickle, functions):
        try:
            data: bytes = cloudpickle.dumps(list(functions))
        except Exception as error:  # of any object that a function refers to
            raise UsageError(
                f"the tools cannot be copied into the REPL ({type(error).__name__}: {error}): let "
                "them open files, locks and connections themselves"
            ) from None
    if len(data) > _MOST:
        raise UsageError(
            f"the tools refer to {len(data) >> 20:,} MiB of data, more than the {_MOST >> 20} MiB "
            "that can go with them: let them load it themselves"
        )
    return data


@contextmanager
def _by_value(cloudpickle: Any, functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    modules = {getattr(function, "__module__", None) for function in functions}
    known = set(cloudpickle.list_registry_pickle_by_value())
    own = [
        module
        for name in modules - known
        if (module := sys.modules.get(name or "")) is not None and not _is_installed(module)
    ]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(folder) for folder in _INSTALLED)
