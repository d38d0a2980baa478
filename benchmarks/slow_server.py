"""A server that takes its time over each completion, fails some, and tells how many it works on.

Run as a process of its own, ``slow_server.py SECONDS FAIL_EVERY``; it prints its port and ends when
its standard input closes. ``GET /running`` answers with the number of completions under way. Like
vLLM it gives one up where the client goes away. Of FAIL_EVERY requests one is refused for good; 0
refuses none.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from benchmarks.zero_latency import MODELS, REPLY, response

_REFUSED = b'{"error": {"message": "refused"}}'
REFUSAL = response(_REFUSED).replace(b"200 OK", b"400 Bad Request")


class Slow:
    """The server's connections, and what is under way on them."""

    def __init__(self, seconds: float, fail_every: int) -> None:
        self._seconds = seconds
        self._fail_every = fail_every
        self._numbers = count(1)
        self._running = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it closes."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length:" in head:
                    size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                    await reader.readexactly(size)
                writer.write(await self._answer(head, reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        if head.startswith(b"get /running"):
            return response(str(self._running).encode())
        if head.startswith(b"get"):
            return response(MODELS)
        if self._fail_every and next(self._numbers) % self._fail_every == 0:
            return REFUSAL
        self._running += 1
        try:
            await self._think(reader)
        finally:
            self._running -= 1
        return response(REPLY)

    async def _think(self, reader: asyncio.StreamReader) -> None:
        """Take the time of a completion, unless the client goes away."""
        # A client that waits for its reply sends nothing: whatever comes is the end.
        gone = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait([gone], timeout=self._seconds)
        gone.cancel()
        await asyncio.wait([gone])
        if done:
            raise ConnectionError


async def main() -> None:
    slow = Slow(float(sys.argv[1]), int(sys.argv[2]))
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
