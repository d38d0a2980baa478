"""Sub-calls of a session: what the worker asks of models, and what ``budget()`` tells it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Ledger
from rlm_kernel.engine.events import SubcallJudged
from rlm_kernel.errors import RLMError
from rlm_kernel.repl.messages import JudgeSubcalls, SendSubcalls, SubcallFailure, SubcallResult
from rlm_kernel.session.models import is_spec
from rlm_kernel.session.request import TASK_QUERY, Request
from rlm_kernel.subcalls.batch import ChildOutcome, Outcome

if TYPE_CHECKING:
    from rlm_kernel.session.session import Session

__all__ = ["budget_of", "judge_subcalls", "send_subcalls"]


def send_subcalls(
    session: Session,
    request: SendSubcalls,
    deliver: Callable[[list[SubcallResult]], None],
    fail: Callable[[RLMError], None],
) -> Callable[[], None]:
    """Start the sub-calls of *request*; returns what cancels the rest. See `ReplHandler`."""
    settings, run, params = session.settings, session.run, request.params
    spec = params.model if is_spec(params.model) else None
    if spec is not None:
        params = msgspec.structs.replace(params, model=None)
    progress = session.progress.begin(request.cell, len(request.prompts))

    def done(outcomes: list[Outcome]) -> None:
        progress.done(outcomes)
        deliver([_result(outcome) for outcome in outcomes])

    try:
        batch = session.scheduler.submit(
            request.prompts,
            kind=request.kind,
            params=params,
            retry_of=request.retry_of,
            run_id=run.run_id if run is not None else "",
            turn=session.turn,
            ledger=session.ledger,
            deliver=done,
            spawn_child=_spawner(session, spec),
            resolve=lambda model: session.models.sub(settings, spec),
        )
    except RLMError as error:
        progress.end()
        fail(error)
        return _nothing

    def cancel() -> None:
        progress.end()
        batch.cancel()

    return cancel


def judge_subcalls(session: Session, message: JudgeSubcalls) -> None:
    """Record what the worker found in replies of a typed sub-task."""
    run_id = session.run.run_id if session.run is not None else ""
    for verdict in message.verdicts:
        event = SubcallJudged(
            call_id=verdict.call_id, task=message.task, ok=verdict.ok, reason=verdict.reason
        )
        session.log.emit(run_id, event)


def budget_of(ledger: Ledger) -> dict[str, float | int | None]:
    """Used and set aside by the run of *ledger*, left by it and all above."""
    used, held = ledger.used, ledger.reserved
    line = ledger.line()
    shown: dict[str, float | int | None] = {
        "tokens_used": used.tokens,
        "tokens_reserved": held.tokens,
        "tokens_left": _least(
            (at.budget.max_tokens, at.used.tokens + at.reserved.tokens) for at in line
        ),
        "subcalls_used": ledger.subcalls,
        "subcalls_reserved": held.subcalls,
        "subcalls_left": _least(
            (at.budget.max_subcalls, at.subcalls + at.reserved.subcalls) for at in line
        ),
        "turns_used": ledger.turns,
        "turns_left": ledger.budget.max_turns - ledger.turns,
        "depth_left": max(ledger.budget.max_depth - ledger.depth, 0),
        "cost_used": round(used.cost, 6),
        "cost_left": _least((at.budget.max_cost, at.used.cost + at.reserved.cost) for at in line),
        "seconds_used": round(ledger.elapsed(), 3),
    }
    seconds = ledger.seconds_left()
    shown["seconds_left"] = None if seconds is None else round(max(seconds, 0), 3)
    return shown


def _spawner(
    session: Session, spec: str | None
) -> Callable[[str, str, SubcallParams], Awaitable[ChildOutcome]]:
    settings, parent = session.settings, session.ledger
    parent_run_id = session.run.run_id if session.run is not None else ""

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        request = Request(
            query=params.query or TASK_QUERY,
            settings=session.models.child_settings(settings, spec or params.model),
            depth=parent.depth + 1,
            parent_run_id=parent_run_id,
            parent_call_id=call_id,
        )
        return await session.run_child(request, prompt, parent)

    return spawn


def _nothing() -> None:
    """There is nothing to cancel."""


def _least(limits: Iterable[tuple[float | None, float]]) -> float | int | None:
    """The least that is left of limits, given with what is used of each."""
    left = [max(limit - used, 0) for limit, used in limits if limit is not None]
    return min(left, default=None)


def _result(outcome: Outcome) -> SubcallResult:
    failure = SubcallFailure(reason=str(outcome.error)) if outcome.error is not None else None
    return SubcallResult(
        index=outcome.index, text=outcome.text, error=failure, call_id=outcome.call_id
    )
