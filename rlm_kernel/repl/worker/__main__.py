"""Start of the worker process: ``python -P -m rlm_kernel.repl.worker FD``."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """SIGKILL once the supervisor is gone, also in the middle of code that never returns."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it went before the signal was ordered


def main(argv: list[str]) -> None:
    """Serve the link at the file descriptor that ``argv[1]`` names."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until there is a cell to interrupt
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True, chain=False)

    from rlm_kernel.repl.worker.interrupts import Interrupts
    from rlm_kernel.repl.worker.link import Link
    from rlm_kernel.repl.worker.worker import Worker

    interrupts = Interrupts()
    link = Link(socket.socket(fileno=int(argv[1])), interrupts)
    try:
        Worker(link, interrupts).serve()
    except BaseException:
        # A defect of ours. sys.stderr goes up the link, where nobody may listen any more.
        import traceback

        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
        os._exit(1)


if __name__ == "__main__":
    # IPython puts the user's module in the place of this one, whose globals must live on.
    _this = sys.modules["__main__"]
    main(sys.argv)
