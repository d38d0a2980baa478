"""What somebody who knows ipykernel expects of a Python notebook."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.kernel.client import Kernel


def test_streams_come_in_order_and_in_their_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        "import sys\n"
        "for i in range(3):\n"
        "    print('out', i)\n"
        "    print('err', i, file=sys.stderr)\n"
    )
    names: list[tuple[str, str]] = []
    for content in cell.of("stream"):
        if names and names[-1][0] == content["name"]:
            names[-1] = (content["name"], names[-1][1] + content["text"])
        else:
            names.append((content["name"], content["text"]))
    assert names == [
        (name, f"{text} {i}\n")
        for i in range(3)
        for name, text in (("stdout", "out"), ("stderr", "err"))
    ]


def test_output_of_c_code_and_subprocesses_is_shown_in_order(kernel: Kernel) -> None:
    cell = kernel.run(
        "import os, subprocess\n"
        "print('one')\n"
        "os.write(1, b'two\\n');\n"
        "print('three')\n"
        "_ = subprocess.run(['echo', 'four'])\n"
        "print('five')\n"
    )
    assert cell.text() == "one\ntwo\nthree\nfour\nfive\n"


def test_out_in_and_underscore(kernel: Kernel) -> None:
    first = kernel.run("41 + 1")
    count = first.reply["content"]["execution_count"]
    assert first.result == "42"
    assert kernel.run(f"_ + 1, Out[{count}], In[{count}]").result == "(43, 42, '41 + 1')"


def test_a_display_is_updated_by_its_id(kernel: Kernel) -> None:
    cell = kernel.run("h = display('a', display_id='same'); h.update('b')")
    shown = cell.of("display_data") + cell.of("update_display_data")
    assert [c["data"]["text/plain"] for c in shown] == ["'a'", "'b'"]
    assert {c["transient"]["display_id"] for c in shown} == {"same"}


def test_matplotlib_draws_inline(kernel: Kernel) -> None:
    cell = kernel.run("import matplotlib.pyplot as plt; plt.plot([1, 3, 2]);", timeout=120)
    (figure,) = cell.of("display_data")
    assert base64.b64decode(figure["data"]["image/png"]).startswith(b"\x89PNG")


def test_a_traceback_names_the_line_and_comes_once(kernel: Kernel) -> None:
    cell = kernel.run("def f():\n    return 1 / 0\nf()")
    (error,) = cell.of("error")
    assert (cell.status, error["ename"]) == ("error", "ZeroDivisionError")
    assert "return" in "".join(error["traceback"])
    assert "ZeroDivisionError" not in cell.text() + cell.text("stderr")


def test_functions_classes_closures_and_recursion_live_in_one_namespace(kernel: Kernel) -> None:
    assert kernel.run("n = 1\nclass A:\n    def get(self): return later(n)").status == "ok"
    assert kernel.run("def later(x): return x if x > 5 else later(x + n)").status == "ok"
    assert kernel.run("n = 2; A().get(), __name__, [A for _ in 'x'][0].__module__").result == (
        "(6, '__main__', '__main__')"
    )


def test_pickle_works_for_a_class_of_a_cell(kernel: Kernel) -> None:
    cell = kernel.run("import pickle\nclass B:\n    x = 1\npickle.loads(pickle.dumps(B())).x")
    assert cell.result == "1"


def test_top_level_await_and_background_tasks(kernel: Kernel) -> None:
    assert kernel.run("import asyncio; await asyncio.sleep(0, 'slept')").result == "'slept'"
    started = kernel.run(
        "async def later():\n"
        "    await asyncio.sleep(0.05)\n"
        "    global done; done = True\n"
        "done = False; task = asyncio.create_task(later())"
    )
    assert started.status == "ok"
    assert kernel.run("await task; done").result == "True"


def test_magics_shell_and_bash(kernel: Kernel) -> None:
    assert "echoed" in kernel.run("!echo echoed").text()
    assert "from bash 3" in kernel.run("%%bash\necho from bash $((1+2))").text()
    assert kernel.run("!exit 7\n_exit_code").result == "7"
    assert (
        kernel.run("import subprocess; subprocess.run(['sh', '-c', 'exit 7']).returncode").result
        == "7"
    )
    assert "Wall time" in kernel.run("%%time\n1").text()


def test_input_and_getpass_ask_the_front_end(kernel: Kernel) -> None:
    request = kernel.send("name = input('who? '); name", allow_stdin=True)
    question = kernel.client.get_stdin_msg(timeout=30)
    assert (question["content"]["prompt"], question["content"]["password"]) == ("who? ", False)
    kernel.client.input("Ada")
    assert kernel.collect(request).result == "'Ada'"

    request = kernel.send("import getpass; getpass.getpass('pw: ')", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=30)["content"]["password"] is True
    kernel.client.input("secret")
    assert kernel.collect(request).result == "'secret'"


def test_input_without_a_front_end_that_can_be_asked_is_an_error(kernel: Kernel) -> None:
    assert kernel.run("input('?')", allow_stdin=False).ename == "StdinNotImplementedError"


def test_comms_are_answered_while_input_waits(kernel: Kernel) -> None:
    kernel.run("import ipywidgets; w = ipywidgets.IntSlider(3); w")
    request = kernel.send("input('?')", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=30)
    info = kernel.client.session.msg("comm_info_request", {})
    kernel.client.control_channel.send(info)
    kernel.client.input("x")
    assert kernel.collect(request).result == "'x'"


def test_debug_magic_steps_into_the_last_error(kernel: Kernel) -> None:
    kernel.run("def f(secret):\n    raise ValueError\nf(41)")
    request = kernel.send("%debug", allow_stdin=True)
    kernel.client.get_stdin_msg(timeout=30)
    kernel.client.input("p secret + 1")
    kernel.client.get_stdin_msg(timeout=30)
    kernel.client.input("q")
    assert "42" in kernel.collect(request).text()


def test_widgets_are_synced_both_ways_with_binary_buffers(kernel: Kernel) -> None:
    made = kernel.run(
        "import ipywidgets as w, traitlets\n"
        "class Blob(w.DOMWidget):\n"
        "    data = traitlets.Bytes(b'abc').tag(sync=True, from_json=lambda v, _: bytes(v))\n"
        "b = Blob(); b"
    )
    opened = [m for m in made.messages if m["msg_type"] == "comm_open"]
    blob = next(m for m in opened if "data" in str(m["content"]["data"].get("buffer_paths")))
    assert [bytes(part) for part in blob["buffers"]] == [b"abc"]

    message = kernel.client.session.msg(
        "comm_msg",
        {
            "comm_id": blob["content"]["comm_id"],
            "data": {"method": "update", "state": {}, "buffer_paths": [["data"]]},
        },
    )
    channel = kernel.client.shell_channel
    channel.session.send(channel.socket, message, buffers=[b"\x00\xff from the page"])
    assert kernel.run("b.data").result == repr(b"\x00\xff from the page")


def test_tqdm_notebook_shows_its_bar(kernel: Kernel) -> None:
    cell = kernel.run("from tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass")
    assert cell.status == "ok"
    assert any(m["msg_type"] == "comm_open" for m in cell.messages)


def test_completion_knows_the_values_of_the_namespace(kernel: Kernel) -> None:
    kernel.run("class Ship:\n    def sail_away(self): pass\nboat = Ship()")
    request = kernel.client.complete("boat.sail")
    content = kernel.reply(request)["content"]
    assert "sail_away" in [m.rpartition(".")[2] for m in content["matches"]]


def test_inspection_shows_the_docstring(kernel: Kernel) -> None:
    kernel.run("def f():\n    'says what it does'")
    reply = kernel.reply(kernel.client.inspect("f"))["content"]
    assert reply["found"]
    assert "says what it does" in reply["data"]["text/plain"]


def test_user_expressions_and_silent_cells(kernel: Kernel) -> None:
    kernel.run("x = 5")
    before = kernel.run("1").reply["content"]["execution_count"]
    cell = kernel.run("y = 6", silent=True, user_expressions={"sum": "x + y", "bad": "1/0"})
    said = cell.reply["content"]["user_expressions"]
    assert said["sum"]["data"]["text/plain"] == "11"
    assert said["bad"]["status"] == "error"
    assert kernel.run("1").reply["content"]["execution_count"] == before + 1


@pytest.mark.parametrize(
    "leave", ["exit()", "quit()", "import sys; sys.exit(3)", "raise SystemExit"]
)
def test_leaving_ends_the_cell_only(kernel: Kernel, leave: str) -> None:
    kernel.run("kept = 1")
    kernel.run(leave)
    assert kernel.run("kept").result == "1"


def test_exit_leaves_a_console(kernel: Kernel) -> None:
    """The console is asked to end; in a notebook nothing happens but a line of text."""
    cell = kernel.run("exit")
    assert cell.reply["content"]["payload"] == [{"source": "ask_exit", "keepkernel": False}]
    assert "Kernel menu" in cell.text()


def test_the_folder_of_the_notebook_can_be_imported_from(
    own_kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "beside_it.py").write_text("value = 7")
    assert own_kernel.run("import beside_it; beside_it.value").result == "7"


def test_unicode_that_cannot_be_encoded_is_shown_escaped(kernel: Kernel) -> None:
    assert kernel.run(r"print('\udc80 ok')").text() == "\\udc80 ok\n"
