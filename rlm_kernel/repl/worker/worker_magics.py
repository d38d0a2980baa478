"""What the magics of the REPL have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics

if TYPE_CHECKING:
    from rlm_kernel.repl.worker.worker import Worker

__all__ = ["WorkerMagics"]


class WorkerMagics(Magics):
    """Magics that act on the worker whose shell they are in."""

    @property
    def _worker(self) -> Worker:
        worker: Worker = self.shell.worker  # type: ignore[union-attr]
        return worker

    @property
    def _namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = self._worker.shell.user_ns
        return namespace
