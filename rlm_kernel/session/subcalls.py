"""Sub-calls of a session: what the worker asks of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.errors import RLMError, SubcallError, UsageError
from rlm_kernel.repl.messages import JudgeSubcalls, SendSubcalls, SubcallFailure, SubcallResult
from rlm_kernel.session.models import is_spec
from rlm_kernel.session.request import TASK_QUERY, Request
from rlm_kernel.subcalls.scheduling.batch import ChildOutcome, Outcome
from rlm_kernel.subcalls.scheduling.tools import Toolbox

if TYPE_CHECKING:
    from rlm_kernel.session.session import Session

__all__ = ["judge_subcalls", "send_subcalls"]

_WHOLE = (
    "the child run would get the whole of P again, or of the P of a run above it: pass a part of "
    "it, or start the run with allow_whole_prompt"
)


def send_subcalls(
    session: Session,
    request: SendSubcalls,
    deliver: Callable[[list[SubcallResult]], None],
    fail: Callable[[RLMError], None],
) -> Callable[[], None]:
    """Start the sub-calls of *request*; returns what cancels the rest. See `ReplHandler`."""
    settings, run, params = session.settings, session.run, request.params
    run_id = run.run_id if run is not None else ""
    if request.retry_of and len(request.retry_of) != len(request.prompts):
        fail(UsageError("retry_of names another number of calls than there are prompts"))
        return _nothing
    toolbox = session.toolbox(request.id)
    spec = params.model if is_spec(params.model) else None
    if spec is not None:
        params = msgspec.structs.replace(params, model=None)
    progress = session.progress.begin(request.cell, len(request.prompts))

    def done(outcomes: list[Outcome]) -> None:
        progress.done(outcomes)
        if params.task is not None:
            replied = (outcome.call_id for outcome in outcomes if outcome.error is None)
            session.verdicts.expect(replied, run_id=run_id, task=params.task)
        deliver([_result(outcome) for outcome in outcomes])

    try:
        batch = session.scheduler.submit(
            request.prompts,
            kind=request.kind,
            params=params,
            retry_of=session.verdicts.asked_again(request.retry_of),
            run_id=run_id,
            turn=session.turn,
            ledger=session.ledger,
            deliver=done,
            spawn_child=_spawner(session, spec, toolbox),
            toolbox=toolbox,
            cache=settings.cache,
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
    for run_id, event in session.verdicts.events(message.verdicts):
        session.log.emit(run_id, event)


def _spawner(
    session: Session, spec: str | None, toolbox: Toolbox | None
) -> Callable[[str, str, SubcallParams], Awaitable[ChildOutcome]]:
    settings, parent = session.settings, session.ledger
    parent_run_id = session.run.run_id if session.run is not None else ""

    async def spawn(call_id: str, prompt: str, params: SubcallParams) -> ChildOutcome:
        if await session.is_whole_prompt(prompt):
            return ChildOutcome(run_id="", error=SubcallError(_WHOLE))
        request = Request(
            query=params.query or TASK_QUERY,
            settings=session.models.child_settings(settings, spec or params.model),
            depth=parent.depth + 1,
            parent_run_id=parent_run_id,
            parent_call_id=call_id,
        )
        return await session.run_child(request, prompt, parent, toolbox)

    return spawn


def _nothing() -> None:
    """There is nothing to cancel."""


def _result(outcome: Outcome) -> SubcallResult:
    failure = SubcallFailure(reason=str(outcome.error)) if outcome.error is not None else None
    return SubcallResult(
        index=outcome.index, text=outcome.text, error=failure, call_id=outcome.call_id
    )
