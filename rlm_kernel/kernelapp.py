"""Launches the kernel, without what only an in-process REPL needs."""

from __future__ import annotations

import gc
from typing import Any

import zmq
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from traitlets import Type

from rlm_kernel.repl import Repl

__all__ = ["RLMKernelApp"]


class RLMKernelApp(IPKernelApp):
    """Launches `RLMKernel`, without what only an in-process REPL needs."""

    name = "rlm-kernel"
    kernel_class = Type("rlm_kernel.kernel.RLMKernel", klass=Kernel)
    repl: Repl

    def initialize(self, argv: Any = None) -> None:
        """Leave what is loaded now out of garbage collections: none of it will ever be garbage,
        and to look at it again holds the event loop up for tens of milliseconds."""
        super().initialize(argv)
        gc.freeze()

    def start(self) -> None:
        """Serve until the kernel is shut down, and let the control thread say that it is.

        What it says that through is closed at exit (`IOPubThread` sees to it), which may be before
        it has: `close` waits for that thread, but comes after.
        """
        try:
            super().start()
        finally:
            if self.control_thread is not None and self.control_thread.is_alive():
                self.control_thread.stop()
                self.control_thread.join()

    def init_control(self, context: Any) -> None:
        """Without a shell-channel thread: it costs a hop per message and serves subshells only."""
        super().init_control(context)
        self.shell_channel_thread = None

    def init_iopub(self, context: Any) -> None:
        """Without a mark beyond which ZeroMQ drops messages, the end of a cell among them.

        Output is bounded before it comes here, so what can wait is bounded, too.
        """
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)

    def init_io(self) -> None:
        """Leave this process's streams alone: what cells print comes over the link."""
        self.displayhook = _NoDisplayHook()

    def init_pdb(self) -> None:
        """Debugging happens in the worker."""

    def init_path(self) -> None:
        """Nothing of the user's is imported here."""

    def init_gui_pylab(self) -> None:
        """Figures are drawn in the worker."""

    def init_extensions(self) -> None:
        """Extensions are loaded in the worker."""

    def init_code(self) -> None:
        """No code runs here."""


class _NoDisplayHook:
    get_execution_count: Any = None
