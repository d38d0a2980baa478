"""Calls that were asked for together, and what became of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Cost, Ledger, Reservation, Usage
from rlm_kernel.errors import RecordError, SubcallError, UsageError
from rlm_kernel.prices import Price
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.scheduling.cache import Question
from rlm_kernel.subcalls.scheduling.deadlines import Deadlines
from rlm_kernel.subcalls.scheduling.fair_queue import Lane
from rlm_kernel.subcalls.scheduling.tools import Toolbox
from rlm_kernel.text import estimated_tokens

__all__ = [
    "Batch",
    "Call",
    "ChildOutcome",
    "Deliver",
    "Outcome",
    "Plan",
    "SpawnChild",
    "bounded",
    "check_params",
]

OUTPUT_TOKENS = 1024
"""Set aside for the reply of a call without ``max_tokens``; under a limit of tokens it is also
what the server may generate, so that the limit holds; so it is under a limit of money."""

GROUP_S = 0.02
"""Outcomes of a batch that goes on are handed out this much later, those that come meanwhile with
them: nobody can go on before the last one, and each delivery costs a commit and a message."""

GROUP = 1000
"""Outcomes that are handed out without waiting for more."""

MOST_SHARED = 4 << 20
"""Characters of all that the calls of a batch share: for each of them it is counted, hashed and
written into a request. More than any model reads."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt: a text or an error."""

    index: int
    """Place of the prompt in the batch."""

    call_id: str
    text: str = ""
    error: SubcallError | None = None
    usage: Usage = Usage()
    cached: bool = False
    """Whether it is the recorded reply of an earlier call."""


class ChildOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a child run."""

    run_id: str
    text: str = ""
    """Its answer, as text."""

    usage: Usage = Usage()
    """Of the child and all below it, for the record; its own ledger has booked it already."""

    error: SubcallError | None = None
    """Why it has no answer."""

    finish: str = ""


Deliver = Callable[[list[Outcome]], None]
SpawnChild = Callable[[str, str, SubcallParams], Awaitable[ChildOutcome]]
"""Called with the id of the sub-call, its prompt and parameters. Cancelled with its call."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls of a batch have in common."""

    batch_id: str
    kind: Literal["llm", "rlm"]
    """What is done: a batch asked for as ``rlm`` is ``llm`` where no child run is allowed."""

    run_id: str
    turn: int
    ledger: Ledger
    params: SubcallParams
    sent_params: SubcallParams
    """See `bounded`."""

    model: str
    note: str = ""
    endpoint: Endpoint | None = None
    """Of kind ``llm``."""

    price: Price | None = None
    """Of the model, where it is known."""

    spawn_child: SpawnChild | None = None
    """Of kind ``rlm``."""

    toolbox: Toolbox | None = None
    """Tools that the model may use, of kind ``llm``."""

    until: float | None = None
    """When the budget's seconds end, monotonic; ``None`` is never."""

    limits_cost: bool = False
    """Whether a limit of money holds."""

    cache: bool = False
    """Whether recorded replies may be served."""

    question: Question | None = None
    """What the calls ask beside their prompts; ``None`` where no reply is to be served again."""

    def cost(self, prompt: str) -> Cost:
        """The most that a call costs. A child run sets its own tokens aside, call by call."""
        if self.kind == "rlm":
            return Cost(subcalls=1)
        asked = estimated_tokens(prompt) + estimated_tokens(self.params.system or "")
        if self.toolbox is not None:
            asked += self.toolbox.tokens
        answered = self.params.max_tokens or OUTPUT_TOKENS
        money = self.price.of(asked, answered) if self.price is not None else 0.0
        return Cost(subcalls=1, tokens=asked + answered, cost=money)


def bounded(params: SubcallParams, ledger: Ledger, price: Price | None) -> SubcallParams:
    """*params* as they are sent: with the bound on output that a limit of the budget needs."""
    limited = ledger.limits_tokens or (price is not None and ledger.limits_cost)
    if params.max_tokens is not None or not limited:
        return params
    return msgspec.structs.replace(params, max_tokens=OUTPUT_TOKENS)


class Call:
    """One call of a batch, on its way through the scheduler.

    What is the same for all that wait stands in the class: thousands of them are made at once.
    """

    attempts = 0
    """Requests that were sent for it."""

    trouble: tuple[str, ...] = ()
    """Why they failed, but for the one whose failure is that of the call."""

    asking = False
    """Whether a request is under way."""

    server = ""
    """That was asked last, where the call was cut short and there are several."""

    retry_of = ""
    started = 0.0
    """When it began, monotonic; 0 while it waits."""

    ended = False
    reservation: Reservation | None = None
    spent: Usage | None = None
    """Counted by the server for attempts that failed."""

    earlier: Usage | None = None
    """Of the rounds of a call with tools that are over and booked."""

    task: asyncio.Task[None] | None = None
    """The worker that is at it."""

    deadline: float | None = None
    """When it is to have ended, monotonic; ``None`` is never."""

    timed_out = False
    """Whether it was cancelled at its deadline."""

    def __init__(self, batch: Batch, index: int, prompt: str, lane: Lane) -> None:
        self.batch = batch
        self.index = index
        self.prompt = prompt
        self.lane = lane

    @property
    def call_id(self) -> str:
        """Unlike that of any other call."""
        return f"{self.batch.plan.batch_id}-{self.index}"


