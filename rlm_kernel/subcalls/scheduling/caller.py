"""One call, from its turn to its end.

Every call ends exactly once, whatever happens: its budget is settled, its
`SubcallEnded` is written, and only then its `Outcome` is handed out. A call
whose batch is cancelled before it was sent leaves no event: it never was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Usage, unpriced
from rlm_kernel.engine.events import Event, SubcallEnded, SubcallStarted
from rlm_kernel.errors import BudgetExceeded, RLMError, SubcallError
from rlm_kernel.subcalls.endpoint import (
    CutShortError,
    Endpoint,
    EndpointError,
    Exchange,
    Reply,
)
from rlm_kernel.subcalls.scheduling.batch import Batch, Call, Outcome, Plan
from rlm_kernel.subcalls.scheduling.cache import Cache
from rlm_kernel.subcalls.scheduling.retry import Retry
from rlm_kernel.subcalls.scheduling.tools import ask_with_tools
from rlm_kernel.text import estimated_tokens

__all__ = ["Caller"]

TIMEOUT_S = 600.0
"""Of a plain call that names none, all its attempts together."""

_CANCELLED = "the call was cancelled"
_NOTHING = Usage()


class Caller:
    """Does calls, and ends each once.

    Parameters
    ----------
    emit
        Writes an event of a run. Called before anything depends on what the event says.
    retry
        What is done about requests that fail.
    cache
        Where recorded replies are found; ``None`` serves none.
    unqueue
        Takes the calls of a batch that have no worker yet out of their queue, and returns them.
    over
        Told of a batch whose last call ended.
    """

    def __init__(
        self,
        *,
        emit: Callable[[str, Event], None],
        retry: Retry,
        cache: Cache | None,
        unqueue: Callable[[Batch], list[Call]],
        over: Callable[[Batch], None],
    ) -> None:
        self._emit = emit
        self._retry = retry
        self._cache = cache
        self._unqueue = unqueue
        self._over = over
        self._unpriced: set[tuple[str, str]] = set()
        """Specs and models without a price whose server named no cost either."""

    async def run(self, call: Call) -> None:
        """Do *call* and end it, in every way out."""
        if call.batch.cancelled:
            self.drop(call)
            return
        call.started = time.monotonic()
        call.batch.under_way.add(call)
        try:
            await self._run(call)
        except asyncio.CancelledError:
            if call.timed_out and not call.batch.cancelled:
                _take_back_cancellation()
                self._fail(call, _timed_out(call), usage=_estimate(call), server=call.server)
                return
            self._fail(call, _CANCELLED, usage=_estimate(call), server=call.server)
            raise
        except EndpointError as error:
            self._fail(call, error.reason, finish=error.finish, server=error.server)
        except RLMError as error:
            self._fail(call, str(error))
        except Exception as error:
            self._fail(call, f"the call failed inside rlm-kernel: {error!r}")
            _report(error)

    def drop(self, call: Call) -> None:
        """End a call of a batch that was cancelled, before it was sent."""
        self._forget(call, _CANCELLED)

    async def _run(self, call: Call) -> None:
        plan = call.batch.plan
        key = plan.question.key(call.prompt) if plan.question is not None else ""
        recorded = self._recorded(plan, key)
        if recorded is not None:
            if self._start(call):
                self._end(call, text=recorded.response, finish=recorded.finish, cached=True)
            await asyncio.sleep(0)  # a worker goes straight on to its next call
            return
        try:
            refused = await self._reserve(call)
        except asyncio.CancelledError:
            self.drop(call)  # it left no event yet
            raise
        if refused:
            await self._refuse(call, refused)
            return
        if not self._start(call, key):
            return
        call.deadline = _deadline(call)
        if call.deadline is not None:
            call.batch.deadlines.watch(call.deadline)
        await self._do(call)

    # --- before it is sent --------------------------------------------------------------------

    def _recorded(self, plan: Plan, key: str) -> SubcallEnded | None:
        if not key or not plan.cache or self._cache is None:
            return None
        return self._cache.take(plan.ledger, key)

    async def _reserve(self, call: Call) -> str:
        """Set the call's cost aside, when others have made room; why that cannot be, or nothing."""
        plan = call.batch.plan
        if self._lacks_price(plan):
            return unpriced(plan.model)
        try:
            call.reservation = await plan.ledger.reserve_in_turn(plan.cost(call.prompt))
        except BudgetExceeded as error:
            return str(error)
        call.started = time.monotonic()
        return ""

    def _start(self, call: Call, key: str = "", note: str = "") -> bool:
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
            note=f"{plan.note}; {note}" if plan.note and note else plan.note or note,
            retry_of=call.retry_of,
            queued_s=_to_microsecond(call.started - call.batch.submitted),
            key=key,
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
        others = self._unqueue(call.batch) if over else []
        try:
            if self._start(call, note=_refused_too(len(others))):
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
        if not plan.limits_cost or plan.endpoint is None:
            return False
        return (plan.endpoint.spec, plan.model) in self._unpriced

    # --- the request --------------------------------------------------------------------------

    async def _do(self, call: Call) -> None:
        plan = call.batch.plan
        if plan.endpoint is not None:
            if plan.toolbox is None:
                reply = await self._ask(call, plan.endpoint, plan.sent_params)
            else:
                reply = await ask_with_tools(call, plan.toolbox, self._ask, self._emit)
            if plan.price is None and not reply.usage.cost:
                self._unpriced.add((plan.endpoint.spec, plan.model))
            self._end(
                call,
                text=reply.text,
                usage=reply.usage,
                finish=reply.finish,
                server=reply.server,
                first_token_s=reply.first_token_s,
            )
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
        attempt = 0
        while True:
            attempt += 1
            call.attempts += 1
            call.asking = True
            try:
                if toolbox is None:
                    reply = await endpoint.complete(call.prompt, params)
                else:
                    reply = await endpoint.complete(
                        call.prompt, params, tools=toolbox.specs, exchanges=exchanges
                    )
            except asyncio.CancelledError as error:
                if isinstance(error.__cause__, CutShortError):
                    _note_cut(call, error.__cause__)
                raise
            except EndpointError as error:
                _note_failure(call, error)
                # It may not have come as far as to wait for anything, and thousands like it may be
                # next: without a turn for others the kernel would answer nobody meanwhile.
                await asyncio.sleep(0)
                try:
                    wait = self._retry.wait(error, attempt, call.attempts - before)
                except EndpointError:
                    call.trouble = call.trouble[:-1]
                    raise
            else:
                call.asking = False
                call.attempts += reply.attempts - 1
                call.trouble += tuple(reply.trouble)
                return reply
            await asyncio.sleep(wait)

    # --- ends ---------------------------------------------------------------------------------

    def _fail(
        self,
        call: Call,
        reason: str,
        *,
        usage: Usage | None = None,
        finish: str = "",
        server: str = "",
    ) -> None:
        self._end(call, error=reason, usage=usage, finish=finish, server=server)

    def _end(
        self,
        call: Call,
        *,
        text: str = "",
        error: str = "",
        usage: Usage | None = None,
        finish: str = "",
        child_run_id: str = "",
        cached: bool = False,
        server: str = "",
        first_token_s: float | None = None,
    ) -> None:
        """Settle, record, hand out. The first end of a call counts: a reply and a cancellation
        may race."""
        if call.ended:
            return
        used = _NOTHING if cached else _settle(call, usage or _NOTHING)
        ended = SubcallEnded(
            call_id=call.call_id,
            ok=not error,
            response=text,
            error=error,
            usage=used,
            attempts=call.attempts,
            finish=finish,
            child_run_id=child_run_id,
            cached=cached,
            server=server,
            first_token_s=first_token_s,
            trouble=list(call.trouble),
        )
        try:
            self._emit(call.batch.plan.run_id, ended)
        except Exception as failure:
            # What is not recorded is not shown either: the text is not handed out.
            text, error = "", str(failure)
            if not isinstance(failure, RLMError):
                _report(failure)
        self._put(call, text, error, used, cached)

    def _forget(self, call: Call, reason: str) -> None:
        """End a call that left no event."""
        if call.reservation is not None:
            call.reservation.release()
        if not call.ended:
            self._put(call, "", reason, _NOTHING)

    def _put(self, call: Call, text: str, error: str, usage: Usage, cached: bool = False) -> None:
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
                cached=cached,
            )
        )
        if batch.complete:
            self._over(batch)


