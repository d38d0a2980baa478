"""A cell under way, from its order to its result; and what was known of the variables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from rlm_kernel.cells import AnswerSet, CellResult, ErrorOutput, Output, Variable
from rlm_kernel.errors import RLMError, WorkerDied
from rlm_kernel.repl.messages import Done
from rlm_kernel.repl.output import Collector, Unshowable, bounded_error, plain
from rlm_kernel.values import received

__all__ = ["Cell", "Executed", "Inventory", "loss_sentence"]

T = TypeVar("T")

_NAMED = 10
"""Lost variables that a message names; the rest are counted."""


class Executed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one `Repl.execute`."""

    cell: int
    """Id under which its output and requests went."""

    result: CellResult
    user_expressions: dict[str, Any] = {}
    """By name, as Jupyter's protocol has them."""

    payload: list[dict[str, Any]] = []


class Cell:
    """A cell that runs. Its end is the future `over`."""

    def __init__(
        self,
        cell_id: int,
        forward: Callable[[Output], None],
        *,
        limit: int,
        allow_stdin: bool,
        silent: bool,
    ) -> None:
        self.id = cell_id
        self.allow_stdin = allow_stdin
        self.collector = Collector(forward, limit)
        self.over: asyncio.Future[Executed] = asyncio.get_running_loop().create_future()
        self._silent = silent
        self._started = time.monotonic()

    def tell(self, text: str) -> bool:
        """Show *text* on stderr, unless the cell is one that shows nothing."""
        if not self._silent:
            self.collector.note(text)
        return not self._silent

    def finish(self, done: Done) -> None:
        """The worker says that it ended."""
        error = None if done.error is None else bounded_error(done.error)
        if error is not None and not self._silent and not self.collector.has_error():
            self.collector.add(error)
        expressions = self._plain("what its user expressions gave", done.user_expressions, {})
        payload = self._plain("the payload of this cell", done.payload, [])
        seconds = _within(done.seconds, time.monotonic() - self._started)
        result = CellResult(
            ok=done.ok,
            execution_count=done.execution_count,
            dropped_chars=self._note_dropped(done.dropped_chars),
            outputs=self.collector.outputs(),
            error=error,
            variables=done.variables,
            restored=done.restored,
            answer=_received(done.answer),
            seconds=seconds,
            waited_s=_within(done.waited_s, seconds),
        )
        self._end(result, expressions, payload)

    def fail(self, error: RLMError, *, execution_count: int = 0, worker_lost: str = "") -> None:
        """It ended, or never began, without a word from the worker."""
        name = type(error).__name__
        shown = ErrorOutput(name, str(error), [f"\x1b[31m{name}\x1b[39m: {error}"])
        self.collector.add(shown)
        result = CellResult(
            ok=False,
            execution_count=execution_count,
            dropped_chars=self._note_dropped(0),
            outputs=self.collector.outputs(),
            error=shown,
            seconds=time.monotonic() - self._started,
            worker_lost=worker_lost,
        )
        self._end(result, {}, [])

    def _plain(self, what: str, value: T, nothing: T) -> T:
        try:
            found: T = plain(value)
        except Unshowable as why:
            if not self._silent:
                self.collector.refuse(what, why)
            return nothing
        return found

    def _note_dropped(self, by_worker: int) -> int:
        dropped = self.collector.dropped + by_worker
        if dropped and not self._silent:
            self.collector.note(f"[{dropped:,} more characters of output are not shown]\n")
        return dropped

    def _end(
        self, result: CellResult, expressions: dict[str, Any], payload: list[dict[str, Any]]
    ) -> None:
        if not self.over.done():
            self.over.set_result(
                Executed(cell=self.id, result=result, user_expressions=expressions, payload=payload)
            )


class Inventory:
    """The variables that the worker holds, as far as its reports tell."""

    def __init__(self) -> None:
        self.has_prompt = False
        self._variables: dict[str, Variable] = {}

    def update(self, changes: Iterable[Variable]) -> None:
        """Take in what a cell changed."""
        for variable in changes:
            if variable.change == "deleted":
                self._variables.pop(variable.name, None)
            else:
                self._variables[variable.name] = variable

    def names(self) -> list[str]:
        """What is lost when the worker ends, the prompt first."""
        return [*(["P"] if self.has_prompt else []), *sorted(self._variables)]

    def variables(self) -> list[Variable]:
        """The variables as last reported."""
        same = (msgspec.structs.replace(v, change="same") for v in self._variables.values())
        return sorted(same, key=lambda variable: variable.name)


def _within(seconds: float, most: float) -> float:
    """*seconds*, where they can be: the worker says so, and they are counted and written out."""
    return seconds if 0 <= seconds <= most else most  # a NaN is not between any two numbers


def _received(answer: AnswerSet | None) -> AnswerSet | None:
    return None if answer is None else AnswerSet(answer.how, received(answer.value))


def loss_sentence(reason: str, lost: Sequence[str]) -> WorkerDied:
    """Return the error that tells a person what ended the worker and what went with it."""
    if not lost:
        return WorkerDied(f"The worker {reason}; it held no variables of earlier cells.")
    names = ", ".join(lost[:_NAMED])
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return WorkerDied(
        f"The worker {reason}, and what it held is lost ({names}{more}): run the cells that make"
        " it again."
    )