class Batch:
    """Calls that were submitted together. Made by `Scheduler.submit`."""

    def __init__(
        self,
        plan: Plan,
        size: int,
        deliver: Deliver,
        on_cancel: Callable[[Batch], None],
        commit: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.submitted = time.monotonic()
        self.under_way: set[Call] = set()
        self.deadlines = Deadlines(self.under_way)
        self.cancelled = False
        self._deliver = deliver
        self._on_cancel = on_cancel
        self._commit = commit
        self._outcomes: list[Outcome | None] = [None] * size
        self._left = size
        self._ready: list[Outcome] = []
        self._flushing: asyncio.Handle | None = None
        self._done = asyncio.Event()
        if not size:
            self._done.set()

    @property
    def batch_id(self) -> str:
        """Shared by the events of its calls."""
        return self.plan.batch_id

    @property
    def complete(self) -> bool:
        """Whether every call has its outcome, delivered or not."""
        return not self._left

    @property
    def outcomes(self) -> list[Outcome]:
        """Those that are there, in the order of the prompts."""
        return [outcome for outcome in self._outcomes if outcome is not None]

    def cancel(self) -> None:
        """Hand out what is there, end what is under way, on the server too, and send no more.

        From now on nothing is delivered; `wait` returns with an error for every call that had
        no outcome. Does nothing to a batch that is done.
        """
        if self.cancelled or self._done.is_set():
            return
        if self._ready:
            self._flush()
        if not self.cancelled and not self._done.is_set():
            self.cancelled = True
            self._on_cancel(self)

    async def wait(self) -> list[Outcome]:
        """All outcomes in the order of the prompts, once the last was delivered."""
        await self._done.wait()
        return self.outcomes

    def put(self, outcome: Outcome) -> None:
        """Hand an outcome out soon, with others."""
        self._outcomes[outcome.index] = outcome
        self._left -= 1
        self._ready.append(outcome)
        loop = asyncio.get_running_loop()
        if not self._left:
            self.deadlines.stop()  # the timer would keep the outcomes alive for minutes
        if not self._left or len(self._ready) == GROUP:
            self._unschedule()
            self._flushing = loop.call_soon(self._flush)
        elif self._flushing is None:
            self._flushing = loop.call_later(GROUP_S, self._flush)

    def _unschedule(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    def _flush(self) -> None:
        self._unschedule()
        ready, self._ready = self._ready, []
        try:
            ready = self._recorded(ready)
            if not self.cancelled:
                self._deliver(ready)
        finally:
            if not self._left:
                self._done.set()

    def _recorded(self, ready: list[Outcome]) -> list[Outcome]:
        """*ready*, made lasting. What the record cannot take is not shown: a result that it
        does not have would be lost to every replay."""
        try:
            self._commit()
        except RecordError as error:
            ready = [_withheld(outcome, error) for outcome in ready]
            for outcome in ready:
                self._outcomes[outcome.index] = outcome
        return ready


def _withheld(outcome: Outcome, error: RecordError) -> Outcome:
    if outcome.error is not None:
        return outcome
    return msgspec.structs.replace(outcome, text="", error=SubcallError(str(error)))


def check_params(params: SubcallParams) -> None:
    """Raise `UsageError` for values that no model can be asked with.

    They come from the worker: a NaN among them would be one in the timers of the event loop.
    """
    timeout, temperature = params.timeout, params.temperature
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"timeout={timeout:g} is no number of seconds above 0")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"temperature={temperature:g} is no number from 0 up")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise UsageError(
            f"max_tokens={params.max_tokens} leaves no room for a reply: give 1 or more"
        )
    shared = _shared_chars(params)
    if shared > MOST_SHARED:
        raise UsageError(
            f"the options of a sub-call have {shared:,} characters, more than the {MOST_SHARED:,} "
            "that are taken: put what is to be read into the prompts, in pieces"
        )


def _shared_chars(params: SubcallParams) -> int:
    single = (params.model, params.system, params.query, params.task, params.schema)
    several = (*(params.stop or ()), *(params.choices or ()))
    return sum(len(text) for text in (*single, *several) if text is not None)
