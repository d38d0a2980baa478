"""The entry point of ``jupyter rlm``.

It reads nothing that takes time before Ctrl-C is in hand: a person may press it
at once, and then gets a line and no traceback. The rest is in
`rlm_kernel.app.commands`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    argparse's own exits (``--help``, ``--version``) pass through as `SystemExit`.
    """
    early = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if early:
        # An exception in the middle of an import may be lost, and nothing is to be tidied up yet.
        signal.signal(signal.SIGINT, _leave)
    from rlm_kernel.app.commands import perform, prepared

    command = prepared(argv)
    if early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return perform(command)


def _leave(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"jupyter rlm: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
