"""Random trees of runs, random failures, cancellations and orders: every promise holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget, Ledger, Usage
from rlm_kernel.engine.events import Event, SubcallEnded, SubcallStarted
from rlm_kernel.errors import SubcallError
from rlm_kernel.subcalls.endpoint import EndpointError, Reply
from rlm_kernel.subcalls.scheduling.batch import Batch, ChildOutcome, Outcome
from rlm_kernel.subcalls.scheduling.scheduler import Retry, Scheduler
from rlm_kernel.text import estimated_tokens

MOST_OUT = 20
"""Output tokens of a call."""

limits = st.none() | st.integers(1, 300)
budgets = st.builds(
    Budget,
    max_tokens=limits,
    max_subcalls=st.none() | st.integers(1, 40),
    max_depth=st.integers(0, 3),
    max_concurrency=st.integers(1, 6),
)


class Moody:
    """An endpoint that takes its time, counted in ticks of the loop, and fails now and then."""

    spec = model = "moody"
    on_room = None

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.slots = dice.choice([None, 1, 3])

    def price(self, model: str) -> None:
        return None

    async def complete(self, prompt: str, params: SubcallParams, **more: Any) -> Reply:
        for _ in range(self.dice.choice([0, 0, 1, 3, 9])):
            await asyncio.sleep(0)
        mood = self.dice.random()
        if mood < 0.15:
            raise EndpointError("moody: try again", retryable=True)
        if mood < 0.3:
            raise EndpointError("moody: no")
        usage = Usage(
            input_tokens=self.dice.randint(0, estimated_tokens(prompt)),
            output_tokens=self.dice.randint(0, MOST_OUT),
        )
        return Reply(text=f"re: {prompt}", usage=usage, finish="stop")

    async def context_limit(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


class Remembering:
    """Some replies that were recorded before; each is found once."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def mark(self) -> int:
        return self.dice.choice([0, 1])

    def reply(self, key: str, after: int, until_seq: int) -> tuple[int, SubcallEnded] | None:
        if self.dice.random() < 0.7:
            return None
        return 1, SubcallEnded(call_id="earlier", ok=True, response=f"recorded {key}")


class Forest:
    """One tree of runs under way, and what must be true of it at every event."""

    def __init__(self, seed: int, budget: Budget, child_budgets: list[Budget]) -> None:
        self.dice = random.Random(seed)
        self.child_budgets = child_budgets
        self.endpoint = Moody(self.dice)
        self.scheduler = Scheduler(
            emit=self.emit,
            retry=Retry(attempts=2, base_s=0, longest_s=0),
            replies=Remembering(self.dice),
        )
        self.ledgers = [Ledger(budget)]
        self.started: list[SubcallStarted] = []
        self.ended: list[tuple[Ledger, SubcallEnded]] = []
        self.of_run = {"run": self.ledgers[0]}
        self.under_way = 0

    def emit(self, run_id: str, event: Event) -> None:
        if isinstance(event, SubcallStarted):
            self.started.append(event)
        elif isinstance(event, SubcallEnded):
            self.ended.append((self.of_run[run_id], event))
        self.check_limits()

    def check_limits(self) -> None:
        for ledger in self.ledgers:
            most, calls = ledger.budget.max_tokens, ledger.budget.max_subcalls
            if most is not None:
                assert ledger.used.tokens + ledger.reserved.tokens <= most
            if calls is not None:
                assert ledger.subcalls + ledger.reserved.subcalls <= calls

    def submit(self, run_id: str, ledger: Ledger, prompts: list[str]) -> Batch:
        return self.scheduler.submit(
            prompts,
            kind=self.dice.choice(["llm", "llm", "rlm"]),
            params=SubcallParams(max_tokens=MOST_OUT),
            run_id=run_id,
            turn=1,
            ledger=ledger,
            resolve=lambda model: self.endpoint,
            deliver=lambda outcomes: self.check_limits(),
            spawn_child=lambda call_id, prompt, params: self.spawn(ledger, call_id),
        )

    async def spawn(self, parent: Ledger, call_id: str) -> ChildOutcome:
        ledger = parent.child(self.dice.choice([*self.child_budgets, parent.budget]))
        self.ledgers.append(ledger)
        self.of_run[call_id] = ledger
        outcomes = await self.run(call_id, ledger, self.dice.randint(0, 5))
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        error = SubcallError("the child failed") if len(failed) > 2 else None
        text = "" if error else "child"
        return ChildOutcome(run_id=call_id, text=text, usage=ledger.used, error=error)

    async def run(self, run_id: str, ledger: Ledger, size: int) -> list[Outcome]:
        prompts = [f"{run_id}:{i}" + "x" * self.dice.randint(0, 60) for i in range(size)]
        batch = self.submit(run_id, ledger, prompts)
        try:
            if self.dice.random() < 0.3:
                for _ in range(self.dice.randint(0, 30)):
                    await asyncio.sleep(0)
                batch.cancel()
            outcomes = await batch.wait()
        except asyncio.CancelledError:
            batch.cancel()
            raise
        self.check_outcomes(prompts, outcomes)
        return outcomes

    def check_outcomes(self, prompts: list[str], outcomes: list[Outcome]) -> None:
        """In order, as many as there were prompts, each with its own id and its own reply."""
        assert [outcome.index for outcome in outcomes] == list(range(len(prompts)))
        assert len({outcome.call_id for outcome in outcomes}) == len(prompts)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if outcome.error is not None:
                assert outcome.text == ""
            elif not outcome.cached and outcome.text != "child":
                assert outcome.text.endswith(f"re: {prompt}")

    def check_sums(self) -> None:
        """Nothing is set aside, and what the ledgers say is what the events say."""
        for ledger in self.ledgers:
            assert ledger.reserved.subcalls == ledger.reserved.tokens == 0
            below = [
                event
                for of, event in self.ended
                if ledger in of.line() and event.attempts and not event.child_run_id
            ]
            plain = [event for event in below if event.call_id not in self.of_run]
            assert ledger.used.tokens == sum(event.usage.tokens for event in plain)
            assert ledger.used.calls == len(plain)

    def check_pairs(self) -> None:
        starts = Counter(event.call_id for event in self.started)
        ends = Counter(event.call_id for _, event in self.ended)
        assert set(starts.values()) <= {1}
        assert starts == ends


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    budget=budgets,
    child_budgets=st.lists(budgets, max_size=2),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_no_order_of_events_breaks_a_promise(
    seed: int, budget: Budget, child_budgets: list[Budget], sizes: list[int]
) -> None:
    """Whatever fails, is cancelled or comes from the record: outcomes in order, one for each
    prompt; every start has one end; no limit is passed at any moment; nothing stays set aside.
    """

    broken: list[Any] = []

    async def grow() -> Forest:
        # Where a check fails inside the scheduler, it is told of as any defect there.
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: broken.append(told))
        forest = Forest(seed, budget, child_budgets)
        try:
            await asyncio.gather(*(forest.run("run", forest.ledgers[0], size) for size in sizes))
        finally:
            await forest.scheduler.close()
        return forest

    forest = asyncio.run(asyncio.wait_for(grow(), 60))
    assert broken == []
    forest.check_pairs()
    forest.check_sums()
