"""What comes from the worker, sorted to who waits for it.

Kept apart from `Repl` so that what is asked and what arrives can be read one
at a time. Everything here runs on the event loop, between two awaits.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from rlm_kernel.cells import Output
from rlm_kernel.errors import LinkError, UsageError
from rlm_kernel.repl.callbacks import guarded, report
from rlm_kernel.repl.cell import Cell, Inventory, loss_sentence
from rlm_kernel.repl.handler import Nobody, ReplHandler
from rlm_kernel.repl.live import Worker
from rlm_kernel.repl.messages import (
    CancelSubcalls,
    CommFromWorker,
    Done,
    Emit,
    FromWorker,
    GetBudget,
    GetInput,
    Hello,
    JudgeSubcalls,
    PromptChunk,
    RunCommand,
    SendSubcalls,
    SetPrompt,
    StartRun,
)
from rlm_kernel.repl.output import Collector, StreamName, Unshowable, plain, weight
from rlm_kernel.repl.prompt_reader import PromptReader
from rlm_kernel.repl.requests import Requests
from rlm_kernel.repl.tree import Tree

__all__ = ["MAX_COMM", "Incoming"]

MAX_COMM = 64 << 20
"""Bytes, about, that widgets may send for one cell, or for one message of a front end to them. All
of it waits in this process where a front end is slow to take it."""


class Incoming:
    """Owner of the workers of one `Tree`: their messages, their text and their ends."""

    def __init__(self, tree: Tree) -> None:
        self.handler: ReplHandler = Nobody()
        self.cell: Cell | None = None
        """The cell that runs."""

        self.inventory = Inventory()
        self.count = 0
        """Execution count of the last cell of this worker."""

        self.asked_to_end: Worker | None = None
        """A worker whose end is no loss that anybody needs to hear of."""

        self.closing = False
        self._untold = ""
        """What was lost while no cell ran that could have said so."""

        self._tree = tree
        self._late = Collector(self._forward_late, keep=False)
        self._late_cell = 0
        self._comm_room = MAX_COMM
        self._requests: Requests | None = None
        self._readers: dict[int, PromptReader] = {}
        self._flushing = False

    def begin(self, cell: Cell) -> None:
        """*cell* is about to be sent. What comes late from now on is its."""
        self._late.flush()
        self.cell = cell
        self.let_widgets_send()
        self._late = Collector(self._forward_late, keep=False)
        self._late_cell = cell.id
        if self._untold and cell.tell(self._untold):
            self._untold = ""

    def let_widgets_send(self) -> None:
        """Begin to count anew what widgets send: a front end asked for it."""
        self._comm_room = MAX_COMM

    def waits(self, cell: int) -> set[int]:
        """Ids of the requests of the cell of this id that were not answered yet."""
        return self._requests.waits(cell) if self._requests is not None else set()

    def give_up(self, waits: set[int]) -> None:
        """Cancel these requests."""
        if self._requests is not None:
            self._requests.interrupt(waits)

    def read(self, worker: Worker, message_id: int) -> PromptReader:
        """Return who takes the chunks that answer `ReadPrompt` *message_id*."""
        reader = PromptReader(worker.link, f"read {message_id}")
        self._readers[message_id] = reader
        return reader

    # --- what the worker sends ----------------------------------------------------------------

    def on_worker_messages(self, worker: Worker, messages: list[FromWorker]) -> None:
        for message in messages:
            if worker.ended:
                return
            if type(message) is Emit:
                self._emit(message)
            else:
                self._take(worker, message)
        self._flush()

    def on_worker_text(self, worker: Worker, name: StreamName, text: str) -> None:
        self._sink().text(name, text)
        if not self._flushing:
            self._flushing = True
            # After what else is ready now, so that a burst goes on as one.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._sink().flush()

    def _sink(self) -> Collector:
        return self._late if self.cell is None else self.cell.collector

    def _emit(self, message: Emit) -> None:
        if self.cell is not None and message.id == self.cell.id:
            self.cell.collector.add(message.output)
            return
        if message.id != self._late_cell:
            self._late.flush()
            self._late_cell = message.id
        self._late.add(message.output)
        self._late.flush()

    def _forward_late(self, output: Output) -> None:
        guarded(lambda output: self.handler.output(self._late_cell, output))(output)

    def _take(self, worker: Worker, message: FromWorker) -> None:
        requests = self._requests_of(worker)
        match message:
            case Done():
                self._done(worker, message)
            case SendSubcalls():
                requests.subcalls(message)
            case CancelSubcalls():
                requests.cancel_subcalls(message)
            case JudgeSubcalls():
                guarded(self.handler.judge_subcalls)(message)
            case GetBudget():
                requests.budget(message)
            case GetInput():
                self._flush()
                cell = self.cell
                allowed = cell is not None and cell.id == message.cell and cell.allow_stdin
                requests.input(message, allowed=allowed)
            case StartRun() | RunCommand():
                requests.command(message)
            case SetPrompt():
                self.inventory.has_prompt = True
                guarded(self.handler.prompt_set)(message.prompt)
            case CommFromWorker():
                self._flush()
                self._comm(message)
            case PromptChunk():
                self._take_chunk(message)
            case Hello():
                raise LinkError("The worker said hello twice.")
            case _:
                worker.settle(message.id, message)

    def _comm(self, message: CommFromWorker) -> None:
        try:
            message = _plain_comm(message)
            self._charge(message)
        except Unshowable as why:
            self._sink().refuse("a message of a widget", why)
            return
        guarded(self.handler.comm)(message)

    def _charge(self, message: CommFromWorker) -> None:
        names = [message.comm_id, message.target_name, message.target_module or ""]
        size = weight([message.data, message.metadata, names])
        size += sum(map(sys.getsizeof, message.buffers))
        if size > self._comm_room:
            self._comm_room = 0
            limit = f"{MAX_COMM >> 20} MiB"
            raise Unshowable(f"widgets sent {limit} for this cell; what follows is left out too")
        self._comm_room -= size

    def _requests_of(self, worker: Worker) -> Requests:
        if self._requests is None:
            self._requests = Requests(worker.link, lambda: self.handler)
        return self._requests

    def _take_chunk(self, message: PromptChunk) -> None:
        reader = self._readers.get(message.id)
        if reader is None:
            raise LinkError(f"The worker sent a prompt {message.id} that was not asked for.")
        if message.last:
            del self._readers[message.id]
        reader.put(message.data, last=message.last)

    def _done(self, worker: Worker, message: Done) -> None:
        cell = self.cell
        if cell is None or message.id != cell.id:
            raise LinkError(f"The worker ended cell {message.id}, which does not run.")
        # What its children wrote last lies in the pipes: they are dead, or not waited for.
        worker.drain_pipes()
        self.cell = None
        self._requests_of(worker).cell_over(cell.id)
        self.count = message.execution_count
        self.inventory.update(message.variables)
        cell.finish(message)

    # --- what becomes of the worker -----------------------------------------------------------

    def on_worker_end(self, worker: Worker, reason: str) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        lost, self.inventory = self.inventory.names(), Inventory()
        if "P" in lost and self._keeps_prompt():
            lost.remove("P")
        error = loss_sentence(reason, lost)
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.fail(error)
        self._flush()
        if self.cell is not None:
            cell, self.cell = self.cell, None
            cell.fail(error, execution_count=self.count + 1, worker_lost=reason)
        elif lost and worker is not self.asked_to_end:
            self._untold = f"{error}\n"
        self.count = 0
        if self.closing:
            return
        if worker is not self.asked_to_end:
            guarded(self.handler.worker_lost)(reason, lost)
        if worker.used:
            self._replace_worker()

    def _keeps_prompt(self) -> bool:
        kept: list[bool] = []
        guarded(lambda: kept.append(self.handler.keeps_prompt()))()
        return kept == [True]

    def _replace_worker(self) -> None:
        try:
            self._tree.replace_worker()
        except UsageError as error:
            # The next to need a worker tries again, and is told.
            report(error)


def _plain_comm(message: CommFromWorker) -> CommFromWorker:
    return msgspec.structs.replace(
        message, data=plain(message.data), metadata=plain(message.metadata)
    )
