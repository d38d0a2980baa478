"""The prompt on its way down: a memfd, written in pieces.

At no time does this process hold a second copy of the prompt: it is encoded
some MiB at a time, and the event loop gets a turn after each piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterable

from rlm_kernel.errors import PromptError

__all__ = ["write_memfd"]


async def write_memfd(chunks: Iterable[bytes]) -> int:
    """Write *chunks* to a new memfd, seal it and return its descriptor, which the caller owns.

    Raises
    ------
    PromptError
        There is no memory for it, or no chunk has a byte.
    """
    fd = os.memfd_create("rlm-prompt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        try:
            size = await _write_all(fd, chunks)
        except OSError as error:
            raise PromptError(
                f"The prompt cannot be held in memory ({error.strerror}): use a smaller one."
            ) from error
        if size == 0:
            raise PromptError("The prompt is empty: there is nothing to ask about.")
        # The worker maps it, and would die of SIGBUS were it cut meanwhile.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        undo.pop_all()
    return fd


async def _write_all(fd: int, chunks: Iterable[bytes]) -> int:
    size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        size += len(view)
        while view:
            view = view[os.write(fd, view) :]
        await asyncio.sleep(0)
    return size
