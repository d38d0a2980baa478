"""What the command does where its streams, its home or its record are not as they should be."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from rlm_kernel.app.streams import escape_controls
from rlm_kernel.driver.kernel_process import last_words
from rlm_kernel.record import Record
from tests.app.conftest import ENVIRON, Command
from tests.app.test_run import arguments, one_line
from tests.servers.scripted import Say, ScriptedServer

RAW = "4\x1b[31m2\x07\x9b"
ANSWERS = Say(f"```repl\nFinal = {RAW!r}\n```")


def in_shell(
    folder: Path, args: list[str], redirection: str, **streams: int
) -> subprocess.CompletedProcess[str]:
    """The command with a *redirection* of the shell."""
    command = [sys.executable, "-m", "rlm_kernel.app.main", *args]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        cwd=folder,
        env={**os.environ, **ENVIRON},
        text=True,
        timeout=100,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_without_stderr_the_run_goes_on_and_the_answer_is_printed_as_it_is(
    redirection: str, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.append(ANSWERS)
    done = in_shell(tmp_path, arguments(prompt, server, "--out", "run.ipynb"), redirection)

    assert (done.returncode, done.stdout) == (0, RAW + "\n")


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_an_answer_that_cannot_be_printed_is_exit_code_1_and_is_in_the_notebook(
    redirection: str, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.append(ANSWERS)
    done = in_shell(tmp_path, arguments(prompt, server, "--out", "run.ipynb"), redirection)

    assert done.returncode == 1
    assert one_line(done.stderr).endswith("; the answer is in run.ipynb")
    meta = nbformat.read(tmp_path / "run.ipynb", as_version=4).metadata["rlm"]
    assert meta["response"] == RAW


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_a_version_that_cannot_be_printed_is_exit_code_1(redirection: str, tmp_path: Path) -> None:
    done = in_shell(tmp_path, ["--version"], redirection)

    assert done.returncode == 1
    assert "standard output" in one_line(done.stderr)


def test_control_characters_of_an_answer_do_not_reach_a_terminal(
    prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    server.script.append(ANSWERS)
    ours, theirs = pty.openpty()
    try:
        in_shell(tmp_path, arguments(prompt, server), "", stdout=theirs)
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)

    assert shown == "4\\x1b[31m2\\x07\\x9b\r\n"


def test_controls_are_escaped_and_letters_are_not() -> None:
    assert escape_controls("a\tü\n\r\x7f\u2028ツ", keep="\n\t") == "a\tü\n\\x0d\\x7f\u2028ツ"


def test_a_home_that_cannot_be_written_does_not_keep_a_run_from_its_answer(
    jupyter_rlm: Command, prompt: Path, server: ScriptedServer
) -> None:
    server.script.append(Say("```repl\nFinal = 42\n```"))
    done = jupyter_rlm(*arguments(prompt, server, "--out", "run.ipynb"), HOME="/proc/nope")

    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@pytest.mark.parametrize("kind", ["junk", "folder", "held"])
def test_a_record_that_cannot_be_written_leaves_the_notebook_as_it_is(
    kind: str, jupyter_rlm: Command, prompt: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    notebook = nbformat.v4.new_notebook(metadata={"rlm": {"response": "41"}})
    nbformat.write(notebook, tmp_path / "run.ipynb")
    before = (tmp_path / "run.ipynb").read_bytes()
    path = tmp_path / "run.rlm.sqlite"
    held = Record.open(path) if kind == "held" else None
    if kind == "junk":
        path.write_text("no record " * 500)
    elif kind == "folder":
        path.mkdir()
    done = jupyter_rlm(*arguments(prompt, server, "--out", "run.ipynb"))
    if held is not None:
        held.close()

    assert done.returncode == 2, done.stderr
    assert "run.rlm.sqlite" in one_line(done.stderr)
    assert server.requests == []
    assert (tmp_path / "run.ipynb").read_bytes() == before


def test_an_interrupt_before_anything_is_read_is_one_line(tmp_path: Path) -> None:
    """The import of the argument parser is where the signal comes."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'argparse': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from rlm_kernel.app.main import main\n"
        "sys.exit(main(['--version']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    expected = (130, "", "jupyter rlm: interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


LOG = """\
[RLMKernelApp] ERROR | first
[RLMKernelApp] ERROR | second
[RLMKernelApp] WARNING | Kernel is running over TCP
"""


@pytest.mark.parametrize(
    ("log", "chosen", "words"),
    [
        (LOG, False, "[RLMKernelApp] ERROR | second"),
        (LOG.splitlines()[-1], False, ""),
        (LOG.splitlines()[-1], True, ""),
        ("No module named x\n[App] WARNING | y", True, "No module named x"),
        ("NOTE: y", False, ""),
        ("Traceback (most recent call last):\n  File x\nKeyError: 1\nbye\n", False, "KeyError: 1"),
    ],
)
def test_only_what_tells_of_an_error_is_quoted(log: str, chosen: bool, words: str) -> None:
    assert last_words(log, chosen=chosen) == words
