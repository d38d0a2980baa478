"""The small model that comes with rlm-kernel: SmolLM2-135M-Instruct by llama.cpp.

It runs on any CPU, without key and network. It can copy a fact out of a
sentence; it cannot classify, count or write code.

The server of xllamacpp would run inside the kernel, too; but its constructor
holds Python's global lock while the model loads, a second in which the kernel
would answer nothing, and a fault in it would take the kernel along. So it
gets a process of its own: one per kernel, however many endpoints ask it,
which ends with the kernel in any case because it reads from a pipe that ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EMBEDDED_MODEL, EndpointSpec
from rlm_kernel.environ import scrub
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.embedded.model_file import Progress, ensure_model, model_path
from rlm_kernel.subcalls.endpoint import Exchange, Reply, ToolSpec
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint
from rlm_kernel.subcalls.server.server_kind import ServerFacts

__all__ = [
    "CONTEXT",
    "SLOTS",
    "EmbeddedEndpoint",
    "EmbeddedServer",
    "embedded_server",
    "ensure_model",
    "model_path",
]

SLOTS = 4
CONTEXT = 2048
"""Tokens of one call, prompt and completion."""

_MISSING = (
    "the embedded model needs xllamacpp, which is not installed: run pip install 'rlm-kernel[demo]'"
)


class EmbeddedEndpoint:
    """The embedded model, loaded with the first call.

    Parameters
    ----------
    progress
        Told of the download, where the model's file is not there yet; called in a thread.
    """

    def __init__(self, *, progress: Progress | None = None) -> None:
        self.spec = f"embedded:{EMBEDDED_MODEL}"
        self.model = EMBEDDED_MODEL
        self.slots: int | None = SLOTS
        self.on_room: Callable[[], None] | None = None
        self._progress = progress
        self._http: OpenAIEndpoint | None = None
        self._server: EmbeddedServer | None = None
        self._starting: asyncio.Task[OpenAIEndpoint] | None = None

    async def start(self) -> None:
        """Get and load the model now rather than with the first call."""
        await self._ready()

    def price(self, model: str) -> Price | None:
        """See `Endpoint.price`: it costs nothing."""
        return Price(input=0, output=0)

    async def complete(
        self,
        prompt: str,
        params: SubcallParams,
        *,
        tools: Sequence[ToolSpec] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """See `Endpoint.complete`."""
        return await (await self._ready()).complete(
            prompt, params, tools=tools, exchanges=exchanges
        )

    async def context_limit(self) -> int | None:
        """See `Endpoint.context_limit`."""
        return CONTEXT

    async def close(self) -> None:
        """See `Endpoint.close`. The model stays loaded for the next endpoint."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        if self._http is not None:
            await self._http.close()

    async def _ready(self) -> OpenAIEndpoint:
        if self._http is not None and self._server is not None and self._server.alive:
            return self._http
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        # Shielded: the calls that wait for the model may be cancelled one by one.
        return await asyncio.shield(self._starting)

    async def _start(self) -> OpenAIEndpoint:
        if self._http is not None:
            await self._http.close()
        self._server = await embedded_server(self._progress)
        spec = EndpointSpec(kind="openai", model=EMBEDDED_MODEL, base_url=self._server.base_url)
        facts = ServerFacts(kind="llamacpp", contexts={EMBEDDED_MODEL: CONTEXT}, any_model=True)
        self._http = OpenAIEndpoint(spec, self._server.api_key, slots=SLOTS, facts=facts)
        return self._http


class EmbeddedServer:
    """A process that serves the model at *path*. The constructor returns once it is loaded.

    Its ``base_url`` and ``api_key`` are those of any OpenAI-compatible server on loopback.
    """

    def __init__(self, path: os.PathLike[str]) -> None:
        self.api_key = secrets.token_hex(16)
        # One core is left to others: the threads wait for each other in every layer, spinning, and
        # where one has no core all stand still (2 threads on 2 busy cores: 7 instead of 51 tokens
        # a second; 1 thread: 28 in either case).
        threads = max(1, min(4, (os.cpu_count() or 1) - 1))
        numbers = (str(number) for number in (SLOTS, CONTEXT, threads))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.server_process", str(path), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=scrub(os.environ),  # a worker could read it from /proc
            start_new_session=True,  # Ctrl-C in a terminal is not for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(self.api_key + "\n")
            self._process.stdin.flush()
        address = self._process.stdout.readline().strip()
        if not address:
            code = self._process.wait()
            self.close()
            raise RLMError(
                f"the embedded model could not be loaded (exit code {code}): "
                f"delete {path} to get it anew, or check the memory that is free"
            )
        self.base_url = f"{address}/v1"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def embedded_server(progress: Progress | None = None) -> EmbeddedServer:
    """The server of this process, started where there is none; it ends with the process.

    Raises
    ------
    UsageError
        xllamacpp is not installed.
    RLMError
        The model cannot be had or loaded.
    """
    return await asyncio.to_thread(_shared_server, progress)


_lock = threading.Lock()
_server: EmbeddedServer | None = None


def _shared_server(progress: Progress | None) -> EmbeddedServer:
    """`embedded_server`, for a thread."""
    global _server  # noqa: PLW0603 -- one per process is the point
    with _lock:
        if _server is not None and _server.alive:
            return _server
        if importlib.util.find_spec("xllamacpp") is None:
            raise UsageError(_MISSING)
        path = ensure_model(progress)
        if _server is not None:
            _server.close()
        else:
            atexit.register(_close_server)
        _server = EmbeddedServer(path)
        return _server


def _close_server() -> None:
    if _server is not None:
        _server.close()
