"""How far the sub-calls of a cell are, and how that reads in one output.

The output is shown while they are under way and taken away afterwards; it is
no output of the cell, and no notebook of ours keeps it. A front end that
wants to draw something better finds the numbers in the output's metadata.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

__all__ = ["Tally", "bar_bundle", "bar_metadata", "is_bar", "tally_in", "tally_words"]

_ACCENT = "var(--jp-brand-color1, #3b82c4)"
_BAD = "var(--jp-error-color1, #d9534f)"
_STYLE = (
    "display:flex;flex-wrap:wrap;align-items:center;gap:2px 10px;padding:2px 8px;color:inherit;"
    "font-family:var(--jp-ui-font-family, system-ui, sans-serif);"
    "font-size:var(--jp-ui-font-size1, 13px);line-height:1.45;font-variant-numeric:tabular-nums"
)
_TRACK = (
    "display:flex;flex:0 1 16em;min-width:6em;height:6px;border-radius:3px;overflow:hidden;"
    "background:rgba(128,128,128,.28)"
)
_SETTLES_S = 2.0
"""Seconds before which the rate says nothing of what is left."""

_BLOCKS = " ▏▎▍▌▋▊▉█"
_CELLS = 20


class Tally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sub-calls that a cell has asked for, counted."""

    calls: int
    """All of them, whether sent or not."""

    done: int = 0
    """Those that ended, in whatever way."""

    failed: int = 0
    cached: int = 0
    seconds: float = 0.0
    """Since the first was asked for."""

    rate: float = 0.0
    """Ends per second of late; 0 where there was none."""

    @property
    def seconds_left(self) -> float | None:
        """Until the last ends, if it goes on like this; ``None`` where nobody can tell."""
        left = self.calls - self.done
        known = self.rate > 0 and self.seconds >= _SETTLES_S
        # A single one may be of a loop, which will ask for the next.
        return left / self.rate if known and left > 1 else None


def bar_metadata(tally: Tally | None) -> dict[str, Any]:
    """Metadata of the output that shows *tally*, or ``None`` where it shows nothing any more."""
    numbers = {} if tally is None else msgspec.to_builtins(tally)
    return {"rlm": {"progress": numbers}}


def is_bar(metadata: dict[str, Any]) -> bool:
    """Whether an output with this *metadata* is a bar."""
    ours = metadata.get("rlm")
    return isinstance(ours, dict) and "progress" in ours


def tally_in(metadata: dict[str, Any]) -> Tally | None:
    """What the bar with this *metadata* shows; ``None`` where it is empty, or no bar."""
    if not is_bar(metadata):
        return None
    try:
        return msgspec.convert(metadata["rlm"]["progress"], Tally)
    except msgspec.ValidationError:
        return None


def bar_bundle(tally: Tally | None) -> dict[str, str]:
    """*tally* as a bar, a MIME bundle of HTML and plain text; ``None`` takes no room at all.

    That is empty texts and no empty bundle, which nbconvert warns of.
    """
    if tally is None:
        return {"text/html": "", "text/plain": ""}
    facts = tally_words(tally)
    plain = f"sub-calls ▕{_blocks(tally)}▏ {' · '.join(facts)}"
    return {"text/html": _html(tally, facts), "text/plain": plain}


def tally_words(tally: Tally) -> list[str]:
    """Done and all, then what else there is to say, shortest first to last."""
    words = [f"{tally.done:,}/{tally.calls:,}"]
    if tally.failed:
        words.append(f"{tally.failed:,} failed")
    if tally.cached:
        words.append(f"{tally.cached:,} cached")
    if tally.done < tally.calls:
        words.append(_pace(tally.rate) if tally.rate else _span(tally.seconds))
    if tally.seconds_left is not None:
        words.append(f"{_span(tally.seconds_left)} left")
    return words


def _html(tally: Tally, facts: list[str]) -> str:
    good = _percent(tally.done - tally.failed, tally)
    bad = _percent(tally.failed, tally)
    count, *rest = facts
    more = "".join(f" · {_fact_html(fact)}" for fact in rest)
    return (
        f'<div role="progressbar" aria-label="sub-calls" aria-valuemin="0"'
        f' aria-valuemax="{tally.calls}" aria-valuenow="{tally.done}"'
        f' aria-valuetext="{", ".join(facts)}" style="{_STYLE}">'
        f"<span>sub-calls</span>"
        f'<span style="{_TRACK}"><span style="width:{good:.2f}%;background:{_ACCENT}"></span>'
        f'<span style="width:{bad:.2f}%;background:{_BAD}"></span></span>'
        f'<span><b style="font-weight:600">{count}</b><span>{more}</span></span></div>'
    )


def _fact_html(fact: str) -> str:
    if fact.endswith(" failed"):
        return f'<span style="color:{_BAD};font-weight:600">{fact}</span>'
    return f'<span style="opacity:.75">{fact}</span>'


def _percent(part: int, tally: Tally) -> float:
    return 100 * part / tally.calls if tally.calls else 0.0


def _blocks(tally: Tally) -> str:
    """The bar in `_CELLS` characters, each of 8 steps."""
    steps = int(_percent(tally.done, tally) / 100 * _CELLS * 8)
    full, part = divmod(steps, 8)
    blocks = "█" * full + (_BLOCKS[part] if part else "")
    return blocks.ljust(_CELLS)


def _pace(rate: float) -> str:
    if rate >= 10:
        return f"{rate:,.0f}/s"
    if rate >= 1:
        return f"{rate:.1f}/s"
    return f"{rate * 60:.1f}/min" if rate < 0.05 else f"{rate * 60:.0f}/min"


def _span(seconds: float) -> str:
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02} h"
