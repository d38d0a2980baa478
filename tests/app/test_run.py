"""``jupyter rlm run`` answers, says what is wrong, and exits as promised."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from rlm_kernel.app.main import main
from tests.app.conftest import Command
from tests.host.conftest import until
from tests.servers.scripted import MODEL, AskTools, Cut, Hang, Refuse, Say, ScriptedServer

ASK = """Look.

```repl
import re
place = P.index("needle")
said = sub_RLM(f"Which number? {P[place - 8 : place + 20]}")
print(said)
```"""
ANSWER = "```repl\nFinal = said\n```"


def arguments(prompt: Path, server: ScriptedServer, *more: str) -> list[str]:
    root = f"openai:{MODEL}@{server.base_url}"
    return ["run", "--prompt", str(prompt), "--query", "Which number?", "--root", root, *more]


def one_line(stderr: str) -> str:
    """The error of the command, which is its last line and the only one of its kind."""
    errors = [line for line in stderr.splitlines() if line.startswith("jupyter rlm:")]
    assert len(errors) == 1, stderr
    assert "Traceback" not in stderr
    return errors[0]


def test_the_answer_alone_is_on_stdout(
    jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.extend([Say(ASK), Say("42"), Say(ANSWER)])
    done = jupyter_rlm(*arguments(prompt, server, "--out", "run.ipynb"))

    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert "turn 2 executing" in done.stderr
    assert "\x1b" not in done.stderr
    notebook = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["rlm"]["response"] == "42"
    assert (tmp_path / "run.rlm.sqlite").is_file()


def test_json_tells_the_usage(
    jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.extend([Say(ASK), Say("42"), Say(ANSWER)])
    done = jupyter_rlm(*arguments(prompt, server, "--json"))

    report = json.loads(done.stdout)
    assert (report["state"], report["response"], report["notebook"]) == ("answered", "42", None)
    assert report["usage"]["calls"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]


@pytest.mark.parametrize("given", ["@question.txt", "-"])
def test_the_query_comes_from_a_file_or_stdin(
    given: str, jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    question = "Wieviele Nadeln?\nÄhem."
    (tmp_path / "question.txt").write_text(question, "utf-8")
    server.script.append(Say("```repl\nFinal = 1\n```"))
    args = arguments(prompt, server)
    args[args.index("Which number?")] = given
    done = jupyter_rlm(*args, stdin=question.encode())

    assert done.returncode == 0, done.stderr
    assert any(question in m["content"] for m in server.requests[0].messages)


def test_functions_of_a_file_are_tools_of_the_sub_model(
    jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    """And the whole prompt goes to a child run where that is allowed."""
    (tmp_path / "my tools.py").write_text("def look(at: int):\n    'Look.'\n    return at + 1\n")
    cell = "r = sub_RLM('?'), rlm_query(P)\nFinal = ' '.join(r)"
    server.script.extend(
        [
            Say(f"```repl\n{cell}\n```"),
            AskTools((("look", '{"at": 41}'),)),
            Say("42"),
            Say("```repl\nFinal = 'whole'\n```"),
        ]
    )
    options = ("--tools", "my tools.py", "--allow-whole-prompt", "--out", "run.ipynb")
    done = jupyter_rlm(*arguments(prompt, server, *options))

    assert (done.returncode, done.stdout) == (0, "42 whole\n"), done.stderr
    assert server.requests[2].messages[-1]["content"] == "42"
    assert "tools" not in server.requests[0].body
    start = nbformat.read(tmp_path / "run.ipynb", as_version=4).cells[2].source
    assert "--allow-whole-prompt" in start


# --- exit code 2: nothing is started ------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"--prompt": "missing.txt"}, "there is no prompt missing.txt"),
        ({"--prompt": "empty.txt"}, "is empty"),
        ({"--root": "opnai:model"}, "did you mean"),
        ({"--root": "human"}, "needs a notebook"),
        ({"--root": "playbook:none.py"}, "there is no playbook in none.py"),
        ({"--root": "playbook:prompt.txt", "--out": "run.ipynb"}, "give the path of a .py or .ip"),
        ({"--sub": "playbook:x.py"}, "can only be a root"),
        ({"--query": "  "}, "the query is empty"),
        ({"--query": "@none.txt"}, "cannot be read"),
        ({"--out": "nowhere/run.ipynb"}, "does not exist"),
        ({"--out": "prompt.txt"}, "not the notebook of a run"),
        ({"--max-turns": "0"}, "--max-turns"),
        ({"--max-turns": "9" * 23}, "is more than 1,000,000,000,000"),
        ({"--max-cost": "much"}, "--max-cost"),
        ({"--tools": "none.py"}, "there are no tools in none.py"),
        ({"--tools": "prompt.txt"}, "there are no tools in prompt.txt"),
        ({"--fast": "yes"}, "--fast"),
    ],
)
def test_what_can_be_known_beforehand_is_a_usage_error(
    change: dict[str, str],
    complaint: str,
    prompt: Path,
    server: ScriptedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    args = arguments(prompt, server)
    for name, value in change.items():
        if name in args:
            args[args.index(name) + 1] = value
        else:
            args += [name, value]
    code = main(args)
    said = capsys.readouterr()

    assert (code, said.out) == (2, "")
    assert complaint in one_line(said.err)
    assert server.requests == []
    assert {path.name for path in tmp_path.iterdir()} == {"prompt.txt", "empty.txt"}


def test_a_binary_prompt_is_a_usage_error(
    jupyter_rlm: Command, server: ScriptedServer, tmp_path: Path
) -> None:
    binary = tmp_path / "binary.bin"
    binary.write_bytes(bytes(range(256)) * 100)
    done = jupyter_rlm(*arguments(binary, server))

    assert done.returncode == 2
    assert "binary" in one_line(done.stderr)


# --- exit codes 1 and 3 -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", [Refuse(401, "bad key"), Refuse(404, "no such model"), Cut()], ids=["401", "404", "cut"]
)
def test_an_endpoint_that_fails_is_exit_code_1_with_a_notebook(
    step: Refuse | Cut, jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.extend([step] * 9)
    done = jupyter_rlm(*arguments(prompt, server, "--out", "run.ipynb"))

    assert (done.returncode, done.stdout) == (1, "")
    assert "sk-of-the-test" not in one_line(done.stderr)
    nbformat.validate(nbformat.read(tmp_path / "run.ipynb", as_version=4))


def test_an_endpoint_that_is_down_is_exit_code_1(jupyter_rlm: Command, prompt: Path) -> None:
    root = f"openai:{MODEL}@http://127.0.0.1:9/v1"
    done = jupyter_rlm("run", "--prompt", str(prompt), "--query", "q", "--root", root)

    assert done.returncode == 1
    assert "127.0.0.1:9" in one_line(done.stderr)


def test_a_limit_without_an_answer_is_exit_code_3(
    jupyter_rlm: Command, prompt: Path, server: ScriptedServer
) -> None:
    server.script.extend([Say("```repl\nx = 1\n```")] * 5)
    done = jupyter_rlm(*arguments(prompt, server, "--max-turns", "2"))

    assert (done.returncode, done.stdout) == (3, "")
    assert "turns" in one_line(done.stderr)


# --- interruption -------------------------------------------------------------------------------


@pytest.fixture
def under_way(prompt: Path, server: ScriptedServer, tmp_path: Path):
    """A run whose root does not answer."""
    server.script.append(Hang())
    args = arguments(prompt, server, "--out", "run.ipynb")
    with subprocess.Popen(
        [sys.executable, "-m", "rlm_kernel.app.main", *args],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until(lambda: bool(server.requests), "the root was not asked")
        yield process
        process.kill()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_and_saves_the_notebook(
    number: signal.Signals, under_way: subprocess.Popen[str], tmp_path: Path
) -> None:
    left = family(under_way)
    assert left
    under_way.send_signal(number)
    stdout, stderr = under_way.communicate(timeout=60)

    assert (under_way.returncode, stdout) == (130, "")
    said = "jupyter rlm: you interrupted the run; what it had done is in run.ipynb"
    assert one_line(stderr) == said
    assert "headless" not in stderr
    meta = nbformat.read(tmp_path / "run.ipynb", as_version=4).metadata["rlm"]
    assert meta["state"] == "stopped"
    assert not [child for child in left if alive(child)]


def test_a_killed_command_leaves_no_process(under_way: subprocess.Popen[str]) -> None:
    left = family(under_way)
    assert left
    under_way.kill()

    until(lambda: not any(map(alive, left)), "processes are left behind")


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the rest -----------------------------------------------------------------------------------


def test_version_and_help(jupyter_rlm: Command) -> None:
    import rlm_kernel

    assert rlm_kernel.__version__ in jupyter_rlm("--version").stdout
    assert "jupyter rlm demo" in jupyter_rlm("--help").stdout
    assert "exit codes" in jupyter_rlm("run", "--help").stdout


def test_no_command_is_a_usage_error(jupyter_rlm: Command) -> None:
    done = jupyter_rlm()

    assert done.returncode == 2
    assert "COMMAND" in one_line(done.stderr)
