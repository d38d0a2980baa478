"""What code in the worker may not bring the kernel to do."""

from __future__ import annotations

from pathlib import Path

from rlm_kernel.engine.events import RunStarted, TurnDecided, TurnObserved
from tests.kernel.client import Kernel
from tests.kernel.test_runs import events, loaded, models, shown

__all__ = ["loaded"]  # the fixture

IMPOSTOR = """
import threading, time
def impostor():
    requests = get_ipython().worker.requests
    while True:
        time.sleep(0.01)
        try:
            {call}
        except BaseException as error:
            refused = error
threading.Thread(target=impostor, daemon=True).start()
"""


def test_a_module_in_the_folder_is_not_imported_by_the_kernel(
    own_kernel: Kernel, tmp_path: Path
) -> None:
    """A cell writes ``aiohttp.py``; the kernel, which needs aiohttp for a sub-call, ignores it."""
    for name in ("aiohttp", "openai", "zstandard"):
        (tmp_path / f"{name}.py").write_text("open('imported by the kernel', 'w')\n")
    with models() as options:
        sub = options.partition("--sub ")[2]
        own_kernel.run(f"%sub_RLM --model {sub} hi")
    assert not (tmp_path / "imported by the kernel").exists()


def test_a_module_in_the_folder_does_not_keep_the_kernel_from_starting(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('this is mine')")
    with Kernel(cwd=str(tmp_path)) as kernel:
        assert kernel.run("1").result == "1"


def test_code_that_a_root_left_behind_cannot_decide_for_the_person(
    loaded: Kernel, tmp_path: Path
) -> None:
    left_behind = IMPOSTOR.format(call="requests.run_command('run', [])")
    with models(left_behind, "done = 1", "Final = 2") as options:
        loaded.run(f"%%rlm {options} --policy ask\nq")
        loaded.run("%rlm run")
        assert "waits" in loaded.run("import time; time.sleep(0.3)\n%rlm status").text()
        assert loaded.run("'done' in globals()").result == "False"
    decided = [event for event in events(tmp_path) if isinstance(event, TurnDecided)]
    assert len(decided) == 1


def test_code_in_the_worker_cannot_start_a_run(loaded: Kernel, tmp_path: Path) -> None:
    call = "requests.start_run('steal', {'root': 'human'})"
    loaded.run(IMPOSTOR.format(call=call))
    assert loaded.run("import time; time.sleep(0.3)").status == "ok"
    assert "no run" in loaded.run("%rlm status").text()
    assert not (tmp_path / "own.rlm.sqlite").exists() or not any(
        isinstance(event, RunStarted) for event in events(tmp_path)
    )


def test_a_cell_that_the_kernel_cannot_handle_gets_a_reply(loaded: Kernel) -> None:
    assert loaded.run("x = 'openai:m@http://[oops'").status == "ok"
    said = loaded.run("%%rlm --root openai:m@http://[oops\nq")
    assert said.status == "error"
    assert loaded.run("1").result == "1"


def test_a_public_server_that_only_a_cell_names_gets_no_key(tmp_path: Path) -> None:
    env = {"OPENAI_API_KEY": "sk-never-shown", "RLM_NOTEBOOK": str(tmp_path / "own.ipynb")}
    with Kernel(env, cwd=str(tmp_path)) as kernel:
        kernel.run("P = 'text'")
        said = kernel.run("%%rlm --root openai:m@https://models.example.com\nq")
    assert (said.status, said.ename) == ("error", "UsageError")
    assert "no key is sent" in said.evalue


def test_a_person_who_is_the_root_may_interrupt_a_cell_and_go_on(loaded: Kernel) -> None:
    loaded.run("%%rlm --root human\nq")
    request = loaded.send("print('busy', flush=True)\nimport time; time.sleep(600)")
    loaded.until(request, "stream")
    loaded.interrupt()
    assert loaded.collect(request).ename == "KeyboardInterrupt"
    assert loaded.run("6 * 7").result == "42"
    assert loaded.run("Final = 1").status == "ok"
    assert "no run" in loaded.run("%rlm status").text()


def test_a_person_who_is_the_root_is_not_asked_about_their_own_cells(loaded: Kernel) -> None:
    loaded.run("%%rlm --root human --policy ask\nq")
    assert loaded.run("6 * 7").result == "42"
    loaded.run("%rlm stop")
    assert loaded.run("1").result == "1"


def test_a_run_of_a_person_that_ends_by_a_limit_gives_the_notebook_back(loaded: Kernel) -> None:
    loaded.run("%%rlm --root human --max-turns 2\nq")
    loaded.run("a = 1")
    last = loaded.run("b = 2")
    assert "turns" in shown(last) + last.evalue
    assert loaded.run("a + b").result == "3"


def test_a_prompt_is_there_again_after_the_last_cell_took_the_worker(loaded: Kernel) -> None:
    with models("import os; os._exit(3)") as options:
        loaded.run(f"%%rlm {options} --max-turns 1\nq")
    assert loaded.run("len(P)").result == "10400"


def test_the_budget_of_a_child_is_that_of_the_tree(loaded: Kernel) -> None:
    child = "Final = budget()['subcalls_left']"
    with models("r = rlm_query('material')", child, "Final = r") as options:
        loaded.run(f"%%rlm {options} --max-subcalls 5\nq")
    assert loaded.run("Final").result == "'4'"


def test_views_of_old_runs_are_forgotten(loaded: Kernel) -> None:
    """The second run is shown in its own cell only."""
    with models("print('first of all')\nFinal = 1", "Final = 2") as options:
        loaded.run(f"%%rlm {options}\nq")
        second = loaded.run(f"%%rlm {options}\nq")
    assert "first of all" not in shown(second)


def test_a_lost_worker_costs_a_run_its_variables_but_not_its_prompt(
    loaded: Kernel, tmp_path: Path
) -> None:
    """The root is told what is lost, and ``history`` holds each message once."""
    with models("kept = 1", "import os; os._exit(3)", "Final = len(P), history") as options:
        loaded.run(f"%%rlm {options}\nq")
    told = [e.observation for e in events(tmp_path) if isinstance(e, TurnObserved)]
    assert "kept" in told[1]
    assert "(P" not in told[1]
    assert loaded.run("Final[0]").result == "10400"
    assert loaded.run("len(Final[1]) == len({m['content'] for m in Final[1]})").result == "True"
