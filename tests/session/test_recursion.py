"""Child runs: what they may be given, what is left for them, whose ways they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_kernel import RLM, Budget
from rlm_kernel.engine.events import RunStarted, SubcallEnded, SubcallStarted
from rlm_kernel.record import Record
from tests.session.conftest import Serve

Make = Callable[..., RLM]

LONG = "some text with many words in it, " * 200
ITEMS = ["first item ü", 'second "item"\n', "third"]


@pytest.fixture
def recurse(serve: Serve, tmp_path: Path) -> Callable[..., object]:
    """Answer of a run whose roots, children included, say the given cells in order."""

    def run(prompt: object, *cells: str, **options: object) -> object:
        server = serve([f"```repl\n{cell}\n```" for cell in cells])
        made = RLM(
            root=f"openai:scripted@{server.base_url}",
            record=tmp_path / "r.sqlite",
            **options,  # type: ignore[arg-type]
        )
        return made.completion(prompt, query="q").answer  # type: ignore[arg-type]

    return run


def events(tmp_path: Path, kind: type) -> list[object]:
    with Record.read(tmp_path / "r.sqlite") as record:
        return [s.event for s in record.events() if isinstance(s.event, kind)]


WHOLE = "r = rlm_query_batched([{}])[0]\nFinal = type(r).__name__, str(r)"


@pytest.mark.parametrize(
    ("prompt", "expression"),
    [
        (LONG, "P"),
        (LONG, "P.strip()"),
        (f"  \n{LONG}\n\n", "P.strip()"),
        (f"  \n{LONG}\n\n", "P.rstrip() + '\\n'"),
        ("ü" * 3_000_000 + "\n", "P[:-1]"),
        (ITEMS, "''.join(P)"),
        (ITEMS, "'\\n'.join(P)"),
        (ITEMS, "'\\n\\n'.join(P) + '\\n'"),
        (ITEMS, "str(P)"),
        (ITEMS, "__import__('json').dumps(P)"),
        (ITEMS, "__import__('json').dumps(P, indent=2, ensure_ascii=False)"),
        ({"a": LONG, "b": "x"}, "''.join(P.values())"),
        ({"a": LONG, "b": "x"}, "__import__('json').dumps(P)"),
    ],
)
def test_a_child_run_of_the_whole_prompt_is_refused(
    recurse: Callable[..., object], tmp_path: Path, prompt: object, expression: str
) -> None:
    """As that call's own error, in the cell and in the record; no run was started."""
    name, reason = recurse(prompt, WHOLE.format(expression))  # type: ignore[misc]
    assert name == "SubcallError"
    assert "the whole of P again" in reason
    (ended,) = events(tmp_path, SubcallEnded)
    assert isinstance(ended, SubcallEnded)
    assert (ended.ok, ended.error, ended.child_run_id) == (False, reason, "")
    assert len(events(tmp_path, RunStarted)) == 1


@pytest.mark.parametrize(
    ("prompt", "expression"),
    [
        (LONG, "P[:-40]"),
        (LONG, "P[40:]"),
        (LONG, "P + P"),
        (LONG, "'About this: ' + P"),
        (LONG, "P.upper()"),
        (ITEMS, "P[0]"),
        (ITEMS, "''.join(reversed(P))"),
        (ITEMS, "__import__('json').dumps(P[:2])"),
    ],
)
def test_a_child_run_of_anything_else_is_not(
    recurse: Callable[..., object], prompt: object, expression: str
) -> None:
    """However near to the whole it is."""
    assert recurse(prompt, WHOLE.format(expression), "Final = 'ran'") == ("str", "ran")


def test_only_the_call_of_the_whole_prompt_is_refused(recurse: Callable[..., object]) -> None:
    """The others of its batch go on, in order."""
    cell = "r = rlm_query_batched([P[:50], P, P[50:90]])\nFinal = [type(x).__name__ for x in r]"
    child = "Final = 'ran'"
    assert recurse(LONG, cell, child, child) == ["str", "SubcallError", "str"]


