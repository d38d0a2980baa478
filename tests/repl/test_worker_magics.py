"""The magics of the REPL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver, echo


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def reply(message: messages.FromWorker) -> messages.ToWorker | None:
    """Acknowledge a run or a command."""
    if isinstance(message, (messages.StartRun, messages.RunCommand)):
        return messages.RunReply(id=message.id, text="as you wish")
    return None


def test_prompt_from_a_file(worker: WorkerDriver, tmp_path: Path) -> None:
    """P is its text, the kernel is told, and one line tells the person."""
    path = tmp_path / "a book.txt"
    path.write_text("x" * 1234)
    for spec in (str(path), f'"{path}"'):
        cell = worker.run(f"%prompt {spec}")
        assert cell.out == f"P is a str of 1,234 characters, from {path}.\n"
        (told,) = cell.requests
        assert isinstance(told, messages.SetPrompt)
        assert (told.prompt.chars, told.prompt.source) == (1234, str(path))
        assert worker.run("len(P)").result == "1234"


def test_prompt_from_a_folder(worker: WorkerDriver, tmp_path: Path) -> None:
    """What was left out is told."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    cell = worker.run(f"%prompt {tmp_path}")
    assert "1 files read, 1 skipped" in cell.out


def test_prompt_from_an_expression_and_from_the_cell(worker: WorkerDriver) -> None:
    """`-e` takes any expression of the namespace, `%%prompt` the cell as it is."""
    worker.run("parts = ['a', 'b']")
    assert "list of 2 characters in 2 items" in worker.run("%prompt -e parts").out
    worker.run("%%prompt\nline {one}\nline two")
    assert worker.run("P").result == "'line {one}\\nline two\\n'"


@pytest.mark.parametrize(
    "code",
    [
        "%prompt",
        "%prompt /no/such/file",
        "%prompt -e 5",
        "%rlm 'unpaired quote",
        "%%rlm\n",
        "%%rlm --no-such-option 5\nq",
        "%sub_RLM",
        "%sub_RLM an { unpaired brace",
    ],
)
def test_a_mistake_is_one_line(worker: WorkerDriver, code: str) -> None:
    """A usage error, without a traceback; nothing is asked of the kernel."""
    cell = worker.run(code, answer=echo)
    assert cell.finished.error is not None
    assert cell.finished.error.ename == "UsageError"
    (shown,) = cell.errors
    assert shown.traceback == [f"UsageError: {shown.evalue}"]
    assert cell.requests == []
    assert cell.err == ""


def test_a_run_cannot_exchange_its_prompt(worker: WorkerDriver, tmp_path: Path) -> None:
    """In a turn `%prompt` is refused."""
    worker.load(b"the prompt")
    worker.begin()
    cell = worker.run("%prompt -e 'another'", turn=1)
    assert not cell.finished.ok
    assert worker.run("P", turn=2).result == "'the prompt'"


def test_starting_a_run(worker: WorkerDriver) -> None:
    """The query and the options as they were written; the reply is printed."""
    cell = worker.run(
        "%%rlm --root openai:m@http://h/v1 --max-turns 5 --policy ask\nWhich {gate}?\n",
        answer=reply,
    )
    (request,) = cell.requests
    assert isinstance(request, messages.StartRun)
    assert request.query == "Which {gate}?"
    assert request.options == {
        "root": "openai:m@http://h/v1",
        "max_turns": "5",
        "policy": "ask",
    }
    assert cell.out == "as you wish\n"


def test_steering_a_run(worker: WorkerDriver) -> None:
    """`%rlm` alone asks for the status; arguments are passed on."""
    for code, command, args in [
        ("%rlm", "status", []),
        ("%rlm stop 'for now'", "stop", ["for now"]),
        ("%rlm run", "run", []),
    ]:
        cell = worker.run(code, answer=reply)
        (request,) = cell.requests
        assert isinstance(request, messages.RunCommand)
        assert (request.command, request.args) == (command, args)
        assert cell.out == "as you wish\n"


def test_a_command_with_a_text_below_it(worker: WorkerDriver) -> None:
    """Such as the new source of a proposal: it is the last argument, as it is."""
    cell = worker.run("%%rlm edit\nprint('{P}')\n", answer=reply)
    (request,) = cell.requests
    assert isinstance(request, messages.RunCommand)
    assert (request.command, request.args) == ("edit", ["print('{P}')\n"])


def test_a_sub_call_by_magic(worker: WorkerDriver) -> None:
    """Expressions are filled in, doubled braces stay single ones, options are passed on."""
    worker.run("parts = {'k': 'v'}")
    cell = worker.run(
        "%sub_RLM --max-tokens 7 --model m say  {parts['k']!r} {{x}} --not-an-option", answer=echo
    )
    assert cell.result == repr("SAY  'V' {X} --NOT-AN-OPTION")
    (request,) = cell.requests
    assert isinstance(request, messages.SendSubcalls)
    assert (request.params.max_tokens, request.params.model) == (7, "m")
    cell = worker.run("%%sub_RLM\nline {1 + 1}\nmore", answer=echo)
    assert cell.out == "LINE 2\nMORE\n"


def test_a_sub_call_that_is_kept(worker: WorkerDriver) -> None:
    """`--out` names a variable and shows nothing; an assignment works too."""
    cell = worker.run("%%sub_RLM --out kept\ntext", answer=echo)
    assert cell.outputs == []
    assert [v.name for v in cell.finished.variables] == ["kept"]
    worker.run("other = %sub_RLM abc", answer=echo)
    assert worker.run("kept, other").result == "('TEXT', 'ABC')"


@pytest.mark.parametrize("name", ["prompt", "rlm", "sub_RLM"])
def test_help_of_the_magics(worker: WorkerDriver, name: str) -> None:
    """`%name?` shows usage and examples."""
    (page,) = worker.run(f"%{name}?").finished.payload
    text = page["data"]["text/plain"]
    assert "Examples::" in text
    assert f"%{name}" in text
