"""What a benchmark prints: one JSON line per figure, with its peer of the same run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Literal

__all__ = ["report"]


def report(
    figure: str,
    unit: str,
    ours: Sequence[float] | float,
    *,
    peer: str = "",
    theirs: Sequence[float] | float | None = None,
    reach: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    **details: object,
) -> None:
    """Print a figure: medians of both sides, their ratio, and whether it reaches what it should.

    Parameters
    ----------
    figure
        What was measured, in words.
    unit
        Unit of *ours* and *theirs*.
    ours, theirs
        Samples, or one value each. Without a peer, *reach* is compared with the value itself.
    reach
        The ratio ours / theirs (or the value) that is to be reached.
    better
        Whether less or more is better.
    details
        Shown as they are.
    """
    value = _median(ours)
    line: dict[str, object] = {"figure": figure, "value": _short(value), "unit": unit}
    compared = value
    if theirs is not None:
        other = _median(theirs)
        compared = value / other
        line |= {"peer": peer, "peer_value": _short(other), "ratio": _short(compared)}
    if reach is not None:
        good = compared <= reach if better == "lower" else compared >= reach
        line |= {"reach": f"{'≤' if better == 'lower' else '≥'} {reach:g}", "reached": good}
    print(json.dumps(line | details, ensure_ascii=False), flush=True)


def _median(samples: Sequence[float] | float) -> float:
    return samples if isinstance(samples, int | float) else statistics.median(samples)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
