"""What models cost: the file that ``RLM_PRICES`` names.

    {"MODEL": {"input": 0.25, "output": 2.0}, …}

in US dollars per million tokens. Tokens of a server's prefix cache are counted
at the full price, so that a limit of money holds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlm_kernel.errors import UsageError

__all__ = ["NAME", "Price", "prices_from"]

NAME = "RLM_PRICES"
_FORM = '{"MODEL": {"input": 0.25, "output": 2.0}} in dollars per million tokens'
_EMBEDDED = "smollm2"


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars per million tokens."""

    input: float
    output: float

    def of(self, input_tokens: int, output_tokens: int) -> float:
        """US dollars for so many tokens."""
        return (input_tokens * self.input + output_tokens * self.output) / 1e6

    def output_tokens(self, dollars: float) -> int | None:
        """Tokens of a reply that *dollars* pay, 0 up; ``None`` where replies cost nothing."""
        # One less than the quotient: its rounding must not cost more than there is.
        return None if self.output == 0 else max(int(dollars * 1e6 / self.output) - 1, 0)


_decode = msgspec.json.Decoder(dict[str, Price]).decode


def prices_from(environ: Mapping[str, str] | None = None) -> dict[str, Price]:
    """Prices by model; the embedded model costs nothing. *environ* is the process's if ``None``.

    Raises
    ------
    UsageError
        The file that ``RLM_PRICES`` names cannot be read or holds something else.
    """
    prices = {_EMBEDDED: Price(input=0, output=0)}
    name = (os.environ if environ is None else environ).get(NAME, "").strip()
    if not name:
        return prices
    try:
        given = _decode(Path(name).expanduser().read_bytes())
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise UsageError(f"{NAME} names {name}, which cannot be read: {why}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{NAME} names {name}, which is no {_FORM}: {error}") from None
    for model, price in given.items():
        if not all(math.isfinite(part) and part >= 0 for part in (price.input, price.output)):
            raise UsageError(f"the price of {model!r} in {name} is no number from 0 up")
    return prices | given