def _note_failure(call: Call, error: EndpointError) -> None:
    """A request failed, or all that an endpoint with several servers sent for *call*.

    At once, since it may be cancelled before anything else is done about it.
    """
    _note_requests(call, error)
    call.trouble += (error.reason,)
    call.asking = False


def _note_cut(call: Call, cut: CutShortError) -> None:
    """The call was cancelled while an endpoint with several servers was at it."""
    _note_requests(call, cut)
    call.asking = cut.under_way
    call.server = cut.server


def _note_requests(call: Call, error: EndpointError) -> None:
    call.attempts += error.attempts - 1
    call.trouble += tuple(error.trouble)
    if error.usage is not None:
        call.spent = error.usage + (call.spent or Usage())


def _settle(call: Call, usage: Usage) -> Usage:
    """Book what the call used; returns what its event says."""
    seconds = _to_microsecond(time.monotonic() - call.started)
    if call.batch.plan.kind == "rlm":
        # The child's ledger booked its tokens here and above, call by call.
        if call.reservation is not None:
            call.reservation.settle(_NOTHING)
        return msgspec.structs.replace(usage, seconds=seconds)
    used = usage if call.spent is None else usage + call.spent
    used = used.priced(call.batch.plan.price)
    calls = min(call.attempts, 1) if call.earlier is None else 0
    used = msgspec.structs.replace(used, calls=calls, seconds=seconds)
    if call.reservation is not None:
        call.reservation.settle(used)
    return used if call.earlier is None else call.earlier + used


def _deadline(call: Call) -> float | None:
    """When *call* is to have ended, monotonic; ``None`` is never."""
    plan = call.batch.plan
    own = plan.params.timeout
    if own is None and plan.kind == "llm":
        own = TIMEOUT_S
    if own is None:
        return plan.until
    return call.started + own if plan.until is None else min(call.started + own, plan.until)


def _to_microsecond(seconds: float) -> float:
    """*seconds* with no more digits than mean anything; `round` costs three times as much."""
    return int(seconds * 1e6) / 1e6


def _refused_too(number: int) -> str:
    return f"refused together with {number:,} more calls of its batch" if number else ""


def _timed_out(call: Call) -> str:
    left = call.batch.plan.ledger.seconds_left()
    if left is not None and left <= 0:
        return "the budget's seconds ended before the reply was there; raise max_seconds"
    asked = call.batch.plan.params.timeout or TIMEOUT_S
    return f"no reply within {asked:g} s: pass smaller pieces, or a longer timeout"


def _take_back_cancellation() -> None:
    """The task was cancelled for the call's deadline alone: its worker goes on."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _estimate(call: Call) -> Usage | None:
    """What a request used whose reply was not waited for; its prompt at least was read."""
    if not call.asking:
        return None
    return Usage(input_tokens=estimated_tokens(call.prompt), estimated=True)


def _report(error: Exception) -> None:
    """Show a defect of ours where asyncio shows such, with its traceback."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "a sub-call failed inside rlm-kernel", "exception": error}
    )
