"""Who answers what code in a cell asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlm_kernel.budget_view import BudgetView
from rlm_kernel.cells import Output, PromptInfo
from rlm_kernel.errors import RLMError, SubcallError, UsageError
from rlm_kernel.repl.messages import (
    CommFromWorker,
    JudgeSubcalls,
    RunCommand,
    SendSubcalls,
    StartRun,
    SubcallResult,
)

__all__ = ["Nobody", "ReplHandler"]


class ReplHandler(Protocol):
    """The owner of a REPL. Everything is called on the REPL's event loop.

    An `RLMError` from a method that answers is raised in the cell.
    """

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        """Ask the person for a line. ``None`` is end of file. Cancelled by an interrupt."""

    def subcalls(
        self,
        request: SendSubcalls,
        deliver: Callable[[list[SubcallResult]], None],
        fail: Callable[[RLMError], None],
    ) -> Callable[[], None]:
        """Start the sub-calls of a batch, and return what cancels the rest of them.

        Results go to *deliver* as they come, in any order and grouping; *fail*
        ends the whole batch. Both do nothing once the batch is over.
        """

    def judge_subcalls(self, message: JudgeSubcalls) -> None:
        """Replies of a typed sub-task were checked."""

    def budget(self) -> BudgetView:
        """What ``budget()`` shows."""

    def prompt_set(self, prompt: PromptInfo) -> None:
        """A person's cell loaded or rebound ``P``."""

    async def start_run(self, request: StartRun) -> str:
        """``%%rlm``. The text is for the person."""

    async def run_command(self, request: RunCommand) -> str:
        """``%rlm COMMAND``. The text is for the person."""

    def comm(self, message: CommFromWorker) -> None:
        """A widget's message to the front end."""

    def output(self, cell: int, output: Output) -> None:
        """Output while no cell runs, of the task or child process that *cell* left behind."""

    def keeps_prompt(self) -> bool:
        """Whether the owner loads ``P`` again where a worker is lost, so that it is not."""

    def worker_lost(self, reason: str, lost: list[str]) -> None:
        """The worker ended unasked. *lost* are the variables that it held, with ``P`` where it
        is not kept."""


class Nobody:
    """The owner of a REPL that has none: refuses what needs one."""

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        return None

    def subcalls(
        self,
        request: SendSubcalls,
        deliver: Callable[[list[SubcallResult]], None],
        fail: Callable[[RLMError], None],
    ) -> Callable[[], None]:
        fail(SubcallError("No model is set for sub-calls: give one with --sub."))
        return lambda: None

    def judge_subcalls(self, message: JudgeSubcalls) -> None:
        pass

    def budget(self) -> BudgetView:
        return BudgetView()

    def prompt_set(self, prompt: PromptInfo) -> None:
        pass

    async def start_run(self, request: StartRun) -> str:
        raise UsageError("This REPL has no engine to start a run with.")

    async def run_command(self, request: RunCommand) -> str:
        raise UsageError("This REPL has no engine to give commands to.")

    def comm(self, message: CommFromWorker) -> None:
        pass

    def output(self, cell: int, output: Output) -> None:
        pass

    def keeps_prompt(self) -> bool:
        return False

    def worker_lost(self, reason: str, lost: list[str]) -> None:
        pass
