"""Starts the kernels that the benchmarks compare, and waits for their messages."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

__all__ = ["RunningKernel"]

_ARGV = {
    "rlm": [sys.executable, "-P", "-m", "rlm_kernel", "-f", "{connection_file}"],
    "ipykernel": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
}


class RunningKernel:
    """A kernel process and a client of it. A context manager.

    Attributes
    ----------
    started_s
        Seconds from the start of the process to the end of its first cell.
    """

    def __init__(self, name: str) -> None:
        self.manager = KernelManager(kernel_name=name)
        self.manager._kernel_spec = KernelSpec(
            argv=_ARGV[name], display_name=name, language="python"
        )
        begin = time.perf_counter()
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.execute("pass")
        self.started_s = time.perf_counter() - begin

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def execute(self, code: str, timeout: float = 120) -> float:
        """Run a cell; returns the seconds until both its reply and its ``idle`` were there.

        Raises
        ------
        RuntimeError
            Where the cell failed.
        """
        begin = time.perf_counter()
        request = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "status" and _is_idle(message):
                break
        reply = self.client.get_shell_msg(timeout=timeout)
        while reply["parent_header"].get("msg_id") != request:
            reply = self.client.get_shell_msg(timeout=timeout)
        seconds = time.perf_counter() - begin
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"cell failed: {reply['content'].get('evalue')}")
        return seconds

    def value(self, expression: str) -> str:
        """``repr`` of *expression* in the kernel."""
        reply = self.client.execute_interactive(
            "", user_expressions={"v": expression}, timeout=60, store_history=False
        )
        return str(reply["content"]["user_expressions"]["v"]["data"]["text/plain"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_idle(message: dict[str, Any]) -> bool:
    return bool(message["content"]["execution_state"] == "idle")
