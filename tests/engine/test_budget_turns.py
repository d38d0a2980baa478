"""Calls that wait until others have given back what they set aside."""

from __future__ import annotations

import asyncio
import random

import pytest

from rlm_kernel.engine.budget import Budget, Cost, Ledger, Usage
from rlm_kernel.errors import BudgetExceeded

LIMIT = 100


async def ticks(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(20))
async def test_no_order_of_calls_overspends_or_leaves_one_waiting(seed: int) -> None:
    """Of three runs, with limits of their own; some are cancelled while they wait or work."""
    chance = random.Random(seed)
    first = Ledger(Budget(max_tokens=LIMIT, max_subcalls=None))
    child = first.child(Budget(max_tokens=LIMIT // 2, max_subcalls=None))
    ledgers = [first, child, first.child()]
    refused = 0

    async def call(ledger: Ledger, tokens: int, used: int, turns: int) -> None:
        nonlocal refused
        try:
            reservation = await ledger.reserve_in_turn(Cost(tokens=tokens, subcalls=1))
        except BudgetExceeded:
            refused += 1
            return
        try:
            for each in (first, child):
                limit = each.budget.max_tokens
                assert limit is not None
                assert each.used.tokens + each.reserved.tokens <= limit
            await ticks(turns)
        finally:
            reservation.settle(Usage(input_tokens=used))

    tasks = []
    for _ in range(200):
        tokens = chance.randint(1, 60)
        used = chance.choice([0, 0, 0, 1, tokens])
        tasks.append(
            asyncio.create_task(call(chance.choice(ledgers), tokens, used, chance.randint(0, 5)))
        )
        if chance.random() < 0.2:
            await ticks(2)
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    assert not [end for end in ends if end and not isinstance(end, asyncio.CancelledError)]
    assert refused
    assert first.used.tokens <= LIMIT
    assert all(ledger.reserved == Cost() for ledger in ledgers)
    assert not first._waiting


async def test_runs_that_wait_are_served_in_turn_and_their_calls_in_order() -> None:
    """A run with many calls that wait holds up another's single one by one call."""
    first = Ledger(Budget(max_tokens=10, max_subcalls=None))
    noisy, quiet = first.child(), first.child()
    order: list[str] = []

    async def call(name: str, ledger: Ledger) -> None:
        reservation = await ledger.reserve_in_turn(Cost(tokens=10))
        order.append(name)
        await asyncio.sleep(0)
        reservation.settle(Usage())

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(call(f"noisy {number}", noisy))
        group.create_task(call("quiet", quiet))

    assert order.index("quiet") <= 2
    order.remove("quiet")
    assert order == [f"noisy {number}" for number in range(5)]


async def test_a_small_call_goes_on_when_the_large_one_before_it_is_cancelled() -> None:
    """Although nothing was given back."""
    ledger = Ledger(Budget(max_tokens=10, max_subcalls=None))
    held = ledger.reserve(Cost(tokens=5))
    large = asyncio.create_task(ledger.reserve_in_turn(Cost(tokens=10)))
    small = asyncio.create_task(ledger.reserve_in_turn(Cost(tokens=5)))
    await ticks(3)
    large.cancel()
    (await asyncio.wait_for(small, 20)).release()

    held.release()
    assert ledger.reserved == Cost()
