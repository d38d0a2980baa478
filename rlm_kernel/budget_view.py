"""What ``budget()`` in a cell and ``%rlm budget`` show: used, set aside and left."""

from __future__ import annotations

from html import escape

import msgspec

__all__ = ["BudgetView", "Spending", "as_html", "as_text"]

_Row = tuple[str, str, str, str]
"""Of what, used, set aside, left."""

_UNLIMITED = "no limit"


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What a run and all below it have used and set aside, and what is left of the limits.

    ``None`` is no limit. Seconds are wall time, money is in US dollars.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    tokens_used: int = 0
    tokens_reserved: int = 0
    tokens_left: int | None = None
    subcalls_used: int = 0
    subcalls_reserved: int = 0
    subcalls_left: int | None = None
    turns_used: int = 0
    turns_left: int | None = None
    depth_left: int = 0
    """Levels of child runs that sub-calls may start."""

    cost_used: float = 0.0
    cost_reserved: float = 0.0
    cost_left: float | None = None
    seconds_used: float = 0.0
    seconds_left: float | None = None
    waited_s: float = 0.0
    """Of the seconds, those that cells spent waiting for sub-calls and for input."""


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """The budget of a run, and that of the tree that it belongs to."""

    run: Spending = Spending()
    """*Left* is what all limits above it leave, too."""

    tree: Spending = Spending()
    """The same as `run` for the first run of a tree."""


def as_text(view: BudgetView) -> str:
    """A table for a terminal; one part where the run is the whole tree."""
    parts = [_text_table(title, _rows(spending)) for title, spending in _parts(view)]
    return "\n\n".join(parts)


def as_html(view: BudgetView) -> str:
    """A table for a notebook."""
    rows = []
    for title, spending in _parts(view):
        heads = (title, "used", "reserved", "left")
        rows.append("".join(f"<th>{escape(head)}</th>" for head in heads))
        rows += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _rows(spending)]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _parts(view: BudgetView) -> list[tuple[str, Spending]]:
    if view.run == view.tree:
        return [("", view.run)]
    return [("this run", view.run), ("whole tree", view.tree)]


def _rows(it: Spending) -> list[_Row]:
    return [
        ("tokens", f"{it.tokens_used:,}", f"{it.tokens_reserved:,}", _count(it.tokens_left)),
        ("  input", f"{it.input_tokens:,}", "", ""),
        ("  output", f"{it.output_tokens:,}", "", ""),
        (
            "sub-calls",
            f"{it.subcalls_used:,}",
            f"{it.subcalls_reserved:,}",
            _count(it.subcalls_left),
        ),
        ("turns", f"{it.turns_used:,}", "", _count(it.turns_left)),
        ("child levels", "", "", f"{it.depth_left:,}"),
        ("seconds", f"{it.seconds_used:,.1f}", "", _amount(it.seconds_left, "{:,.1f}")),
        ("  waiting", f"{it.waited_s:,.1f}", "", ""),
        (
            "US dollars",
            f"{it.cost_used:.4f}",
            f"{it.cost_reserved:.4f}",
            _amount(it.cost_left, "{:.4f}"),
        ),
    ]


def _count(left: int | None) -> str:
    return _amount(left, "{:,}")


def _amount(left: float | None, form: str) -> str:
    return _UNLIMITED if left is None else form.format(left)


def _text_table(title: str, rows: list[_Row]) -> str:
    table = [(title, "used", "reserved", "left"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in table
    ]
    return "\n".join(lines)
