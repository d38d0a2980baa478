"""One scheduler for the sub-calls of a whole tree of runs.

Every call ends exactly once, whatever happens: its budget is settled, its
`SubcallEnded` is written, and only then its `Outcome` is handed out. A call
whose batch is cancelled before it was sent leaves no event: it never was.

Plain calls share one pool of workers, each a coroutine that takes one call
after the other: a task per call would cost a good part of what the call costs.
Child runs have a pool for each depth beside it. They make plain calls
themselves, so one that held a place among those, or among the child runs of
its own children's depth, could wait for itself.

Everything here runs in one event loop and is not thread-safe. Durations are
seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Ledger, Usage, unpriced
from rlm_kernel.engine.events import Event, SubcallEnded, SubcallStarted
from rlm_kernel.errors import BudgetExceeded, RLMError, SubcallError, UsageError
from rlm_kernel.subcalls.batch import (
    Batch,
    Call,
    ChildOutcome,
    Deliver,
    Outcome,
    Plan,
    SpawnChild,
    check_params,
)
from rlm_kernel.subcalls.endpoint import Endpoint, EndpointError, Exchange, Reply
from rlm_kernel.subcalls.fair_queue import Lane
from rlm_kernel.subcalls.pool import Pool
from rlm_kernel.subcalls.tools import Toolbox, ask_with_tools
from rlm_kernel.text import estimated_tokens

__all__ = ["Batch", "ChildOutcome", "Outcome", "Retry", "Scheduler"]

TIMEOUT_S = 600.0
"""Of a plain call that names none, all its attempts together."""

CHILD_RUNS = 4
"""Child runs under way at once at each depth; every one has a worker process and its own P."""

_CANCELLED = "the call was cancelled"


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """When a request that failed is sent again, if the failure may pass."""

    attempts: int = 3
    """Requests in all."""

    base_s: float = 0.5
    """Wait before the second request; doubled before each further one, with jitter."""

    longest_s: float = 60.0
    """A server that asks for a longer wait is not waited for."""

    def wait(self, attempt: int, asked: float | None) -> float:
        """Seconds to wait after *attempt* (from 1) failed; *asked* is the server's wish."""
        if asked is not None:
            return asked
        grown: float = self.base_s * 2 ** (attempt - 1)
        return min(self.longest_s, grown) * random.uniform(0.5, 1)


