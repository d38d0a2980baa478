"""A cell is taken from a reply by parsing; what sets the answer is never evaluated here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.engine.proposals import cell_in


def test_prose_and_source_come_apart() -> None:
    cell = cell_in("Let me look.\n\n```repl\nprint(1)\n```\n")

    assert cell is not None
    assert (cell.prose, cell.source) == ("Let me look.", "print(1)")


@pytest.mark.parametrize(
    "statement",
    [
        "FINAL(answer)",
        "FINAL(f(1)(2)[')'])",
        'FINAL("a ) paren")',
        'FINAL("""two\n\nparagraphs""")',
        'FINAL_VAR("result")',
        "SUBMIT(name='x', n=3)",
        "Final = {'a': 1}",
        "Final = [\n    1,\n]",
    ],
)
def test_a_bare_final_statement_at_the_end_is_a_cell(statement: str) -> None:
    cell = cell_in(f"The evidence agrees.\n\n{statement}")

    assert cell is not None
    assert (cell.prose, cell.source) == ("The evidence agrees.", statement)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I will use FINAL(x) once I know.",
        "FINAL(the answer is 5)",
        "FINAL(x)\n\nThat is my answer.",
        "FINAL(x); import os",
        "Final == 3",
        "FINALLY(x)",
        "<think>\nFINAL(x)",
        "```text\nFINAL(x)\n```",
        "final = 3",
    ],
)
def test_talk_about_the_answer_is_no_cell(reply: str) -> None:
    assert cell_in(reply) is None


def test_a_fence_wins_over_a_bare_final_statement() -> None:
    """What a root says after its cell was written before it saw the output."""
    cell = cell_in("```repl\nx = find()\n```\n\nFINAL(x)")

    assert cell is not None
    assert cell.source == "x = find()"


@given(st.text(max_size=300))
def test_no_text_is_too_odd_to_be_read(text: str) -> None:
    for reply in (text, f"```repl\n{text}", f"FINAL({text})", f"Final = {text}"):
        cell = cell_in(reply)
        assert cell is None or (cell.source.strip() and 0 < cell.end <= len(reply))
