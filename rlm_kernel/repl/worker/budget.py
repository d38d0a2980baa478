"""What ``budget()`` returns in a cell."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import asdict, replace

from rlm_kernel.budget_view import BudgetView, as_html, as_text

__all__ = ["BudgetNow", "make_budget"]


class BudgetNow(dict[str, float | int | None]):
    """Used, set aside and left by this run, as a dict; shown as a table.

    Attributes
    ----------
    run, tree
        `rlm_kernel.budget_view.Spending` of this run and of the whole tree of runs.
    """

    def __init__(self, view: BudgetView, *, waited: float = 0.0) -> None:
        # The kernel knows what cells waited that are over; the one that asks is not. Of the tree
        # it is those of the first run: a child run is itself what a cell of that waits for.
        self.run = replace(view.run, waited_s=view.run.waited_s + waited)
        self.tree = self.run if view.tree == view.run else view.tree
        super().__init__(asdict(self.run))

    def __repr__(self) -> str:
        return as_text(self._view())

    def _repr_html_(self) -> str:
        return as_html(self._view())

    def _view(self) -> BudgetView:
        return BudgetView(run=self.run, tree=self.tree)


def make_budget(now: Callable[[], BudgetNow]) -> Callable[[], BudgetNow]:
    """``budget``, as a function of that name."""

    def budget() -> BudgetNow:
        """What the run has used and set aside, and what is left of its budget."""
        return now()

    budget.__qualname__ = "budget"  # Python's own errors name it so
    return budget