def test_the_whole_prompt_may_be_allowed(recurse: Callable[..., object]) -> None:
    """By an option of the run."""
    answer = recurse(LONG, WHOLE.format("P"), "Final = len(P)", allow_whole_prompt=True)
    assert answer == ("str", str(len(LONG)))


def test_a_grandchild_of_the_first_prompt_is_refused(recurse: Callable[..., object]) -> None:
    """Children in turn do not get around it: a child's P is compared along the line."""
    top = "Final = rlm_query('A part, and the rest: ' + P)"
    child = WHOLE.format("P.partition(': ')[2]")
    answer = recurse(LONG, top, child, budget=Budget(max_depth=2))
    assert "the P of a run above" in str(answer)


def test_a_plain_call_may_have_the_whole_prompt(rlm: Make) -> None:
    """It is no child run, and the context of its model is limit enough."""
    assert rlm("Final = sub_RLM(P)").completion("short P", query="q").answer == "R:short P"


def test_a_child_run_has_the_dialect_of_its_parent(
    recurse: Callable[..., object], tmp_path: Path
) -> None:
    """And the same names in its cells."""
    recurse(LONG, "FINAL(rlm_query(P[:90]))", "FINAL(len(context))", dialect="rlms")
    assert [e.dialect for e in events(tmp_path, RunStarted)] == ["rlms", "rlms"]  # type: ignore[attr-defined]


def test_a_child_run_has_what_is_left_of_the_budget(
    recurse: Callable[..., object], tmp_path: Path
) -> None:
    """Its limits are what its parent has not used, and it is told so."""
    recurse(
        LONG,
        "rlm_query(P[:90])\nFinal = rlm_query(P[:80])",
        "Final = 1",
        "Final = 2",
        budget=Budget(max_subcalls=9, max_tokens=90_000, max_seconds=500),
    )
    _, first, second = (e.budget for e in events(tmp_path, RunStarted))  # type: ignore[attr-defined]
    assert (first.max_subcalls, second.max_subcalls) == (9, 8)
    assert 90_000 > first.max_tokens > second.max_tokens > 0
    assert 500 > first.max_seconds > second.max_seconds > 0


def test_the_note_of_a_plain_call_at_the_depth_limit_is_in_the_record(
    recurse: Callable[..., object], tmp_path: Path
) -> None:
    """It says why the call is not what was asked for."""
    recurse(LONG, "Final = rlm_query('x')", "said", budget=Budget(max_depth=0))
    (started,) = events(tmp_path, SubcallStarted)
    assert isinstance(started, SubcallStarted)
    assert (started.kind, "depth limit" in started.note) == ("llm", True)


def test_budget_in_a_cell_shows_run_and_tree(recurse: Callable[..., object]) -> None:
    """A child's own use and left, beside the tree's; and the same as a dict and as a table."""
    code = (
        "b = budget()\n"
        "Final = __import__('json').dumps([b['subcalls_used'], b['subcalls_left'], "
        "b.tree.subcalls_used, b.tree.subcalls_reserved, b['turns_left'], b['depth_left'], "
        "b.run.tokens_used < b.tree.tokens_used, 'whole tree' in repr(b), b['tokens_left']])"
    )
    top = "sub_RLM('x')\nFinal = rlm_query(P[:90]), budget()['subcalls_used'], repr(budget())"
    answer = recurse(LONG, top, "said", code, budget=Budget(max_subcalls=9, max_turns=4))
    child, used, shown = answer  # type: ignore[misc]
    assert json.loads(child) == [0, 7, 1, 1, 3, 0, True, True, None]
    assert used == 2
    assert "whole tree" not in shown


def test_waits_for_sub_calls_are_told_beside_the_seconds(recurse: Callable[..., object]) -> None:
    """Of the cells that are over and of the one that asks."""
    cells = ["sub_RLM('x')", "said", "b = budget()\nFinal = b['waited_s'], b['seconds_used']"]
    waited, seconds = recurse(LONG, *cells)  # type: ignore[misc]
    assert 0 < waited < seconds
