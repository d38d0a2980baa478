"""Reserve and settle over random trees of calls: no order of them overspends."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from rlm_kernel.engine.budget import Budget, Cost, Ledger, Reservation, Usage
from rlm_kernel.errors import BudgetExceeded

limits = st.none() | st.integers(1, 40)
budgets = st.builds(Budget, max_tokens=limits, max_subcalls=limits, max_depth=st.integers(0, 3))


@dataclass
class Call:
    """A call under way, and what the test says of it."""

    ledger: Ledger
    cost: Cost
    reservation: Reservation


class Tree(RuleBasedStateMachine):
    """Runs and calls that start and end in any order, against a plain recount."""

    ledgers = Bundle("ledgers")
    calls = Bundle("calls")

    @initialize(target=ledgers, budget=budgets)
    def first_run(self, budget: Budget) -> Ledger:
        self.all: list[Ledger] = [Ledger(budget)]
        self.settled: list[tuple[Ledger, int, int]] = []
        self.open: list[Call] = []
        return self.all[0]

    @rule(target=ledgers, parent=ledgers, budget=budgets)
    def child_run(self, parent: Ledger, budget: Budget) -> Ledger | object:
        if not parent.child_allowed:
            return multiple()
        self.all.append(parent.child(budget))
        return self.all[-1]

    @rule(target=calls, ledger=ledgers, tokens=st.integers(0, 20))
    def reserve(self, ledger: Ledger, tokens: int) -> Call | object:
        cost = Cost(tokens=tokens, subcalls=1)
        try:
            reservation = ledger.reserve(cost)
        except BudgetExceeded:
            assert not self.fits(ledger, tokens)
            return multiple()
        assert self.fits(ledger, tokens)
        self.open.append(Call(ledger, cost, reservation))
        return self.open[-1]

    @rule(call=consumes(calls), share=st.floats(0, 1), again=st.booleans())
    def settle(self, call: Call, share: float, again: bool) -> None:
        used = int(call.cost.tokens * share)
        call.reservation.settle(Usage(output_tokens=used))
        if again:
            call.reservation.settle(Usage(output_tokens=99))
        self.open.remove(call)
        self.settled.append((call.ledger, used, 1))

    @rule(call=consumes(calls))
    def release(self, call: Call) -> None:
        call.reservation.release()
        self.open.remove(call)

    def fits(self, ledger: Ledger, tokens: int) -> bool:
        """Whether a call fits everywhere above, by counting all calls anew."""
        for above in ledger.line():
            held, used, calls = self.count(above)
            limits = above.budget
            most = limits.max_tokens
            if tokens and most is not None and held + used + tokens > most:
                return False
            if limits.max_subcalls is not None and calls + 1 > limits.max_subcalls:
                return False
        return True

    def count(self, ledger: Ledger) -> tuple[int, int, int]:
        """Tokens held, tokens used and calls of *ledger* and everything below."""
        held = [call for call in self.open if ledger in call.ledger.line()]
        done = [entry for entry in self.settled if ledger in entry[0].line()]
        return (
            sum(call.cost.tokens for call in held),
            sum(used for _, used, _ in done),
            len(held) + len(done),
        )

    @invariant()
    def no_limit_is_passed(self) -> None:
        for ledger in getattr(self, "all", []):
            held, used, calls = self.count(ledger)
            assert (ledger.reserved.tokens, ledger.used.tokens) == (held, used)
            assert ledger.subcalls + ledger.reserved.subcalls == calls
            if ledger.budget.max_tokens is not None:
                assert held + used <= ledger.budget.max_tokens
            if ledger.budget.max_subcalls is not None:
                assert calls <= ledger.budget.max_subcalls


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_a_child_is_allowed_where_every_run_above_allows_its_level(depths: list[int]) -> None:
    """``max_depth`` is how many levels there may be below the first run."""
    ledger = Ledger(Budget(max_depth=depths[0]))
    for depth in depths[1:]:
        ledger = ledger.child(Budget(max_depth=depth))

    assert ledger.child_allowed == (min(depths) >= len(depths))
