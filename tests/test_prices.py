"""Prices are read from the file that the environment names, or the user is told why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlm_kernel.engine.roots import ChatRoot
from rlm_kernel.errors import UsageError
from rlm_kernel.prices import Price, prices_from


def test_prices_are_read_and_counted_in_dollars_per_million_tokens(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"large": {"input": 2, "output": 8.5}}')
    price = prices_from({"RLM_PRICES": str(path)})["large"]

    assert price == Price(input=2, output=8.5)
    assert price.of(1_000_000, 2_000_000) == 19
    assert price.of(10, price.output_tokens(0.5) or 0) <= 0.5 + price.of(10, 0)


def test_the_embedded_model_costs_nothing_and_others_are_not_known() -> None:
    prices = prices_from({})

    assert prices["smollm2"].of(10**6, 10**6) == 0
    assert prices["smollm2"].output_tokens(0) is None
    assert "large" not in prices


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "which is no"),
        ('{"large": 3}', "which is no"),
        ('{"large": {"input": 1}}', "which is no"),
        ('{"large": {"input": 1, "output": -1}}', "no number from 0 up"),
        ("\udcff", "which is no"),
    ],
)
def test_a_file_of_something_else_is_told_of_and_named(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "prices.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=says) as caught:
        prices_from({"RLM_PRICES": str(path)})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told_of_before_a_root_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_PRICES", str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        ChatRoot("large", "http://127.0.0.1:9", "none")
