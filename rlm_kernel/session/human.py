"""A person as the root: each cell that they execute is the proposal of the next turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rlm_kernel.cells import CellResult
from rlm_kernel.engine.events import RunEnded
from rlm_kernel.engine.roots import HumanRoot, Message
from rlm_kernel.errors import RLMError
from rlm_kernel.repl import Executed

__all__ = ["HumanExecutor"]

RunTurn = Callable[[int, Sequence[Message]], Awaitable[Executed]]


class HumanExecutor:
    """Joins the engine, which asks for turns, to the cells that a person executes.

    The cell is there first: it is submitted to the root as its proposal, and
    when the engine then asks for that turn to be executed, the cell that is
    already open does it.
    """

    def __init__(self, root: HumanRoot) -> None:
        self._root = root
        self._asked: asyncio.Queue[tuple[int, Sequence[Message], asyncio.Future[CellResult]]] = (
            asyncio.Queue()
        )

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        """Called by the engine: wait until the person's cell has run as *turn*."""
        done: asyncio.Future[CellResult] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((turn, history, done))
        return await done

    async def interrupt(self) -> None:
        """The person interrupts their own cell at the front end."""

    async def turn(self, code: str, run: asyncio.Task[RunEnded], execute: RunTurn) -> Executed:
        """Called for a cell of the person's: propose it, and run it when the engine asks.

        Raises `RLMError` where the run ends before it takes the cell.
        """
        self._root.submit(code)
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait([asked, run], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            raise RLMError("the run ended before this cell; execute it again outside the run")
        turn, history, done = asked.result()
        try:
            executed = await execute(turn, history)
        except BaseException as error:
            done.set_exception(error)
            raise
        done.set_result(executed.result)
        return executed
