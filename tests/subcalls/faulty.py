"""A scripted server in a process of its own, that fails now and then and may be killed.

    python -m tests.subcalls.faulty PORT

It answers ``re: PROMPT`` after a few milliseconds. Of 150 requests one fails with 500, one is cut
and one is refused with 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.servers.scripted import Cut, Refuse, ScriptedServer, Step

SERVICE_S = 0.004
_FAULTS: dict[int, Step] = {
    20: Refuse(500, "a bug"),
    70: Cut(),
    120: Refuse(429, headers={"Retry-After": "0.05"}),
}


class FaultyProcess:
    """The process, from its first to its last."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.subcalls.faulty", str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.base_url = self._process.stdout.readline().strip()
        assert self.base_url, "the server did not start"

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":", 1)[1].split("/")[0])

    def kill(self) -> None:
        """SIGKILL: it says nothing to its clients."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def faulty_processes(number: int) -> Iterator[list[FaultyProcess]]:
    """So many of them; whatever is in the list at the end is killed."""
    processes: list[FaultyProcess] = []
    try:
        processes += [FaultyProcess() for _ in range(number)]
        yield processes
    finally:
        for process in processes:
            process.kill()


async def _serve(port: int) -> None:
    numbers = itertools.count()

    async def reply(prompt: str) -> str | Step:
        await asyncio.sleep(SERVICE_S)
        return _FAULTS.get(next(numbers) % 150, f"re: {prompt}")

    async with contextlib.AsyncExitStack() as stack:
        server = ScriptedServer(reply=reply)
        await server.start(port)
        stack.push_async_callback(server.close)
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
