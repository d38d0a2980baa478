"""``python -m rlm_kernel -f CONNECTION_FILE``: run the kernel."""

from __future__ import annotations

import sys


def _forget_folder() -> None:
    """Take the working folder off the path, where ``-m`` without ``-P`` has put it.

    What lies there is the user's, or written by a cell: it must not be imported by the kernel,
    which holds the keys.
    """
    if not sys.flags.safe_path:
        del sys.path[0]


def main() -> None:
    """Start the worker, then read what the kernel itself needs: they come up side by side."""
    _forget_folder()
    from rlm_kernel.repl import Repl

    repl = Repl.spawn()

    from rlm_kernel.kernelapp import RLMKernelApp

    app = RLMKernelApp.instance()
    app.repl = repl
    app.initialize()
    app.start()


if __name__ == "__main__":
    main()
