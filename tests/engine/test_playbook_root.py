"""A playbook is split into cells and never executed by the engine."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.engine.playbook_root import PlaybookCell, PlaybookRoot, read_playbook
from rlm_kernel.engine.proposals import cell_in
from rlm_kernel.engine.roots import HumanRoot, Message, RootStream
from rlm_kernel.errors import NoAnswer, RootError, UsageError

FIRST = [Message("system", "s"), Message("user", "u")]
LATER = [*FIRST, Message("assistant", "a"), Message("user", "seen: 5")]

PERCENT = '''\
"""What this playbook teaches. Not a cell."""
import os

# %% [markdown]
# ## Look first
# The query is: {{query}}
#
# Never print `P`.

# %%
print(len(P))

# %% A title
query = "{{query}}"
raise SystemExit("never run by the engine")
# %% [markdown]
"""
Set it.
"""
# %%
Final = 1
# %% [markdown]
# The end.
'''

CELLS = [
    PlaybookCell("print(len(P))", '## Look first\nThe query is: who\'s "it"?\n\nNever print `P`.'),
    PlaybookCell('query = "who\\\'s \\"it\\"?"\nraise SystemExit("never run by the engine")', ""),
    PlaybookCell("Final = 1", "Set it."),
]


async def hear(stream: RootStream) -> str:
    return "".join([piece async for piece in stream])


def test_a_percent_script_becomes_its_cells(tmp_path: Path) -> None:
    path = tmp_path / "needle.py"
    path.write_text(PERCENT)
    assert read_playbook(path, 'who\'s "it"?') == CELLS


def test_a_notebook_becomes_its_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["Look ", "first: {{query}}"]},
        {"cell_type": "raw", "source": "not this"},
        {"cell_type": "code", "source": ["print(1)\n", "print(2)"]},
        {"cell_type": "code", "source": ""},
        {"cell_type": "code", "source": "Final = 1"},
    ]
    path = tmp_path / "needle.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}))

    assert read_playbook(path, "q") == [
        PlaybookCell("print(1)\nprint(2)", "Look first: q"),
        PlaybookCell("Final = 1", ""),
    ]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(["'", '"', "'''", '"""']))
def test_the_query_survives_in_any_quotes(query: str, quotes: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "p.py")
        path.write_text(f"# %%\nquery = {quotes}{{{{query}}}}{quotes}\n")
        (cell,) = read_playbook(path, query)

    assert ast.literal_eval(cell.source.removeprefix("query = ")) == query


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.py", None, "cannot be read \\(No such file"),
        ("odd.txt", "# %%\n1", "neither a .py file nor a notebook"),
        ("empty.py", "x = 1\n", "has no code cell"),
        ("prose.py", "# %% [markdown]\n# hello\n", "has no code cell"),
        ("broken.ipynb", "{not json", "no notebook of format 4"),
        ("list.ipynb", "[]", "no notebook of format 4"),
        ("cells.ipynb", '{"cells": [{"cell_type": "code"}]}', "no notebook of format 4"),
        ("binary.py", b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_playbook_is_refused(
    tmp_path: Path, name: str, content: str | bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=says):
        PlaybookRoot.from_file(path)


async def test_cells_are_proposed_in_turn_with_their_prose() -> None:
    root = PlaybookRoot([("Look.", "print(1)"), "x = '''\n```\n'''", PlaybookCell("Final = 2")])
    cells = [cell_in(await hear(root.propose(m))) for m in (FIRST, LATER, LATER)]

    assert [(c.prose, c.source) for c in cells if c] == [
        ("Look.", "print(1)"),
        ("", "x = '''\n```\n'''"),
        ("", "Final = 2"),
    ]
    with pytest.raises(NoAnswer, match="without setting an answer"):
        await hear(root.propose(LATER))


async def test_asked_again_for_a_turn_it_says_the_same() -> None:
    root = PlaybookRoot(["print(1)", "print(2)"])
    first = await hear(root.propose(FIRST))

    assert await hear(root.propose(FIRST, attempt=2)) == first
    assert "print(2)" in await hear(root.propose(LATER))


async def test_a_new_run_starts_the_playbook_anew() -> None:
    root = PlaybookRoot(["print(1)", "print(2)"])
    first = await hear(root.propose(FIRST))
    await root.close()
    assert await hear(root.propose(FIRST)) == first


async def test_a_generator_that_raises_is_told_of() -> None:
    def cells():  # type: ignore[no-untyped-def]
        yield "print(1)"
        raise KeyError("oops")

    root = PlaybookRoot(cells)
    await hear(root.propose(FIRST))
    with pytest.raises(RootError, match="the playbook raised KeyError: 'oops'"):
        await hear(root.propose(LATER))
    with pytest.raises(UsageError, match="the generator function itself"):
        PlaybookRoot(cells())


async def test_a_pace_streams_in_small_pieces() -> None:
    root = PlaybookRoot(["print('paced')"], pace=300)
    pieces = [piece async for piece in root.propose(FIRST)]

    assert max(map(len, pieces)) <= 10
    assert len(pieces) > 1
    with pytest.raises(UsageError, match="not possible"):
        PlaybookRoot(["1"], pace=-1)


async def test_a_person_submits_cells() -> None:
    root = HumanRoot()
    root.submit("print('```')")
    cell = cell_in(await hear(root.propose(FIRST)))

    assert cell is not None
    assert cell.source == "print('```')"
    with pytest.raises(UsageError, match="the cell is empty"):
        root.submit(" ")


async def test_a_person_can_give_up() -> None:
    async def ask(messages: object) -> str:
        raise EOFError

    with pytest.raises(NoAnswer, match="ended the run"):
        await hear(HumanRoot(ask).propose(FIRST))
