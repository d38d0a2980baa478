"""Runs that a person starts in a notebook, in a front end that knows nothing of them."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlm_kernel.engine.events import RunEnded, SubcallEnded, TurnDecided
from rlm_kernel.record import Record
from tests.kernel.client import Cell, Kernel
from tests.servers.scripted import Hang, Refuse, ScriptedServer, Step, serve_in_thread


@contextmanager
def models(*replies: Step | str) -> Iterator[str]:
    """Options of ``%%rlm`` for a root that gives *replies* and a sub-model that echoes."""
    fenced = [f"```repl\n{reply}\n```" if isinstance(reply, str) else reply for reply in replies]
    with (
        serve_in_thread(ScriptedServer(fenced)) as root,
        serve_in_thread(ScriptedServer(reply=lambda prompt: f"R:{prompt}")) as sub,
    ):
        yield f"--root openai:scripted@{root.base_url} --sub openai:scripted@{sub.base_url}"


def shown(cell: Cell) -> str:
    """The text of all displays of a cell, as a console would print them."""
    contents = cell.of("display_data") + cell.of("update_display_data")
    displays = "\n".join(str(content["data"].get("text/plain", "")) for content in contents)
    return displays + cell.text()


@pytest.fixture
def loaded(own_kernel: Kernel, tmp_path: Path) -> Kernel:
    """A kernel with a prompt loaded from a file."""
    (tmp_path / "prompt.txt").write_text("all that there is to know " * 400)
    cell = own_kernel.run("%prompt prompt.txt")
    assert "10,400 characters" in cell.text()
    return own_kernel


def events(tmp_path: Path) -> list[object]:
    with Record.read(tmp_path / "own.rlm.sqlite") as record:
        return [stored.event for stored in record.events()]


def test_a_run_is_shown_turn_by_turn_in_its_cell(loaded: Kernel, tmp_path: Path) -> None:
    with models("print(len(P))", "r = sub_RLM(['a', 'b'])\nr", "Final = r") as options:
        cell = loaded.run(f"%%rlm {options}\nwhat is there?")
    assert cell.status == "ok"
    text = shown(cell)
    for part in ("turn 1", "10400", "turn 3", "['R:a', 'R:b']"):
        assert part in text
    assert loaded.run("Final, P == context").result == "(['R:a', 'R:b'], True)"
    assert sum(isinstance(event, SubcallEnded) for event in events(tmp_path)) == 2
    with Record.read(tmp_path / "own.rlm.sqlite") as record:
        (run,) = record.runs()
        assert (run.query, run.state, run.turns) == ("what is there?", "answered", 3)
        assert record.verify() == []


def test_a_figure_of_a_turn_is_shown(loaded: Kernel) -> None:
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\nFinal = 1"
    with models(code) as options:
        cell = loaded.run(f"%%rlm {options}\ndraw", timeout=120)
    assert any("image/png" in content["data"] for content in cell.of("display_data"))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%rlm\nq", "no root"),
        ("%%rlm --root nope:x\nq", "no root spec"),
        ("%%rlm --root human --sub nope:x\nq", "no sub spec"),
        ("%%rlm --root human --dialect latin\nq", "dialect"),
        ("%%rlm --root human --max-turns 0\nq", "more than 0"),
        ("%%rlm --root human --max-turns many\nq", "max-turns"),
        ("%%rlm --root human\n  \n", "query"),
        ("%rlm fly", "no command 'fly'"),
        ("%rlm resume", "no run"),
        ("%rlm run", "no proposal"),
        ("%rlm budget max_subcalls=3", "stands alone: leave 'max_subcalls=3' out"),
        ("%rlm run --root human", "stands alone"),
        ("%prompt nowhere.txt", "nowhere.txt"),
        ("%prompt -e 1/0", "division"),
        ("%prompt -e 12", "str"),
    ],
)
def test_bad_input_is_one_error_and_the_kernel_goes_on(
    loaded: Kernel, cell: str, message: str
) -> None:
    said = loaded.run(cell)
    assert said.status == "error"
    assert message in said.evalue
    assert "\n" not in said.evalue
    assert loaded.run("len(P)").result == "10400"


def test_a_run_needs_a_prompt(own_kernel: Kernel) -> None:
    said = own_kernel.run("%%rlm --root human\nq")
    assert (said.status, said.ename) == ("error", "UsageError")
    assert "%prompt" in said.evalue


def test_binary_and_empty_files_are_no_prompts(own_kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "empty").write_bytes(b"")
    assert "binary" in own_kernel.run("%prompt binary").evalue
    assert "empty" in own_kernel.run("%prompt empty").evalue


def test_a_failing_root_fails_the_cell_and_is_recorded(loaded: Kernel, tmp_path: Path) -> None:
    with models("x = 1", Refuse(401)) as options:
        cell = loaded.run(f"%%rlm {options}\nq")
    assert cell.status == "error"
    assert "refused the key (401)" in cell.evalue
    end = events(tmp_path)[-1]
    assert isinstance(end, RunEnded)
    assert end.state == "failed"


def test_stepping_waits_for_a_person_at_each_proposal(loaded: Kernel, tmp_path: Path) -> None:
    with models("x = 1", "x += 1", "x += 10", "Final = x") as options:
        first = loaded.run(f"%%rlm {options} --policy ask\nq")
        assert "x = 1" in shown(first)
        assert "waits" in loaded.run("%rlm status").text()
        assert loaded.run("'x' in globals()").result == "False"
        loaded.run("%rlm run")
        assert loaded.run("x").result == "1"
        loaded.run("%%rlm edit\nx += 100")
        assert loaded.run("x").result == "101"
        loaded.run("%rlm skip")
        assert loaded.run("x").result == "101"
        loaded.run("%rlm resume")
    assert loaded.run("Final").result == "101"
    decided = [event for event in events(tmp_path) if isinstance(event, TurnDecided)]
    assert [event.action for event in decided] == ["run", "edit", "skip", "run"]


def test_an_interrupt_pauses_the_run_and_gives_the_notebook_back(loaded: Kernel) -> None:
    with models("import time\nprint('asleep')\ntime.sleep(600)", "Final = 'woke'") as options:
        request = loaded.send(f"%%rlm {options}\nq", cell_id="start")
        loaded.until_text(request, "time.sleep")
        loaded.interrupt()
        assert loaded.collect(request).status == "ok"
        assert re.search("proposed|proposing|waits", loaded.run("%rlm status").text())
        loaded.run("%rlm resume")
    assert loaded.run("Final").result == "'woke'"


def test_a_root_that_hangs_can_be_stopped(loaded: Kernel) -> None:
    with models(Hang("```repl\nx")) as options:
        request = loaded.send(f"%%rlm {options}\nq")
        loaded.until(request, "display_data")
        loaded.interrupt()
        loaded.collect(request)
        # The notebook is the person's again: no cell waits for the root.
        assert loaded.run("print(1 + 1)").text() == "2\n"
        assert "proposing" in loaded.run("%rlm status").text()
        loaded.run("%rlm stop that is enough")
        assert "no run" in loaded.run("%rlm status").text()


def test_a_person_can_be_the_root(loaded: Kernel, tmp_path: Path) -> None:
    with models() as options:
        sub = options.partition("--sub ")[2]
        assert loaded.run(f"%%rlm --root human --sub {sub}\nq").status == "ok"
        assert loaded.run("n = len(P); n").result == "10400"
        assert loaded.run("1 / 0").ename == "ZeroDivisionError"
        last = loaded.run("Final = sub_RLM(str(n))")
    assert "R:10400" in shown(last)
    with Record.read(tmp_path / "own.rlm.sqlite") as record:
        (run,) = record.runs()
        assert (run.state, run.turns, run.response) == ("answered", 3, "R:10400")


def test_one_call_with_a_magic(loaded: Kernel) -> None:
    with models() as options:
        sub = options.partition("--sub ")[2]
        loaded.run("name = 'Ada'")
        loaded.run(f"%sub_RLM --model openai:scripted@{sub.partition('@')[2]} --out r hi {{name}}")
        assert loaded.run("r").result == "'R:hi Ada'"


def test_the_rebound_name_of_a_root_is_put_back_and_told(loaded: Kernel, tmp_path: Path) -> None:
    with models("P = 'mine'; llm_query = None", "Final = (len(P), callable(llm_query))") as options:
        loaded.run(f"%%rlm {options}\nq")
    assert loaded.run("Final").result == "(10400, True)"
    assert any("P" in getattr(event, "observation", "") for event in events(tmp_path))


def test_two_kernels_on_one_record_do_not_mix(loaded: Kernel, tmp_path: Path) -> None:
    with models("Final = 1") as options:
        loaded.run(f"%%rlm {options}\nq")
        env = {"RLM_NOTEBOOK": str(tmp_path / "own.ipynb")}
        with Kernel(env, cwd=str(tmp_path)) as second:
            second.run("%prompt prompt.txt")
            said = second.run(f"%%rlm {options}\nq")
    assert (said.status, said.ename) == ("error", "RecordError")


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_what_was_recorded(
    loaded: Kernel, tmp_path: Path
) -> None:
    flood = "import random\nprint(random.Random(0).randbytes(500_000).hex())"
    with models("x = 1", flood, "Final = 2", "Final = 3") as options:
        # As a full disk does, this makes each write beyond it fail.
        resource.prlimit(loaded.pid, resource.RLIMIT_FSIZE, (300_000, -1))
        cell = loaded.run(f"%%rlm {options}\nq")
        again = loaded.run(f"%%rlm {options}\nq")
        resource.prlimit(loaded.pid, resource.RLIMIT_FSIZE, (-1, -1))
        assert loaded.run(f"%%rlm {options}\nq").status == "ok"
    for failed in (cell, again):
        assert failed.status == "error"
        assert "own.rlm.sqlite" in failed.evalue
        assert "\n" not in failed.evalue
    assert loaded.run("x").result == "1"
    kept = events(tmp_path)
    assert any(isinstance(event, TurnDecided) for event in kept)
    with Record.read(tmp_path / "own.rlm.sqlite") as record:
        assert [problem for problem in record.verify() if "under way" not in problem] == []
