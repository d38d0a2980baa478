"""One scheduler for the sub-calls of a whole tree of runs.

It decides what is done when; `rlm_kernel.subcalls.scheduling.caller` does each call.

Plain calls share one pool of workers, each a coroutine that takes one call
after the other: a task per call would cost a good part of what the call costs.
Child runs have a pool for each depth beside it. They make plain calls
themselves, so one that held a place among those, or among the child runs of
its own children's depth, could wait for itself.

Everything here runs in one event loop and is not thread-safe. Durations are
seconds.
"""

from __future__ import annotations

import resource
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Ledger
from rlm_kernel.engine.events import Event
from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.fleet.adaptive import MOST, START
from rlm_kernel.subcalls.scheduling.batch import (
    Batch,
    Call,
    ChildOutcome,
    Deliver,
    Outcome,
    Plan,
    SpawnChild,
    bounded,
    check_params,
)
from rlm_kernel.subcalls.scheduling.cache import Cache, Question, Replies
from rlm_kernel.subcalls.scheduling.caller import Caller
from rlm_kernel.subcalls.scheduling.fair_queue import Lane
from rlm_kernel.subcalls.scheduling.pool import Pool
from rlm_kernel.subcalls.scheduling.retry import Retry
from rlm_kernel.subcalls.scheduling.tools import Toolbox
from rlm_kernel.subcalls.server.structured import check_form

__all__ = ["Batch", "ChildOutcome", "Outcome", "Retry", "Scheduler"]

CHILD_RUNS = 4
"""Child runs under way at once at each depth; every one has a worker process and its own P."""


MOST_SERVERS = 8
"""That are kept busy at once where the budget has no limit, each with the most that one is sent:
a machine has so many GPUs."""


def _nothing() -> None:
    """There is nothing to make lasting."""


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
    commit
        Makes what was emitted lasting; outcomes are handed out afterwards. Where it raises
        `RecordError` their texts are withheld.
    replies
        Where recorded replies are found, to be served again; ``None`` serves none.
    """

    def __init__(
        self,
        *,
        emit: Callable[[str, Event], None],
        concurrency: int | None = None,
        retry: Retry | None = None,
        commit: Callable[[], None] = _nothing,
        replies: Replies | None = None,
    ) -> None:
        self._batches: set[Batch] = set()
        self._concurrency = concurrency
        self._commit = commit
        self._caller = Caller(
            emit=emit,
            retry=retry or Retry(),
            cache=Cache(replies) if replies is not None else None,
            unqueue=lambda batch: self._pool(batch.plan).remove(batch),
            over=self._over,
        )
        self._plain = Pool(concurrency or 1, self._caller.run)
        self._children: dict[int, Pool] = {}
        self._lanes: dict[Endpoint, Lane] = {}
        self._unknown_slots: int | None = None
        """Calls under way at an endpoint that does not say how many it takes."""
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
        cache: bool = True,
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
        cache
            Whether a run's calls may be given replies that were recorded before it began. A
            person's own calls, outside any run, never are: asking again is asking anew.

        Raises
        ------
        UsageError
            The model, a parameter or the form of the reply cannot be; nothing was queued.
        """
        if self._closed:
            raise UsageError("the scheduler is closed: nothing more can be called")
        params = params or SubcallParams()
        check_params(params)
        kind, note = _granted(kind, ledger, spawn_child)
        if kind == "llm":  # a child run is sent no form: its answer is judged by whoever asked
            check_form(params)
        endpoint = resolve(params.model) if kind == "llm" else None
        model = params.model or (endpoint.model if endpoint else "")
        price = endpoint.price(model) if endpoint else None
        sent = bounded(params, ledger, price)
        seconds = ledger.seconds_left()
        plan = Plan(
            batch_id=uuid.uuid4().hex[:16],
            kind=kind,
            run_id=run_id,
            turn=turn,
            ledger=ledger,
            params=params,
            sent_params=sent,
            model=model,
            note=note,
            endpoint=endpoint,
            price=price,
            spawn_child=spawn_child,
            toolbox=toolbox,
            until=None if seconds is None else time.monotonic() + seconds,
            limits_cost=ledger.limits_cost,
            cache=cache and bool(run_id),
            # What tools return is no function of the prompt.
            question=Question(endpoint.spec, model, sent) if endpoint and not toolbox else None,
        )
        batch = Batch(plan, len(prompts), deliver, self._cancel, self._commit)
        if not prompts:
            return batch
        lane = self._lane(plan.endpoint)
        lane.batches += 1
        texts = prompts if not note else [_as_plain(text, params) for text in prompts]
        calls = [Call(batch, index, text, lane) for index, text in enumerate(texts)]
        for call, earlier in zip(calls, retry_of, strict=False):
            call.retry_of = earlier
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
            return Lane(_no_limit)  # the size of its pool is the limit of child runs
        lane = self._lanes.get(endpoint)
        if lane is None:
            lane = self._lanes[endpoint] = Lane(lambda: endpoint.slots or self._unknown_slots)
            endpoint.on_room = self._plain.fill
        return lane

    def _over(self, batch: Batch) -> None:
        """The last call of *batch* ended. Where it was the last of its endpoint, that is let go:
        code in a cell may name any number of them."""
        self._batches.discard(batch)
        endpoint = batch.plan.endpoint
        if endpoint is None:
            return
        lane = self._lanes[endpoint]
        lane.batches -= 1
        if not lane.batches:
            del self._lanes[endpoint]
            if endpoint.on_room == self._plain.fill:
                endpoint.on_room = None

    def _pool(self, plan: Plan) -> Pool:
        if plan.kind == "llm":
            limit = self._concurrency or plan.ledger.line()[-1].budget.max_concurrency
            self._plain.size = limit or _most_connections()
            self._unknown_slots = None if limit else START
            return self._plain
        depth = plan.ledger.depth
        if depth not in self._children:
            self._children[depth] = Pool(CHILD_RUNS, self._caller.run)
        return self._children[depth]

    def _cancel(self, batch: Batch) -> None:
        """End the calls of *batch*. Those with a worker end in it, where their request is."""
        for call in self._pool(batch.plan).remove(batch):
            self._caller.drop(call)
        for call in list(batch.under_way):
            if call.task is not None:
                call.task.cancel()


def _no_limit() -> None:
    return None


def _most_connections() -> int:
    """Calls under way at once where nothing else limits them.

    Each has a connection. Half of the files that a process may have open is left for the rest of
    it: with none left a server would seem to be down, and the record could not be written.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST * MOST_SERVERS
    return most if files == resource.RLIM_INFINITY else max(1, min(most, files // 2))


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
