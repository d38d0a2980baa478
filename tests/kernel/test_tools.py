"""Tools, child runs and the budget of a run that a person starts in a notebook."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlm_kernel.engine.events import RunStarted, ToolCalled
from rlm_kernel.record import Record
from tests.kernel.client import TIMEOUT_S, Kernel
from tests.servers.scripted import AskTools, Say, ScriptedServer, Step, serve_in_thread

DEFINED = '''
shelf = {"a": "the first", "b": "the second"}

def fetch(key: str):
    """Fetch from the shelf."""
    print("a line that stays below")
    return shelf[key]

def spin():
    """Never return."""
    open("spinning", "w").close()
    while True: pass
'''


@contextmanager
def models(*cells: str, uses: tuple[tuple[str, str], ...] = ()) -> Iterator[str]:
    """Options of ``%%rlm`` for a root that says *cells*, and a sub-model that uses tools once."""
    said: list[Step | str] = [f"```repl\n{cell}\n```" for cell in cells]
    asks: list[Step | str] = [AskTools(uses)] if uses else []
    sub = ScriptedServer(asks, reply=lambda prompt: Say(f"told {prompt}"))
    with serve_in_thread(ScriptedServer(said)) as root, serve_in_thread(sub):
        yield f"--root openai:scripted@{root.base_url} --sub openai:scripted@{sub.base_url}"


@pytest.fixture
def loaded(own_kernel: Kernel) -> Kernel:
    """A kernel with a prompt and functions of a person's."""
    assert own_kernel.run("%prompt -e 'all that there is to know ' * 400").status == "ok"
    assert own_kernel.run(DEFINED).status == "ok"
    return own_kernel


def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*; fail where it does not come true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def events(tmp_path: Path, kind: type) -> list[object]:
    with Record.read(tmp_path / "own.rlm.sqlite") as record:
        return [s.event for s in record.events() if isinstance(s.event, kind)]


def test_functions_of_a_persons_cells_are_tools_of_a_run(loaded: Kernel, tmp_path: Path) -> None:
    """Its root does not have them; they are back in the person's next cell."""
    cell = "Final = sub_RLM('?'), [n for n in ('fetch', 'shelf') if n in globals()]"
    with models(cell, uses=(("fetch", '{"key": "b"}'),)) as options:
        ran = loaded.run(f"%%rlm --tools fetch {options}\nq")
    assert ran.status == "ok"
    assert loaded.run("Final").result == "('told the second', ['shelf'])"
    assert loaded.run("fetch('a')").result == "'the first'"
    (used,) = events(tmp_path, ToolCalled)
    assert isinstance(used, ToolCalled)
    assert (used.name, json.loads(used.arguments), used.text) == (
        "fetch",
        {"key": "b"},
        "the second",
    )
    assert "stays below" not in str(ran.messages)


def test_a_file_of_functions_gives_tools(loaded: Kernel, tmp_path: Path) -> None:
    """Nothing of it is in the namespace."""
    (tmp_path / "mine.py").write_text("def one():\n    'Give one.'\n    return 1\n")
    with models("Final = sub_RLM('?'), 'one' in globals()", uses=(("one", ""),)) as options:
        assert loaded.run(f"%%rlm --tools mine.py,fetch {options}\nq").status == "ok"
    assert loaded.run("Final, 'one' in globals()").result == "(('told 1', False), False)"


@pytest.mark.parametrize(
    ("given", "said"),
    [("nowhere", "no function nowhere"), ("shelf", "a function, not"), ("gone.py", "no file")],
)
def test_what_can_be_no_tool_starts_no_run(
    loaded: Kernel, tmp_path: Path, given: str, said: str
) -> None:
    """The cell fails with the reason."""
    with models("Final = 1") as options:
        ran = loaded.run(f"%%rlm --tools {given} {options}\nq")
    assert (ran.status, ran.ename) == ("error", "UsageError")
    assert said in ran.evalue
    assert loaded.run("%rlm status").text().startswith("no run")


def test_an_interrupt_ends_a_tool_that_does_not_end(loaded: Kernel, tmp_path: Path) -> None:
    """The run pauses with its cell interrupted; the worker and its variables live on."""
    cell = "import os\nopen('pid', 'w').write(str(os.getpid()))\nsub_RLM('?')"
    with models(cell, "Final = 1", uses=(("spin", "{}"),)) as options:
        request = loaded.send(f"%%rlm --tools spin {options}\nq")
        until((tmp_path / "spinning").exists)
        loaded.interrupt()
        loaded.collect(request)
        loaded.run("%rlm stop")
    (used,) = events(tmp_path, ToolCalled)
    assert isinstance(used, ToolCalled)
    assert used.error
    assert loaded.run("os.getpid() == int(open('pid').read()), shelf['a']").result == (
        "(True, 'the first')"
    )


def test_the_whole_prompt_goes_to_a_child_run_where_that_is_allowed(
    loaded: Kernel, tmp_path: Path
) -> None:
    """By an option of the run, and not otherwise."""
    cells = ("Final = rlm_query_batched([P])", "Final = 'the child ran'")
    with models(*cells) as options:
        loaded.run(f"%%rlm {options}\nq")
    assert "the whole of P again" in loaded.run("str(Final[0])").result
    with models(*cells) as options:
        loaded.run(f"%%rlm --allow-whole-prompt {options}\nq")
    assert loaded.run("Final").result == "['the child ran']"
    assert len(events(tmp_path, RunStarted)) == 3


def test_the_budget_is_told_as_a_table(loaded: Kernel) -> None:
    """In a run and outside, by the command and in a cell."""
    with models("x = 1", "Final = repr(budget())") as options:
        loaded.run(f"%%rlm --policy ask --max-turns 7 --max-tokens 50000 {options}\nq")
        table = loaded.run("%rlm budget").text()
        loaded.run("%rlm run")
        loaded.run("%rlm run")
    lines = table.replace(",", "").splitlines()[1:]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["turns"] == ["1", "6"]
    assert 0 < int(rows["tokens"][0]) < 50_000
    assert int(rows["tokens"][2]) == 50_000 - int(rows["tokens"][0])
    assert "sub-calls" in loaded.run("print(Final)").text()
    assert "no limit" in loaded.run("%rlm budget").text()


def test_what_one_run_was_given_and_allowed_is_not_the_next_ones(loaded: Kernel) -> None:
    """Its models are: no option could take the tools and the permission back."""
    second = "Final = 'fetch' in globals(), str(sub_RLM([P], depth='rlm')[0])"
    with models("Final = 1", second) as options:
        assert loaded.run(f"%%rlm --tools fetch --allow-whole-prompt {options}\nq").status == "ok"
        assert loaded.run("%%rlm\nq").status == "ok"
    assert loaded.run("Final[0]").result == "True"
    assert "would get the whole of P" in loaded.run("Final[1]").result
