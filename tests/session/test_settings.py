"""The limits of a run and its other options: what they may be, and what is said of others."""

from __future__ import annotations

import math

import pytest

from rlm_kernel import Budget
from rlm_kernel.errors import UsageError
from rlm_kernel.session.settings import Settings, kept, with_options

COUNTS = ("max_turns", "max_tokens", "max_subcalls", "max_concurrency")
AMOUNTS = ("max_seconds", "max_cost")


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (COUNTS, 0, "must be more than 0, not 0"),
        (COUNTS, -1, "must be more than 0, not -1"),
        (COUNTS, 10**12 + 1, "must be at most 1,000,000,000,000"),
        (COUNTS, True, "must be a whole number, not True"),
        (COUNTS, 2.0, "must be a whole number, not 2.0"),
        (COUNTS, "x", "must be a whole number, not 'x'"),
        (("max_turns", "max_depth"), None, "must be a whole number, not None"),
        (("max_depth",), -1, "must be 0 or more, not -1"),
        (AMOUNTS, 0, "must be more than 0, not 0"),
        (AMOUNTS, -0.5, "must be more than 0, not -0.5"),
        (AMOUNTS, math.nan, "must be a number, not nan"),
        (AMOUNTS, math.inf, "must be a finite number; leave it out for no limit"),
        (AMOUNTS, 10**400, "must be a finite number; leave it out for no limit"),
        (AMOUNTS, True, "must be a number, not True"),
        (AMOUNTS, "5", "must be a number, not '5'"),
    ],
)
def test_a_limit_that_limits_nothing_is_refused_by_name(
    names: tuple[str, ...], value: object, message: str
) -> None:
    for name in names:
        with pytest.raises(UsageError) as caught:
            Budget(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{name} {message}")


def test_a_number_too_long_for_python_to_write_is_refused_too() -> None:
    with pytest.raises(UsageError, match="max_turns must be more than 0, not a number that long"):
        Budget(max_turns=-(10**5000))
    with pytest.raises(UsageError, match="max_turns must be at most"):
        Budget(max_turns=10**5000)


def test_the_least_and_the_most_that_a_limit_can_be() -> None:
    least = Budget(
        max_turns=1, max_tokens=1, max_subcalls=1, max_depth=0, max_concurrency=1, max_seconds=1e-9
    )
    assert (least.max_depth, least.max_cost) == (0, None)
    assert Budget(max_tokens=10**12, max_seconds=1e300, max_cost=5).max_cost == 5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_turns", "0", "--max-turns must be more than 0, not 0"),
        ("max_turns", "9" * 23, "--max-turns must be at most 1,000,000,000,000"),
        ("max_turns", "9" * 5000, "--max-turns cannot be '999"),
        ("max_turns", "many", "--max-turns cannot be 'many': expected `int`, got `str`"),
        ("max_depth", "-1", "--max-depth must be 0 or more, not -1"),
        ("max_seconds", "nan", "--max-seconds must be a number, not nan"),
        ("max_cost", "-2", "--max-cost must be more than 0, not -2.0"),
        ("policy", "foo", "--policy cannot be 'foo': give run or ask"),
        ("colour", "red", "unknown option 'colour'"),
    ],
)
def test_an_option_as_a_person_wrote_it_is_refused_by_its_flag(
    name: str, value: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        with_options(Settings(), {name: value})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 200


def test_options_change_what_they_name() -> None:
    changed = with_options(Settings(), {"policy": "ask", "max_turns": "5", "max_cost": "0.5"})
    assert changed == Settings(policy="ask", budget=Budget(max_turns=5, max_cost=0.5))


def test_tools_are_named_with_commas_between_them() -> None:
    changed = with_options(Settings(), {"tools": " look, mine.py,,", "allow_whole_prompt": True})
    assert changed == Settings(tools=("look", "mine.py"), allow_whole_prompt=True)


def test_the_next_run_of_a_notebook_takes_over_what_its_options_can_change_back() -> None:
    lasting = {"root": "human", "sub": "embedded", "policy": "ask", "max_turns": "5"}
    once = {"tools": "look", "allow_whole_prompt": True, "no_cache": True}
    settings = with_options(Settings(), {**lasting, **once})
    assert kept(settings) == with_options(Settings(), lasting)
