"""A run shown in the output of the cell that started it, turn by turn, updated in place.

For front ends without a driver: any that can show an output, such as VS Code,
Colab, a console or nbclient. Only display data is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from rlm_kernel.cells import Display, Output, Result
from rlm_kernel.driver.outbox import CallLater, Handle
from rlm_kernel.driver.render import answer_bundle, run_bundle, turn_bundle
from rlm_kernel.driver.trajectory import Trajectory
from rlm_kernel.engine.events import RunEnded, RunStarted, Stored, TurnExecuted

__all__ = ["INTERVAL", "InlineView", "ShowDisplay"]

INTERVAL = 0.1
"""Seconds between updates, at least."""


_Rich = tuple[dict[str, Any], dict[str, Any]]
"""Data and metadata of an output that is more than text."""


class ShowDisplay(Protocol):
    """Shows a MIME bundle, or with *update* changes the one of that id."""

    def __call__(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, update: bool, /
    ) -> None: ...


class InlineView:
    """Shows one run. Feed it the run's events, those of the runs below it included.

    Parameters
    ----------
    display
        Shows and updates.
    query
        What the run is asked.
    live
        False where the front end shows no updates, as consoles do: each turn is shown once
        then, when it is over.
    turns
        False where the turns are cells that the person sees already: those of a person's own.
    loop_time, call_later
        Clock and timer in seconds; those of the running event loop where not given.
    """

    def __init__(
        self,
        display: ShowDisplay,
        query: str,
        *,
        live: bool = True,
        turns: bool = True,
        loop_time: Callable[[], float] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        if loop_time is None or call_later is None:
            loop = asyncio.get_running_loop()
            loop_time, call_later = loop_time or loop.time, call_later or loop.call_later
        self._display = display
        self._query = query
        self._live = live
        self._turns = turns
        self._loop_time = loop_time
        self._call_later = call_later
        self._run: Trajectory | None = None
        self._shown: set[str] = set()
        self._stale: dict[int, None] = {}
        """Turns that changed since they were shown, in order."""
        self._rich: dict[int, list[_Rich]] = {}
        """What the cells of turns showed beyond text; it stands after its turn."""
        self._last = float("-inf")
        self._timer: Handle | None = None

    def on_event(self, stored: Stored) -> None:
        """An event was recorded."""
        if self._run is None and isinstance(stored.event, RunStarted):
            self._run = Trajectory(stored.run_id, stored.event, stored.at)
        run = self._run
        if run is None or not run.owns(stored):
            return
        before = run.turn
        run.apply(stored)
        self._stale.update(dict.fromkeys((before, run.turn)))
        own = stored.run_id == run.run_id
        if own and isinstance(stored.event, TurnExecuted):
            rich = map(_rich, stored.event.result.outputs)
            self._rich[stored.event.turn] = [bundle for bundle in rich if bundle]
        if own and isinstance(stored.event, RunEnded):
            self._end()
        else:
            self._schedule()

    def close(self) -> None:
        """Show what is not shown yet, and nothing after that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._refresh()

    # --- when ---------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._timer is not None:
            return
        wait = self._last + INTERVAL - self._loop_time()
        if wait <= 0:
            self._refresh()
        else:
            self._timer = self._call_later(wait, self._due)

    def _due(self) -> None:
        self._timer = None
        self._refresh()

    # --- what ---------------------------------------------------------------------------------

    def _refresh(self) -> None:
        run = self._run
        if run is None:
            return
        self._last = self._loop_time()
        self._show_run(run)
        if not self._turns:
            return
        stale, self._stale = self._stale, {}
        for number in stale:
            self._show_turn(run, number)

    def _show_run(self, run: Trajectory) -> None:
        if self._live or run.run_id not in self._shown:
            self._show(run.run_id, run_bundle(run, self._query))

    def _show_turn(self, run: Trajectory, number: int) -> None:
        turn = run.turns.get(number)
        if turn is None:
            return
        if not (self._live or turn.ended):
            self._stale[number] = None
            return
        awaiting = run.awaiting and number == run.turn
        key = f"{run.run_id}-{number}"
        if self._live or key not in self._shown:
            self._show(key, turn_bundle(turn, now=run.now, awaiting=awaiting))

        for index, (data, metadata) in enumerate(self._rich.pop(number, ()), 1):
            self._display(data, metadata, f"{key}-{index}", False)

    def _end(self) -> None:
        self.close()
        if self._run is not None:
            self._show(f"{self._run.run_id}-answer", answer_bundle(self._run))

    def _show(self, key: str, data: dict[str, str]) -> None:
        update = key in self._shown
        self._shown.add(key)
        self._display(dict(data), {}, key, update)


def _rich(output: Output) -> _Rich | None:
    if not isinstance(output, Display | Result) or set(output.data) <= {"text/plain"}:
        return None
    return output.data, output.metadata
