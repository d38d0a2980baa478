"""What the engine's tests share: a run with its surroundings, and a REPL in this process."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import io
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from rlm_kernel.cells import (
    AnswerSet,
    CellResult,
    ErrorOutput,
    Output,
    PromptInfo,
    Result,
    Stream,
    Value,
)
from rlm_kernel.engine.budget import Budget, Ledger
from rlm_kernel.engine.dialects import PAPER
from rlm_kernel.engine.events import Event
from rlm_kernel.engine.roots import ChatRoot, Message, Root
from rlm_kernel.engine.run import Run
from tests.servers.scripted import ScriptedServer

E = TypeVar("E")


class LocalRepl:
    """Runs cells in this process: an `Executor` for tests of the engine alone.

    A cell may await ``gate`` to stay under way until the test sets it or the run interrupts.
    """

    def __init__(self) -> None:
        self.answer: dict[str, Any] = {"content": "", "ready": False}
        self.gate = asyncio.Event()
        self.names: dict[str, Any] = {"P": "needle in hay", "answer": self.answer}
        self.names.update(FINAL=self._final, hold=self._hold)
        self.seen: list[Message] = []
        self.running = asyncio.Event()
        self.interrupted = False
        self._set: Any = None
        self._how: Any = None

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        self.seen += history
        self._set = self._how = None
        printed = io.StringIO()
        error: ErrorOutput | None = None
        value: list[Output] = []
        with contextlib.redirect_stdout(printed):
            try:
                value = await self._run(source)
            except Exception as raised:
                error = ErrorOutput(
                    type(raised).__name__, str(raised), traceback.format_exception(raised)
                )
        outputs: list[Output] = [Stream("stdout", printed.getvalue())] if printed.getvalue() else []
        return CellResult(
            ok=error is None,
            execution_count=turn,
            outputs=[*outputs, *value],
            error=error,
            answer=self._answer(),
        )

    async def interrupt(self) -> None:
        self.interrupted = True
        self.gate.set()

    async def _run(self, source: str) -> list[Output]:
        tree = ast.parse(source)
        value: list[Output] = []
        for node in tree.body:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            last = node is tree.body[-1] and isinstance(node, ast.Expr)
            part: Any = ast.Expression(node.value) if last else ast.Module([node], [])  # type: ignore[attr-defined]
            code = compile(part, "<cell>", "eval" if last else "exec", flags=flags)
            result = eval(code, self.names)
            if asyncio.iscoroutine(result):
                result = await result
            if last and result is not None:
                value = [Result(1, {"text/plain": repr(result)})]
        return value

    async def _hold(self) -> None:
        self.running.set()
        await self.gate.wait()
        if self.interrupted:
            raise RuntimeError("interrupted")

    def _final(self, value: object) -> None:
        self._set, self._how = value, "FINAL"

    def _answer(self) -> AnswerSet | None:
        if "Final" in self.names:
            self._set, self._how = self.names.pop("Final"), "Final"
        elif self.answer["ready"]:
            self._set, self._how = self.answer["content"], "answer"
            self.answer.update(content="", ready=False)
        if self._how is None:
            return None
        return AnswerSet(self._how, Value(type(self._set).__name__, str(self._set), self._set))


class Stage:
    """A run in the making, and all that it emitted."""

    def __init__(self) -> None:
        self.repl = LocalRepl()
        self.events: list[Event] = []
        self._waiters: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []

    def run(self, root: Root, budget: Budget | None = None, **options: Any) -> Run:
        options.setdefault("dialect", PAPER)
        options.setdefault("executor", self.repl)
        options.setdefault("ledger", Ledger(budget or Budget()))
        return Run(
            run_id="0123456789ab",
            query="Where is the needle?",
            prompt=prompt_info("needle in hay"),
            root=root,
            emit=self._emit,
            sub_spec="openai:small@http://127.0.0.1:1/v1",
            **options,
        )

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        """Names of the events in order, streamed text left out."""
        names = [type(event).__name__ for event in self.events]
        return [name for name in names if name != "ReplyStreamed"]

    async def until(self, kind: type[E], number: int = 1) -> E:
        """Wait for the *number*-th event of this kind."""
        async with asyncio.timeout(20):
            while len(self.of(kind)) < number:
                future = asyncio.get_running_loop().create_future()
                self._waiters.append((lambda event: isinstance(event, kind), future))
                await future
        return self.of(kind)[number - 1]

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        for waiter in list(self._waiters):
            matches, future = waiter
            if matches(event):
                self._waiters.remove(waiter)
                if not future.done():
                    future.set_result(event)


def cell(source: str, prose: str = "Next.") -> str:
    """A reply with a cell."""
    return f"{prose}\n\n```repl\n{source}\n```\n"


def chat(server: ScriptedServer, **options: object) -> ChatRoot:
    """A root behind *server*."""
    return ChatRoot("scripted", server.base_url, "key", backoff=0.001, **options)  # type: ignore[arg-type]


def prompt_info(text: str) -> PromptInfo:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return PromptInfo("str", len(text), 1, digest, text[:100], "hay.txt")


@pytest.fixture
def stage() -> Iterator[Stage]:
    return Stage()
