"""Sub-calls of a person's cells, through a whole kernel to a server and into the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.engine.events import Event, SubcallEnded, SubcallJudged, SubcallStarted
from rlm_kernel.record import Record
from tests.kernel.client import Kernel
from tests.kernel.test_faults import wait_until
from tests.servers.scripted import Hang, ScriptedServer, Step, serve_in_thread


def reply(prompt: str) -> str | Step:
    """What the sub-model says: the last word, or nothing at all to ``hang``."""
    if "was not accepted" in prompt:
        return "7"
    word = prompt.rsplit(maxsplit=1)[-1]
    return Hang() if word == "hang" else word


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serve_in_thread(ScriptedServer(reply=reply)) as server:
        yield server


@pytest.fixture
def kernel(server: ScriptedServer, tmp_path: Path) -> Iterator[Kernel]:
    env = {
        "RLM_NOTEBOOK": str(tmp_path / "cells.ipynb"),
        "RLM_SUB": f"openai:scripted@{server.base_url}",
    }
    with Kernel(env, cwd=str(tmp_path)) as kernel:
        yield kernel


def events(tmp_path: Path) -> list[Event]:
    with Record.read(tmp_path / "cells.rlm.sqlite") as record:
        return [stored.event for stored in record.events()]


SUBTASK = '''
@subtask
def age(text: str) -> int:
    """How old is the person?"""
'''


def test_a_typed_sub_task_is_named_judged_and_asked_again_in_the_record(
    kernel: Kernel, server: ScriptedServer, tmp_path: Path
) -> None:
    kernel.run(SUBTASK)
    assert kernel.run("age.map(['she is 42', 'she is old'])").result == "[42, 7]"
    assert len(server.requests) == 3

    recorded = events(tmp_path)
    started = [event for event in recorded if isinstance(event, SubcallStarted)]
    judged = {event.call_id: event for event in recorded if isinstance(event, SubcallJudged)}
    assert [event.params.task for event in started] == ["age"] * 3
    by_prompt = {event.prompt.split("\n\n")[1]: event for event in started if not event.retry_of}
    good, bad = by_prompt["text: she is 42"], by_prompt["text: she is old"]
    (again,) = [event for event in started if event.retry_of]
    assert again.retry_of == bad.call_id
    assert again.prompt.startswith(bad.prompt)
    verdicts = {call: (event.task, event.ok) for call, event in judged.items()}
    assert verdicts == {
        good.call_id: ("age", True),
        bad.call_id: ("age", False),
        again.call_id: ("age", True),
    }
    assert "no number" in judged[bad.call_id].reason


def test_the_form_of_the_reply_reaches_the_model(kernel: Kernel, server: ScriptedServer) -> None:
    cell = kernel.run("sub_RLM.map('Which is it?', ['spam', 'ham'], choices=['spam', 'ham'])")
    assert cell.result == "['spam', 'ham']"
    for request in server.requests:
        assert all(label in str(request.body) for label in ("spam", "ham"))


def test_a_cell_of_the_magic(kernel: Kernel) -> None:
    kernel.run("mails = {'a': 'it is spam', 'b': 'it is ham'}")
    cell = kernel.run("%%sub_RLM --map mails --out labels --choices spam,ham\nSpam or ham?")
    assert (cell.status, cell.text(), cell.text("stderr")) == ("ok", "", "")
    assert kernel.run("labels").result == "{'a': 'spam', 'b': 'ham'}"


def test_an_interrupted_batch_keeps_what_the_record_says_is_done(
    kernel: Kernel, server: ScriptedServer, tmp_path: Path
) -> None:
    """And the next cell goes on with the rest."""
    kernel.run("prompts = [f'say {i}' for i in range(40)] + ['hang'] * 4")
    request = kernel.send("print('go'); sub_RLM(prompts)")
    kernel.until_text(request, "go")

    wait_until(lambda: server.completed == 40 and server.active == 4, "40 are not answered")
    kernel.interrupt()
    assert kernel.collect(request).ename == "KeyboardInterrupt"

    ended = [event for event in events(tmp_path) if isinstance(event, SubcallEnded)]
    code = "done = sub_RLM.last.done\nlen(done), len(sub_RLM.last), set(done) <= set(range(40))"
    assert kernel.run(code).result == f"({sum(event.ok for event in ended)}, 44, True)"
    assert kernel.run("all(done[i] == str(i) for i in done)").result == "True"
    code = "sub_RLM([p.replace('hang', 'on') for i, p in enumerate(prompts) if i not in done])"
    assert kernel.run(f"{code}[-4:]").result == "['on', 'on', 'on', 'on']"


LEAVES_A_THREAD = """
import threading

def go_on():
    try:
        while True: sub_RLM("still here")
    except BaseException as error:
        open("ended", "w").write(type(error).__name__)

threading.Thread(target=go_on, daemon=True).start()
Final = 1
"""


def test_what_a_run_leaves_behind_goes_on_within_its_budget(
    kernel: Kernel, server: ScriptedServer, tmp_path: Path
) -> None:
    """A thread outlives its run; it is not to go on at the expense of a person without limits."""
    assert kernel.run("%prompt -e 'all that there is to know ' * 400").status == "ok"
    with serve_in_thread(ScriptedServer([f"```repl{LEAVES_A_THREAD}```"])) as root:
        url = f"openai:scripted@{root.base_url}"
        assert kernel.run(f"%%rlm --root {url} --max-subcalls 5\nq").status == "ok"
    wait_until((tmp_path / "ended").exists, "the thread goes on")
    assert (tmp_path / "ended").read_text() == "SubcallError"
    assert len(server.requests) == 5
    assert kernel.run("sub_RLM('a person has no limit')").result == "'limit'"
