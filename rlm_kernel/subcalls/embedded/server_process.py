"""The process that serves the embedded model. Run by `embedded`, not by people.

``python -m rlm_kernel.subcalls.embedded.server_process MODEL SLOTS CONTEXT THREADS``
reads its key from the first line of stdin, writes its address to stdout and
serves until stdin ends: whatever becomes of the parent, nothing stays behind.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    model, slots, context, threads = arguments
    key = sys.stdin.readline().strip()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = int(slots)
    params.n_ctx = int(slots) * int(context)
    params.cpuparams.n_threads = int(threads)
    params.api_keys = [key]
    params.verbosity = 0
    params.ui = False
    params.endpoint_slots = False
    # Fitting to the memory of a GPU costs a third of the start, and there is nothing to fit.
    params.fit_params = False
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    # Without the teardown of the library, which waits for requests under way.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
