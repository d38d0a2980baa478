"""Real servers for root and sub-models, in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlm_kernel import RLM
from tests.servers.scripted import ScriptedServer, Step, serve_in_thread

Serve = Callable[..., ScriptedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers: ``serve(script)`` or ``serve(reply=…)``."""
    with ExitStack() as stack:

        def start(script: list[Step | str] | None = None, **kwargs: object) -> ScriptedServer:
            server = ScriptedServer(script or [], **kwargs)  # type: ignore[arg-type]
            return stack.enter_context(serve_in_thread(server))

        yield start


@pytest.fixture
def rlm(serve: Serve, tmp_path: Path) -> Callable[..., RLM]:
    """An `RLM` whose root says the given cells, and whose sub-model echoes."""

    def make(*cells: str, sub: ScriptedServer | None = None, **kwargs: object) -> RLM:
        root = serve([f"```repl\n{cell}\n```" for cell in cells])
        sub = sub or serve(reply=lambda prompt: f"R:{prompt}")
        return RLM(
            root=f"openai:scripted@{root.base_url}",
            sub=f"openai:scripted@{sub.base_url}",
            record=tmp_path / "run.rlm.sqlite",
            **kwargs,  # type: ignore[arg-type]
        )

    return make
