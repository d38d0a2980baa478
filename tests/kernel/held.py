"""A sub-model whose replies are held back until a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.kernel.client import TIMEOUT_S
from tests.servers.scripted import ScriptedServer


class Held:
    """A server that answers when it was released, and a prompt that says so ``now``.

    The reply is the prompt after ``R:``.
    """

    def __init__(self) -> None:
        self.server = ScriptedServer(reply=self._reply)
        self.latency_s = 0.0
        """Seconds that each reply takes when nothing holds it back."""

        self._released = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def release(self) -> None:
        """Answer all that wait, and what comes from now on."""
        if self._loop is None:
            self._released.set()  # nothing waits for it
        else:
            self._loop.call_soon_threadsafe(self._released.set)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until *condition* holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"active: {self.server.active}"
            time.sleep(0.01)

    def until_idle(self) -> None:
        """Wait until no request is under way."""
        self.until(lambda: self.server.active == 0)

    @property
    def spec(self) -> str:
        """As ``--sub`` takes it."""
        return f"openai:scripted@{self.server.base_url}"

    async def _reply(self, prompt: str) -> str:
        self._loop = asyncio.get_running_loop()
        if "now" not in prompt:
            await self._released.wait()
        await asyncio.sleep(self.latency_s)
        return f"R:{prompt}"