class Scheduler:
    """Queue, limits, retries, budget and events of all sub-calls of a tree.

    Parameters
    ----------
    emit
        Writes an event of a run. Called before anything depends on what the event says.
    concurrency
        Plain calls under way at once in the whole tree; ``None`` takes what the budget of the
        first run says.
    retry
        What is done about requests that fail.
    """

    def __init__(
        self,
        *,
        emit: Callable[[str, Event], None],
        concurrency: int | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._emit = emit
        self._concurrency = concurrency
        self._retry = retry or Retry()
        self._plain = Pool(concurrency or 1, self._run)
        self._children: dict[int, Pool] = {}
        self._lanes: dict[Endpoint, Lane] = {}
        self._batches: set[Batch] = set()
        self._unpriced: set[tuple[Endpoint | None, str]] = set()
        """Models without a price whose server named no cost either."""
        self._closed = False

    def submit(
        self,
        prompts: Sequence[str],
        *,
        kind: Literal["llm", "rlm"] = "llm",
        params: SubcallParams | None = None,
        retry_of: Sequence[str] = (),
        run_id: str,
        turn: int,
        ledger: Ledger,
        resolve: Callable[[str | None], Endpoint],
        deliver: Deliver,
        spawn_child: SpawnChild | None = None,
        toolbox: Toolbox | None = None,
    ) -> Batch:
        """Call a model for every prompt, or start a child run for each. Returns at once.

        Parameters
        ----------
        retry_of
            For each prompt the id of the call that it asks again; empty where none does.
        resolve
            From the model that the calls name, or ``None``, to what is asked.
        deliver
            Gets the outcomes as they come, those of one tick of the event loop together.
        spawn_child
            Starts a child run. Without it, and beyond the budget's depth, ``rlm`` calls are
            plain ones, and their events say so.
        toolbox
            Tools that the model of a plain call may use.

        Raises
        ------
        UsageError
            The model or a parameter cannot be; nothing was queued.
        """
        if self._closed:
            raise UsageError("the scheduler is closed: nothing more can be called")
        params = params or SubcallParams()
        check_params(params)
        kind, note = _granted(kind, ledger, spawn_child)
        endpoint = resolve(params.model) if kind == "llm" else None
        model = params.model or (endpoint.model if endpoint else "")
        plan = Plan(
            batch_id=uuid.uuid4().hex[:16],
            kind=kind,
            run_id=run_id,
            turn=turn,
            ledger=ledger,
            params=params,
            model=model,
            note=note,
            endpoint=endpoint,
            price=endpoint.price(model) if endpoint else None,
            spawn_child=spawn_child,
            toolbox=toolbox,
        )
        batch = Batch(plan, len(prompts), deliver, self._cancel)
        lane = self._lane(plan.endpoint)
        texts = prompts if not note else [_as_plain(text, params) for text in prompts]
        calls = [Call(batch, index, text, lane) for index, text in enumerate(texts)]
        for call, earlier in zip(calls, retry_of, strict=False):
            call.retry_of = earlier
        if calls:
            self._batches.add(batch)
            self._pool(plan).add(run_id, calls)
        return batch

    async def close(self) -> None:
        """Cancel everything and wait until it has ended."""
        self._closed = True
        for batch in list(self._batches):
            batch.cancel()
        for pool in (self._plain, *self._children.values()):
            await pool.close()

    # --- where calls wait -----------------------------------------------------------------------

    def _lane(self, endpoint: Endpoint | None) -> Lane:
        if endpoint is None:
            return Lane()  # the size of its pool is the limit of child runs
        return self._lanes.setdefault(endpoint, Lane(endpoint.slots))

    def _pool(self, plan: Plan) -> Pool:
        if plan.kind == "llm":
            first = plan.ledger.line()[-1]
            self._plain.size = self._concurrency or max(1, first.budget.max_concurrency)
            return self._plain
        depth = plan.ledger.depth
        if depth not in self._children:
            self._children[depth] = Pool(CHILD_RUNS, self._run)
        return self._children[depth]

    def _cancel(self, batch: Batch) -> None:
        """End the calls of *batch*. Those with a worker end in it, where their request is."""
        for call in self._pool(batch.plan).remove(batch):
            self._drop(call)
        for call in list(batch.under_way):
            if call.task is not None:
                call.task.cancel()

    # --- one call -------------------------------------------------------------------------------

    async def _run(self, call: Call) -> None:
        """Do *call* and end it, once, in every way out."""
        if call.batch.cancelled:
            self._drop(call)
            return
        try:
            refused = self._reserve(call)
            if refused:
                await self._refuse(call, refused)
                return
            if not self._start(call):
                return
            async with asyncio.timeout(_seconds(call)):
                await self._do(call)
        except asyncio.CancelledError:
            self._fail(call, _CANCELLED, usage=_estimate(call))
            raise
        except TimeoutError:
            self._fail(call, _timed_out(call), usage=_estimate(call))
        except EndpointError as error:
            self._fail(call, error.reason, finish=error.finish)
        except RLMError as error:
            self._fail(call, str(error))
        except Exception as error:
            self._fail(call, f"the call failed inside rlm-kernel: {error!r}")
            _report(error)

    def _reserve(self, call: Call) -> str:
        """Set the call's cost aside; why that cannot be, or nothing."""
        plan = call.batch.plan
        call.started = time.monotonic()
        call.batch.under_way.add(call)
        if self._lacks_price(plan):
            return unpriced(plan.model)
        try:
            call.reservation = plan.ledger.reserve(plan.cost(call.prompt))
        except BudgetExceeded as error:
            return str(error)
        return ""

    def _start(self, call: Call, note: str = "") -> bool:
        """Say that the call starts. False where that cannot be said: it has ended then."""
        plan = call.batch.plan
        started = SubcallStarted(
            call_id=call.call_id,
            kind=plan.kind,
            prompt=call.prompt,
            model=plan.model,
            turn=plan.turn,
            batch_id=plan.batch_id,
            index=call.index,
            params=plan.params,
            note="; ".join(filter(None, (plan.note, note))),
            retry_of=call.retry_of,
        )
        try:
            self._emit(plan.run_id, started)
        except RLMError as error:
            # What cannot be recorded is not done.
            self._forget(call, str(error))
            return False
        return True

    async def _refuse(self, call: Call, reason: str) -> None:
        """End *call* unsent. Where the budget has nothing left, the rest of its batch ends with
        it, without events: a line of code can ask for more calls than a record should tell of.
        """
        plan = call.batch.plan
        over = self._lacks_price(plan) or plan.ledger.spent
        others = self._pool(plan).remove(call.batch) if over else []
        try:
            if self._start(call, _refused_too(len(others))):
                self._fail(call, reason)
            for number, other in enumerate(others):
                if number % 1000 == 0:
                    await asyncio.sleep(0)
                self._forget(other, reason)
            await asyncio.sleep(0)
        finally:
            for other in others:
                if not other.ended:
                    self._forget(other, reason)

    def _lacks_price(self, plan: Plan) -> bool:
        """Whether a limit of money cannot be kept, as was seen by a reply before."""
        return plan.ledger.limits_cost and (plan.endpoint, plan.model) in self._unpriced

    async def _do(self, call: Call) -> None:
        plan = call.batch.plan
        if plan.endpoint is not None:
            if plan.toolbox is None:
                reply = await self._ask(call, plan.endpoint, plan.sent_params)
            else:
                reply = await ask_with_tools(call, plan.toolbox, self._ask, self._emit)
            if plan.price is None and not reply.usage.cost:
                self._unpriced.add((plan.endpoint, plan.model))
            self._end(call, text=reply.text, usage=reply.usage, finish=reply.finish)
            return
        assert plan.spawn_child is not None
        call.attempts = 1
        child = await plan.spawn_child(call.call_id, call.prompt, plan.params)
        self._end(
            call,
            text=child.text,
            error=str(child.error) if child.error else "",
            usage=child.usage,
            finish=child.finish,
            child_run_id=child.run_id,
        )

    async def _ask(
        self,
        call: Call,
        endpoint: Endpoint,
        params: SubcallParams,
        exchanges: Sequence[Exchange] = (),
    ) -> Reply:
        """Send the request, and again where it may help."""
        toolbox, before = call.batch.plan.toolbox, call.attempts
        while True:
            call.attempts += 1
            try:
                if toolbox is None:
                    return await endpoint.complete(call.prompt, params)
                return await endpoint.complete(
                    call.prompt, params, tools=toolbox.specs, exchanges=exchanges
                )
            except EndpointError as error:
                if error.usage is not None:
                    call.spent = error.usage + (call.spent or Usage())
                wait = self._wait(call.attempts - before, error)
            await asyncio.sleep(wait)

    def _wait(self, attempts: int, error: EndpointError) -> float:
        """Seconds until the attempt after so many. Raises where there is none."""
        if not error.retryable:
            raise error
        if attempts >= self._retry.attempts:
            raise EndpointError(f"{error.reason} ({attempts} attempts)", finish=error.finish)
        wait = self._retry.wait(attempts, error.retry_after)
        if wait > self._retry.longest_s:
            raise EndpointError(f"{error.reason} (it asks to wait {wait:,.0f} s)")
        return wait

    # --- ends -------------------------------------------------------------------------------------

    def _fail(
        self, call: Call, reason: str, *, usage: Usage | None = None, finish: str = ""
    ) -> None:
        self._end(call, error=reason, usage=usage, finish=finish)

    def _end(
        self,
        call: Call,
        *,
        text: str = "",
        error: str = "",
        usage: Usage | None = None,
        finish: str = "",
        child_run_id: str = "",
    ) -> None:
        """Settle, record, hand out. The first end of a call counts: a reply and a cancellation
        may race."""
        if call.ended:
            return
        plan = call.batch.plan
        used = self._settle(call, usage or Usage())
        ended = SubcallEnded(
            call_id=call.call_id,
            ok=not error,
            response=text,
            error=error,
            usage=used,
            attempts=call.attempts,
            finish=finish,
            child_run_id=child_run_id,
        )
        try:
            self._emit(plan.run_id, ended)
        except Exception as failure:
            # What is not recorded is not shown either: the text is not handed out.
            text, error = "", str(failure)
            if not isinstance(failure, RLMError):
                _report(failure)
        self._put(call, text, error, used)

    def _settle(self, call: Call, usage: Usage) -> Usage:
        """Book what the call used; returns what its event says."""
        seconds = time.monotonic() - call.started
        if call.batch.plan.kind == "rlm":
            # The child's ledger booked its tokens here and above, call by call.
            if call.reservation is not None:
                call.reservation.settle(Usage())
            return msgspec.structs.replace(usage, seconds=seconds)
        used = usage if call.spent is None else usage + call.spent
        used = used.priced(call.batch.plan.price)
        calls = min(call.attempts, 1) if call.earlier is None else 0
        used = msgspec.structs.replace(used, calls=calls, seconds=seconds)
        if call.reservation is not None:
            call.reservation.settle(used)
        return used if call.earlier is None else call.earlier + used

    def _forget(self, call: Call, reason: str) -> None:
        """End a call that left no event."""
        if call.reservation is not None:
            call.reservation.release()
        if not call.ended:
            self._put(call, "", reason, Usage())

    def _drop(self, call: Call) -> None:
        self._forget(call, _CANCELLED)

    def _put(self, call: Call, text: str, error: str, usage: Usage) -> None:
        call.ended = True
        batch = call.batch
        batch.under_way.discard(call)
        batch.put(
            Outcome(
                index=call.index,
                call_id=call.call_id,
                text=text,
                error=SubcallError(error) if error else None,
                usage=usage,
            )
        )
        if batch.complete:
            self._batches.discard(batch)


def _granted(
    kind: Literal["llm", "rlm"], ledger: Ledger, spawn_child: SpawnChild | None
) -> tuple[Literal["llm", "rlm"], str]:
    """The kind of calls that can be made, and why it is not the one asked for."""
    if kind == "llm":
        return kind, ""
    if not ledger.child_allowed:
        return "llm", "a plain call: the depth limit of the budget allows no child run"
    if spawn_child is None:
        return "llm", "a plain call: no child runs can be started here"
    return kind, ""


def _as_plain(prompt: str, params: SubcallParams) -> str:
    """What a plain call asks in place of a child run; the query first, which the batch shares."""
    return f"{params.query}\n\n{prompt}" if params.query else prompt


def _seconds(call: Call) -> float | None:
    """How long the call may take; ``None`` is for ever."""
    plan = call.batch.plan
    own = plan.params.timeout
    if own is None and plan.kind == "llm":
        own = TIMEOUT_S
    limits = [limit for limit in (own, plan.ledger.seconds_left()) if limit is not None]
    return min(limits) if limits else None


def _refused_too(number: int) -> str:
    return f"refused together with {number:,} more calls of its batch" if number else ""


def _timed_out(call: Call) -> str:
    left = call.batch.plan.ledger.seconds_left()
    if left is not None and left <= 0:
        return "the budget's seconds ended before the reply was there; raise max_seconds"
    asked = call.batch.plan.params.timeout or TIMEOUT_S
    return f"no reply within {asked:g} s: pass smaller pieces, or a longer timeout"


def _estimate(call: Call) -> Usage | None:
    """What a request used whose reply was not waited for; its prompt at least was read."""
    # Without a reservation a tool is at work, and no request.
    if not call.attempts or call.reservation is None or call.batch.plan.kind == "rlm":
        return None
    return Usage(input_tokens=estimated_tokens(call.prompt), estimated=True)


def _report(error: Exception) -> None:
    """Show a defect of ours where asyncio shows such, with its traceback."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "a sub-call failed inside rlm-kernel", "exception": error}
    )
