"""The demo finds its needle, with the real small model."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from rlm_kernel.app import haystack
from rlm_kernel.app.demo import QUERY, playbook_path
from rlm_kernel.engine.playbook_root import read_playbook
from tests.app.conftest import Command


@pytest.mark.embedded
@pytest.mark.timeout(500)
def test_the_demo_answers_with_the_planted_value(jupyter_rlm: Command, tmp_path: Path) -> None:
    done = jupyter_rlm("demo", timeout=480)

    assert (done.returncode, done.stdout) == (0, "48213\n"), done.stderr
    assert "playbook" in done.stderr
    assert "planted value: 48213" in done.stderr
    notebook = nbformat.read(tmp_path / "demo.ipynb", as_version=4)
    nbformat.validate(notebook)
    sources = [cell.source for cell in notebook.cells]
    for cell in read_playbook(playbook_path(), QUERY):
        assert cell.source in sources
        assert cell.prose in sources
    assert not any(o.output_type == "error" for c in notebook.cells for o in c.get("outputs", []))


def test_needles_and_decoys_are_whole_lines_at_the_same_places_each_time() -> None:
    text = "".join(f"{number}\n" for number in range(5000))
    planted = haystack.with_needles(text)
    lines = planted.splitlines()

    added = [line for line in lines if line.startswith("# ")]
    wanted = [f"# {haystack.needle(gate)}" for gate in haystack.CODES]
    assert sorted(added) == sorted(wanted + [f"# {decoy}" for decoy in haystack.DECOYS])
    assert [line for line in lines if not line.startswith("# ")] == text.splitlines()
    assert haystack.with_needles(text) == planted


def test_no_decoy_says_the_code_of_a_gate() -> None:
    said = {str(code) for code in haystack.CODES.values()}

    assert not [decoy for decoy in haystack.DECOYS if any(code in decoy for code in said)]


def test_the_haystack_is_the_library_without_its_tests(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "b/test/t.py", "site-packages/x.py", "b/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")

    assert haystack.build(tmp_path) == (
        "===== a.py =====\n# a.py\n===== b/c.py =====\n# b/c.py\n",
        2,
    )
