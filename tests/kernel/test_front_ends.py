"""What front ends rely on beyond the outputs of a cell."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kernel.client import TIMEOUT_S, Kernel, Message
from tests.kernel.test_runs import models, shown
from tests.servers.scripted import Refuse, Say


def send_comm(kernel: Kernel, comm_id: str, data: Any, kind: str = "comm_msg", **more: Any) -> str:
    """Send a comm message as a page does; returns its id."""
    message = kernel.client.session.msg(kind, {"comm_id": comm_id, "data": data, **more})
    kernel.client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def until_idle(kernel: Kernel, request: str) -> list[Message]:
    """All messages, of whatever request, until *request* is through."""
    messages: list[Message] = []
    while True:
        message: Message = kernel.client.get_iopub_msg(timeout=TIMEOUT_S)
        messages.append(message)
        own = message["parent_header"].get("msg_id") == request
        if own and message["content"].get("execution_state") == "idle":
            return messages


def set_state(kernel: Kernel, comm_id: str, **state: Any) -> str:
    return send_comm(kernel, comm_id, {"method": "update", "state": state, "buffer_paths": []})


@pytest.fixture
def slider(kernel: Kernel) -> str:
    """Comm of the slider of an ``interact``."""
    cell = kernel.run(
        "from ipywidgets import interact\n@interact(n=(0, 10))\ndef f(n=3): print('n is', n)"
    )
    opened = [m["content"] for m in cell.messages if m["msg_type"] == "comm_open"]
    return next(
        str(content["comm_id"])
        for content in opened
        if content["data"]["state"]["_model_name"] == "IntSliderModel"
    )


def test_what_a_slider_prints_goes_where_interact_captures_it(kernel: Kernel, slider: str) -> None:
    """Output and end of a widget's handler belong to the message that moved the slider."""
    request = set_state(kernel, slider, value=7)
    messages = until_idle(kernel, request)
    assert {m["parent_header"]["msg_id"] for m in messages} == {request}
    captured: list[str] = []
    capturing = ""
    for message in messages:
        content = message["content"]
        if message["msg_type"] == "comm_msg":
            capturing = content["data"]["state"].get("msg_id", capturing)
        elif message["msg_type"] in ("stream", "clear_output"):
            assert capturing == request
            captured.append(content.get("text", "cleared"))
    assert captured == ["cleared", "n is 7\n"]


def test_a_slider_moved_while_a_cell_runs_is_told_when_it_may_go_on(
    kernel: Kernel, slider: str
) -> None:
    """A page sends no further change before the idle of the last one."""
    running = kernel.send("import time\nfor _ in range(10): time.sleep(0.1)\nprint('end')")
    kernel.until(running, "execute_input")
    messages = until_idle(kernel, set_state(kernel, slider, value=8))
    ends = [m["content"]["text"] for m in messages if m["msg_type"] == "stream"]
    assert ends == ["end\n", "n is 8\n"]
    assert kernel.reply(running)["content"]["status"] == "ok"


def test_a_cell_that_awaits_and_a_slider_keep_their_outputs_apart(
    kernel: Kernel, slider: str
) -> None:
    """The handler runs in the middle of the cell, whose messages stay its own."""
    running = kernel.send(
        "import asyncio\nprint('before')\nwhile f.widget.children[0].value != 9:\n"
        "    await asyncio.sleep(0.01)\nprint('after')"
    )
    kernel.until(running, "stream")
    moved = set_state(kernel, slider, value=9)
    messages = until_idle(kernel, running)
    texts = {
        (m["parent_header"]["msg_id"], m["content"]["text"])
        for m in messages
        if m["msg_type"] == "stream"
    }
    assert texts == {(moved, "n is 9\n"), (running, "after\n")}


def test_a_handler_that_never_returns_can_be_interrupted(kernel: Kernel) -> None:
    """As a cell can; the namespace stays."""
    kernel.run(
        "from comm import create_comm\nc = create_comm(comm_id='stuck')\n"
        "def stuck(message):\n    print('stuck')\n    while True: pass\nc.on_msg(stuck)\nkept = 5"
    )
    request = send_comm(kernel, "stuck", {})
    kernel.until(request, "stream")
    kernel.interrupt()
    until_idle(kernel, request)
    assert kernel.run("kept").result == "5"


def test_comms_of_a_kernel_that_was_restarted_are_no_news(kernel: Kernel) -> None:
    """A page sends them when it opens a notebook with widgets; no cell shows anything of it."""
    opened = send_comm(
        kernel, "new", {}, kind="comm_open", target_name="nobody.knows", target_module=None
    )
    closed = [m["content"] for m in until_idle(kernel, opened) if m["msg_type"] == "comm_close"]
    assert [content["comm_id"] for content in closed] == ["new"]
    messages = until_idle(kernel, send_comm(kernel, "gone", {}))
    assert {m["msg_type"] for m in messages} == {"status"}


