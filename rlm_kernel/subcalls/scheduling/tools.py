"""Tools for the model of a sub-call: it asks, the REPL's functions answer, until it replies.

What the tools return is shown to that model alone. The cell gets the reply.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Cost, Usage
from rlm_kernel.engine.events import Event, ToolCalled
from rlm_kernel.subcalls.endpoint import (
    Endpoint,
    EndpointError,
    Exchange,
    Reply,
    ToolSpec,
    ToolUse,
)
from rlm_kernel.text import cut_middle, estimated_tokens, replace_surrogates

if TYPE_CHECKING:
    from rlm_kernel.subcalls.scheduling.batch import Call, Plan

__all__ = [
    "MAX_ROUNDS",
    "MAX_TOOL_OUTPUT",
    "MAX_USES",
    "ToolResult",
    "Toolbox",
    "ask_with_tools",
]

MAX_ROUNDS = 8
"""Replies of one call that may ask for tools; the next one has to be the answer."""

MAX_USES = 32
"""Tools that one call may use; further ones are answered without being run."""

MAX_TOOL_OUTPUT = 20_000
"""Characters of a tool's output that the model is shown, head and tail."""

_MAX_NAME = 200
"""Characters of a tool's name that are told, where a model made one up."""

_LAST_ROUND = "\n[No more tools can be used in this conversation: give your answer now.]"
_CANCELLED = "the call was cancelled while the tool was at work"
_NO_MORE = f"error: not run, because {MAX_USES} uses are the limit: answer with what you have"


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one use of a tool."""

    text: str = ""
    error: str = ""
    """Why it failed; the model is told."""


class Toolbox:
    """The tools of a run.

    Parameters
    ----------
    specs
        What the model is told of them.
    use
        Runs the tool of this name with these arguments, JSON as the model wrote it. Cancelled
        with the call.
    """

    def __init__(
        self, specs: Sequence[ToolSpec], use: Callable[[str, str], Awaitable[ToolResult]]
    ) -> None:
        self.specs = tuple(specs)
        self.use = use

    @cached_property
    def tokens(self) -> int:
        """About what their descriptions add to each request."""
        texts = (f"{spec.name} {spec.description} {spec.parameters}" for spec in self.specs)
        return sum(map(estimated_tokens, texts))


Ask = Callable[["Call", Endpoint, SubcallParams, Sequence[Exchange]], Awaitable[Reply]]


async def ask_with_tools(
    call: Call, toolbox: Toolbox, ask: Ask, emit: Callable[[str, Event], None]
) -> Reply:
    """The reply to *call*, after the tools that its model asked for.

    Each round has a reservation of its own: what was said so far is sent again with it.

    Parameters
    ----------
    call
        Reserved for its first round. Afterwards its `reservation` is that of the last round, and
        its `earlier` what the others used; without a reservation while tools are at work.
    ask
        Sends one request.
    emit
        Writes an event; called before the model is shown what a tool returned.

    Raises
    ------
    EndpointError
        A request failed, or the model went on asking for tools.
    BudgetExceeded
        The budget does not cover another round.
    """
    plan = call.batch.plan
    assert plan.endpoint is not None
    exchanges: list[Exchange] = []
    used = 0
    while True:
        reply = await ask(call, plan.endpoint, plan.sent_params, exchanges)
        if not reply.uses:
            return reply
        if len(exchanges) == MAX_ROUNDS:
            call.spent = reply.usage + (call.spent or Usage())
            raise EndpointError(
                f"the model asked for tools in {MAX_ROUNDS + 1} replies and gave no answer: "
                "ask for less at once, or another model"
            )
        _book_round(call, reply)
        results = []
        for use in reply.uses:
            used += 1
            results.append(_NO_MORE if used > MAX_USES else await _use(call, toolbox, use, emit))
        if len(exchanges) + 1 == MAX_ROUNDS:
            results[-1] += _LAST_ROUND
        exchanges.append(Exchange(text=reply.text, uses=reply.uses, results=results))
        call.reservation = await plan.ledger.reserve_in_turn(_cost(plan, call.prompt, exchanges))


def _book_round(call: Call, reply: Reply) -> None:
    """Settle what the round that is over used; the next one is reserved by itself."""
    used = reply.usage if call.spent is None else reply.usage + call.spent
    used = used.priced(call.batch.plan.price)
    first = call.earlier is None
    used = msgspec.structs.replace(used, calls=int(first), seconds=0.0)
    if call.reservation is not None:
        call.reservation.settle(used)
    call.earlier = used if call.earlier is None else call.earlier + used
    call.reservation = call.spent = None


def _cost(plan: Plan, prompt: str, exchanges: Sequence[Exchange]) -> Cost:
    """The most that a round after *exchanges* costs."""
    first = plan.cost(prompt)
    said = 0
    for exchange in exchanges:
        asked = (f"{use.name} {use.arguments}" for use in exchange.uses)
        said += sum(map(estimated_tokens, (exchange.text, *asked, *exchange.results)))
    money = plan.price.of(said, 0) if plan.price is not None else 0.0
    return Cost(tokens=first.tokens + said, cost=first.cost + money)


async def _use(
    call: Call, toolbox: Toolbox, use: ToolUse, emit: Callable[[str, Event], None]
) -> str:
    """What the model is shown of this use."""
    started = time.monotonic()
    known = [spec.name for spec in toolbox.specs]
    name, arguments = replace_surrogates(use.name[:_MAX_NAME]), replace_surrogates(use.arguments)
    text, error = "", _CANCELLED
    try:
        if use.name in known:
            result = await toolbox.use(name, arguments)
            text, error = _shown(result.text), _shown(result.error)
        else:
            error = f"there is no tool {name!r}: use {', '.join(known)}"
    finally:
        emit(
            call.batch.plan.run_id,
            ToolCalled(
                call_id=call.call_id,
                name=name,
                arguments=arguments,
                text=text,
                error=error,
                seconds=time.monotonic() - started,
            ),
        )
    return f"error: {error}" if error else text


def _shown(text: str) -> str:
    """*text* as a model can be sent it. It comes from the worker, so it may be anything."""
    return replace_surrogates(cut_middle(text, MAX_TOOL_OUTPUT))
