"""Runs of one record: a later one is given the replies of an earlier one, unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlm_kernel import RLM
from rlm_kernel.errors import UsageError
from rlm_kernel.session.settings import Settings, with_options
from tests.session.conftest import Serve

CELL = "Final = llm_query_batched(['a', 'a', 'b'])"


@pytest.mark.parametrize("cache", [True, False])
def test_a_second_run_is_served_from_the_record_of_the_first(
    rlm: Callable[..., RLM], serve: Serve, cache: bool
) -> None:
    """Each sample in its place; nothing is asked, and nothing booked."""
    numbers = iter(range(10))
    sub = serve(reply=lambda prompt: f"{prompt}{next(numbers)}")
    first = rlm(CELL, sub=sub).completion("P", query="q")
    second = rlm(CELL, sub=sub, cache=cache).completion("P", query="q")

    assert len(set(first.answer)) == 3
    if cache:
        assert second.answer == first.answer
        assert second.usage.calls == 1
        assert second.run.subcalls == 0
    else:
        assert not set(second.answer) & set(first.answer)
        assert second.run.subcalls == 3
    assert len(sub.requests) == (3 if cache else 6)


@pytest.mark.parametrize(("given", "cache"), [({}, True), ({"no_cache": True}, False)])
def test_a_person_asks_for_new_answers_with_an_option(
    given: dict[str, str | bool | None], cache: bool
) -> None:
    assert with_options(Settings(), given).cache is cache


def test_an_unknown_option_is_still_refused() -> None:
    with pytest.raises(UsageError, match="no_cash"):
        with_options(Settings(), {"no_cash": True})