@pytest.mark.parametrize("code", ["%rlm fly", "%prompt nowhere", "%prompt -e", "%nothing_known"])
def test_a_refused_magic_is_one_line_shown_once(kernel: Kernel, code: str) -> None:
    """Without a traceback through the kernel's own code, and not on stderr, too."""
    cell = kernel.run(code)
    (error,) = cell.of("error")
    assert error["traceback"] == [f"UsageError: {cell.evalue}"]
    assert cell.text("stderr") == ""


def test_a_prompt_of_a_subclass_of_str_is_sent_as_str(kernel: Kernel) -> None:
    """Such as a parser of HTML gives. It gets as far as that there is no model."""
    cell = kernel.run("class Text(str): pass\nsub_RLM([Text('x')]), sub_RLM(Text('x'))")
    assert "no model" in cell.evalue


def test_an_interrupted_cell_shows_no_code_of_the_worker(kernel: Kernel) -> None:
    """The traceback ends where the user's code was."""
    for code in ("import time\nprint('up')\ntime.sleep(600)", "print('up')\ninput('?')"):
        request = kernel.send(code, allow_stdin=True)
        kernel.until(request, "stream")
        if "input" in code:
            kernel.client.get_stdin_msg(timeout=TIMEOUT_S)
        kernel.interrupt()
        cell = kernel.collect(request)
        (error,) = cell.of("error")
        assert error["ename"] == "KeyboardInterrupt"
        assert "rlm_kernel" not in "".join(error["traceback"])


@pytest.mark.parametrize(
    ("options", "name", "ename"),
    [
        ("temperature='hot'", "temperature", "TypeError"),
        ("max_tokens=1.5", "max_tokens", "TypeError"),
        ("stop=[3]", "stop", "TypeError"),
        ("seed=10**30", "seed", "ValueError"),
        ("model=object()", "option", "TypeError"),
    ],
)
def test_a_wrong_option_of_a_sub_call_is_an_error_of_its_cell(
    kernel: Kernel, options: str, name: str, ename: str
) -> None:
    """And costs the worker nothing."""
    kernel.run("kept = 1")
    cell = kernel.run(f"sub_RLM('x', {options})")
    assert cell.ename == ename
    assert name in cell.evalue
    assert kernel.run("kept").result == "1"


def test_the_cells_of_a_person_who_is_the_root_are_not_shown_twice(
    own_kernel: Kernel, tmp_path: Path
) -> None:
    """They are cells already; the run adds only its head and its answer, and says what to do."""
    (tmp_path / "p.txt").write_text("text")
    own_kernel.run("%prompt p.txt")
    first = own_kernel.run("%%rlm --root human\nq")
    assert "Final" in first.text()
    assert "turn 1" not in shown(first)
    second = own_kernel.run("from IPython.display import HTML\nHTML('<b>once</b>')")
    assert second.of("display_data") == []
    assert "answer: 4" in shown(own_kernel.run("Final = len(P)"))


def family(kernel: Kernel) -> set[int]:
    """Process ids of all that the kernel started, directly or not."""
    return {child.pid for child in psutil.Process(kernel.pid).children(recursive=True)}


def test_a_worker_that_died_between_cells_is_told_of_in_the_next(own_kernel: Kernel) -> None:
    """Once: a namespace does not become empty without a word."""
    own_kernel.run("kept = 1")
    pid = int(own_kernel.run("import os; os.getpid()").result)
    known = family(own_kernel)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while family(own_kernel) <= known:  # until the kernel has noticed, and started another
        assert time.monotonic() < deadline
        time.sleep(0.01)
    own_kernel.run("0", silent=True)
    said = own_kernel.run("1 + 1")
    assert said.result == "2"
    assert "SIGKILL" in said.text("stderr")
    assert "kept" in said.text("stderr")
    assert own_kernel.run("2 + 2").text("stderr") == ""


def test_the_turn_in_which_a_run_fails_is_not_called_done(
    own_kernel: Kernel, tmp_path: Path
) -> None:
    """Neither is one that the run was stopped in."""
    (tmp_path / "p.txt").write_text("text")
    own_kernel.run("%prompt p.txt")
    with models("x = 1", Refuse(401)) as options:
        text = shown(own_kernel.run(f"%%rlm {options}\nq"))
    assert "turn 1 · done" in text
    assert "turn 2 · failed" in text
    assert "turn 2 · done" not in text
    with models(Say("no code"), Say("no code again")) as options:
        assert "turn 1 · stopped" in shown(own_kernel.run(f"%%rlm {options}\nq"))
