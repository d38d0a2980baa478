"""The end of a kernel process."""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests.kernel.client import TIMEOUT_S

_LATE = '''
import threading, time
from collections import deque
from rlm_kernel.kernel import RLMKernel
from rlm_kernel.kernelapp import RLMKernelApp
from rlm_kernel.repl import Repl

class Late(deque):
    """Lets the control thread's last message wait until nothing is there to send it through."""
    armed = False
    def append(self, event):
        if self.armed and threading.current_thread() is app.control_thread:
            pipe, until = app.iopub_thread._event_pipe, time.monotonic() + 1
            while not pipe.closed and time.monotonic() < until:
                time.sleep(0.01)
            print("was late", flush=True)
        super().append(event)

class LateKernel(RLMKernel):
    def _publish_status_and_flush(self, status, channel, *args, **kwargs):
        late.armed = channel == "control" and self._ending
        super()._publish_status_and_flush(status, channel, *args, **kwargs)

repl = Repl.spawn()
app = RLMKernelApp.instance(kernel_class=LateKernel)
app.repl = repl
app.initialize()
late = app.iopub_thread._events = Late(app.iopub_thread._events)
app.start()
'''


def test_the_control_thread_ends_before_what_it_sends_through(tmp_path: Path) -> None:
    """Else its last message, that the shutdown is over, fails with a traceback."""
    script, out, err = tmp_path / "late.py", tmp_path / "out", tmp_path / "err"
    script.write_text(_LATE)
    manager = KernelManager(kernel_name="rlm")
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, str(script), "-f", "{connection_file}"], display_name="late"
    )
    with out.open("wb") as stdout, err.open("wb") as stderr:
        manager.start_kernel(stdout=stdout, stderr=stderr)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=TIMEOUT_S)
        finally:
            client.stop_channels()
            manager.shutdown_kernel()

    assert out.read_text() == "was late\n"
    assert "Traceback" not in err.read_text()
