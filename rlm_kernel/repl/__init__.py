"""The REPL room: a worker process that runs cells, seen from the trusted kernel process.

    repl            `Repl`, what other rooms use; `cell` and `output` are its parts
    incoming        what comes from the worker, sorted to who waits for it
    tree            supervisor and live worker, replaced as they end
    processes       kernel's side of the supervisor;  supervisor: the process itself
    live            one worker: its `link`, its `pipes`, its open `requests`
    messages        the protocol of the link;  frames: how much a frame may hold
    worker          what runs in the worker process; never imported here

This package knows no models and no Jupyter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlm_kernel.lazy import lazily

if TYPE_CHECKING:
    from rlm_kernel.errors import LinkError, WorkerDied
    from rlm_kernel.repl.cell import Executed
    from rlm_kernel.repl.handler import Nobody, ReplHandler
    from rlm_kernel.repl.output import MAX_OUTPUT
    from rlm_kernel.repl.repl import Repl

__all__ = [
    "MAX_OUTPUT",
    "Executed",
    "LinkError",
    "Nobody",
    "Repl",
    "ReplHandler",
    "WorkerDied",
]

_HOMES = {
    "LinkError": "rlm_kernel.errors",
    "WorkerDied": "rlm_kernel.errors",
    "Executed": "rlm_kernel.repl.cell",
    "Nobody": "rlm_kernel.repl.handler",
    "ReplHandler": "rlm_kernel.repl.handler",
    "MAX_OUTPUT": "rlm_kernel.repl.output",
    "Repl": "rlm_kernel.repl.repl",
}

# The worker is in this package too, and must not pay for the kernel's side.
__getattr__ = lazily(__name__, _HOMES)
