"""``python -m rlm_kernel -f CONNECTION_FILE``: run the kernel."""

from __future__ import annotations


def main() -> None:
    """Start the worker, then read what the kernel itself needs: they come up side by side."""
    from rlm_kernel.repl import Repl

    repl = Repl.spawn()

    from rlm_kernel.kernel import RLMKernelApp

    app = RLMKernelApp.instance()
    app.repl = repl
    app.initialize()
    app.start()


if __name__ == "__main__":
    main()
