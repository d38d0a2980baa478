"""What is told of a ledger to whoever asks for the budget."""

from __future__ import annotations

from collections.abc import Iterable

from rlm_kernel.budget_view import BudgetView, Spending
from rlm_kernel.engine.budget import Ledger

__all__ = ["view_of"]


def view_of(ledger: Ledger, *, in_run: bool) -> BudgetView:
    """The budget of *ledger* and of its tree; outside a run there are no turns to count."""
    line = ledger.line()
    return BudgetView(
        run=_spending(ledger, line, in_run=in_run),
        tree=_spending(line[-1], line[-1:], in_run=in_run),
    )


def _spending(ledger: Ledger, line: list[Ledger], *, in_run: bool) -> Spending:
    """Used and set aside by *ledger*, left by all of *line*."""
    used, held = ledger.used, ledger.reserved
    seconds = ledger.seconds_left()
    return Spending(
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        tokens_used=used.tokens,
        tokens_reserved=held.tokens,
        tokens_left=_least(
            at.budget.max_tokens - at.used.tokens - at.reserved.tokens
            for at in line
            if at.budget.max_tokens is not None
        ),
        subcalls_used=ledger.subcalls,
        subcalls_reserved=held.subcalls,
        subcalls_left=_least(
            at.budget.max_subcalls - at.subcalls - at.reserved.subcalls
            for at in line
            if at.budget.max_subcalls is not None
        ),
        turns_used=ledger.turns,
        turns_left=max(ledger.budget.max_turns - ledger.turns, 0) if in_run else None,
        depth_left=_least(at.budget.max_depth - ledger.depth for at in line) or 0,
        cost_used=_dollars(used.cost),
        cost_reserved=_dollars(held.cost),
        cost_left=None if (money := ledger.money_left) is None else max(_dollars(money), 0.0),
        seconds_used=round(ledger.elapsed(), 3),
        seconds_left=None if seconds is None else round(max(seconds, 0.0), 3),
        waited_s=round(ledger.waited, 3),
    )


def _dollars(money: float) -> float:
    return round(money, 6)


def _least(left: Iterable[int]) -> int | None:
    """The least that is left, where anything limits it."""
    least = min(left, default=None)
    return None if least is None else max(least, 0)
