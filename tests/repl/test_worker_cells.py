"""A cell in the worker behaves as a Python user expects of a notebook's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver, WorkerGone


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


@pytest.fixture
def fresh() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def test_hello_tells_who_it_is(worker: WorkerDriver) -> None:
    """The first message names the process and its Python."""
    assert worker.hello.pid == worker.process.pid
    assert worker.hello.python.count(".") == 2


def test_an_idle_worker_has_one_thread(fresh: WorkerDriver) -> None:
    """Neither start, nor a cell, nor `%%bash`, nor an awaiting cell leaves a thread behind."""
    fresh.run("1 + 1")
    assert threads(fresh.hello.pid) == 1
    fresh.run("%%bash\necho hi")
    fresh.run("import asyncio\nawait asyncio.sleep(0)")
    fresh.run("len(P) if 'P' in globals() else 0")
    assert threads(fresh.hello.pid) == 1


def test_results_and_the_history_of_them(worker: WorkerDriver) -> None:
    """A trailing expression is a result; In, Out, _ and __ refer to earlier ones."""
    first = worker.run("40 + 2")
    assert first.result == "42"
    count = first.finished.execution_count
    assert worker.run("_ + 1").result == "43"
    assert worker.run(f"Out[{count}], __").result == "(42, 42)"
    assert worker.run(f"In[{count}]").result == "'40 + 2'"
    assert worker.run("_ih[1:] and 5;").result is None
    assert "40 + 2" in worker.run("%history").out


def test_execution_counts(worker: WorkerDriver) -> None:
    """Stored cells count; silent ones and those that are not stored do not."""
    before = worker.run("0").finished.execution_count
    assert worker.run("7", silent=True).outputs == []
    assert worker.run("7", store_history=False).result == "7"
    assert worker.run("0").finished.execution_count == before + 1


def test_an_error_is_shown_once_and_ends_the_cell(worker: WorkerDriver) -> None:
    """One coloured traceback, the same as in Done, and what came before it stays."""
    cell = worker.run("print('before')\n1 / 0\nprint('after')")
    assert cell.out == "before\n"
    (error,) = cell.errors
    assert not cell.finished.ok
    assert cell.finished.error == error
    assert (error.ename, error.evalue) == ("ZeroDivisionError", "division by zero")
    assert "\x1b[" in "".join(error.traceback)


@pytest.mark.parametrize(
    ("code", "ename"),
    [
        ("def (", "SyntaxError"),
        ("return 3", "SyntaxError"),
        ("  x = 1\n y = 2", "IndentationError"),
        ("raise ExceptionGroup('several', [ValueError(1), KeyError(2)])", "ExceptionGroup"),
        ("def deep(): return deep()\ndeep()", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
    ],
)
def test_every_kind_of_error_is_shown_once(worker: WorkerDriver, code: str, ename: str) -> None:
    """Also those that IPython shows in ways of its own; the next cell runs."""
    cell = worker.run(code)
    assert [error.ename for error in cell.errors] == [ename]
    assert cell.finished.error is not None
    assert worker.run("'alive'").result == "'alive'"


@pytest.mark.parametrize("code", ["exit()", "quit()", "exit", "import sys; sys.exit(3)"])
def test_exit_ends_only_the_cell(worker: WorkerDriver, code: str) -> None:
    """Nothing after it runs, it says what happened, and the REPL lives with its variables."""
    worker.run("kept = 5")
    cell = worker.run(f"{code}\nprint('after')" if code != "exit" else code)
    assert cell.out == ""
    assert "still here" in cell.errors[0].traceback[0]
    assert cell.finished.error is not None
    assert cell.finished.error.ename == "SystemExit"
    assert worker.run("kept").result == "5"


def test_one_real_module_namespace(worker: WorkerDriver) -> None:
    """Classes, closures, comprehensions, recursion, dataclasses and pickle work across cells."""
    worker.run(
        "from dataclasses import dataclass\nimport pickle\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def fact(n): return 1 if n < 2 else n * fact(n - 1)\n"
        "def later(): return helper()\n"
        "counter = 0\n"
        "def count():\n    global counter\n    counter += 1\n"
    )
    worker.run("def helper(): return 'from a later cell'\ncount(); count()")
    assert worker.run("pickle.loads(pickle.dumps(Point(3)))").result == "Point(x=3)"
    assert worker.run("fact(20), [fact(n) for n in range(3)]").result is not None
    assert worker.run("later(), counter").result == "('from a later cell', 2)"
    assert worker.run("__name__, Point.__module__").result == "('__main__', '__main__')"
    assert worker.run("import sys; sys.path[0], sys.modules['__main__'].counter").result == (
        "('', 2)"
    )
    worker.run("del counter")
    assert worker.run("'counter' in globals()").result == "False"


def test_shell_commands_stream_and_keep_their_exit_code(worker: WorkerDriver) -> None:
    """`!cmd` shows its output and sets _exit_code; `%%bash` raises for a failure."""
    cell = worker.run("!echo one; exit 7")
    assert cell.out.split() == ["one"]
    assert worker.run("_exit_code").result == "7"
    assert worker.run("files = !echo a b\nfiles").result == "['a b']"
    local = worker.run(
        "def f(local):\n    !echo {local}\n    x = !echo {local}\n    return x\nf(5)"
    )
    assert (local.out.strip(), local.result) == ("5", "['5']")
    script = worker.run("%%bash\necho out; echo err >&2; exit 3")
    assert (script.out, script.err) == ("out\n", "err\n")
    assert script.errors[0].ename == "CalledProcessError"
    code = "import subprocess; subprocess.run(['sh', '-c', 'exit 7']).returncode"
    assert worker.run(code).result == "7"


def test_top_level_await_and_background_tasks(fresh: WorkerDriver) -> None:
    """A cell may await; a task that it started goes on between cells and in later ones."""
    cell = fresh.run(
        "import asyncio\nfrom comm import create_comm\n"
        "go = asyncio.Event()\nc = create_comm(comm_id='c')\nc.on_msg(lambda m: go.set())\n"
        "async def work():\n    await go.wait()\n    print('worked')\n    return 5\n"
        "task = asyncio.create_task(work())\nawait asyncio.sleep(0)\n'started'"
    )
    assert cell.result == "'started'"
    assert cell.out == ""
    fresh.send(messages.CommToWorker(kind="comm_msg", comm_id="c"))
    emitted = fresh.wait_for(messages.Emit)
    assert emitted.id == cell.finished.id
    assert emitted.output.text == "worked\n"
    assert fresh.run("task.result()").result == "5"
    assert fresh.run("await work()").result == "5"


def test_tasks_without_await_and_asyncio_run(fresh: WorkerDriver) -> None:
    """create_task works in a cell that does not await, asyncio.run in one that does not either."""
    fresh.run("import asyncio\nasync def five(): return 5")
    assert fresh.run("task = asyncio.create_task(five())").finished.ok
    assert fresh.run("await task").result == "5"
    assert fresh.run("asyncio.run(five())").result == "5"
    code = "async def main(): return await asyncio.create_task(five())\nasyncio.run(main())"
    assert fresh.run(code).result == "5"


def test_a_failing_background_task_is_reported_and_harms_nothing(fresh: WorkerDriver) -> None:
    """Also one that tries to leave the process."""
    fresh.run(
        "import asyncio, sys\n"
        "async def leave(): sys.exit(3)\n"
        "async def fail(): raise ValueError('in the background')\n"
        "tasks = [asyncio.create_task(leave()), asyncio.create_task(fail())]"
    )
    assert fresh.run("await asyncio.sleep(0.01); 'alive'").result == "'alive'"
    assert fresh.run("type(tasks[1].exception()).__name__").result == "'ValueError'"


def test_input_and_getpass(worker: WorkerDriver) -> None:
    """Both ask the kernel, with the prompt, after what was printed before."""

    def typed(message: object) -> messages.ToWorker | None:
        assert isinstance(message, messages.GetInput)
        return messages.InputReply(id=message.id, text="secret" if message.password else "typed")

    cell = worker.run(
        "import getpass\nprint('first', end='')\na = input('name? ')\nb = getpass.getpass()\na, b",
        allow_stdin=True,
        answer=typed,
    )
    assert cell.result == "('typed', 'secret')"
    assert [(r.prompt, r.password) for r in cell.requests] == [  # type: ignore[union-attr]
        ("name? ", False),
        ("Password: ", True),
    ]
    assert cell.out == "first"


def test_input_where_nobody_can_be_asked(worker: WorkerDriver) -> None:
    """It raises at once, and a closed input is end of file."""
    cell = worker.run("input('name? ')", allow_stdin=False)
    assert cell.errors[0].ename == "StdinNotImplementedError"

    def closed(message: object) -> messages.ToWorker | None:
        assert isinstance(message, messages.GetInput)
        return messages.InputReply(id=message.id, text=None)

    cell = worker.run("input()", allow_stdin=True, answer=closed)
    assert cell.errors[0].ename == "EOFError"


def test_the_debugger_asks_through_the_kernel(worker: WorkerDriver) -> None:
    """`%debug` after an error works with `input()`."""
    commands = iter(["p marker", "q"])

    def typed(message: object) -> messages.ToWorker | None:
        assert isinstance(message, messages.GetInput)
        return messages.InputReply(id=message.id, text=next(commands))

    worker.run("def bad():\n    marker = 4711\n    raise ValueError\nbad()")
    cell = worker.run("%debug", allow_stdin=True, answer=typed)
    assert "4711" in cell.out


def test_user_expressions_and_payload(worker: WorkerDriver) -> None:
    """Expressions are evaluated after a cell that went well; payloads are handed over once."""
    cell = worker.run("x = 4", user_expressions={"y": "x + 1", "bad": "1 / 0"})
    assert cell.finished.user_expressions["y"]["data"]["text/plain"] == "5"
    assert cell.finished.user_expressions["bad"]["status"] == "error"
    assert worker.run("1 / 0", user_expressions={"y": "x"}).finished.user_expressions == {}
    cell = worker.run("get_ipython().set_next_input('next')")
    assert cell.finished.payload == [{"source": "set_next_input", "text": "next", "replace": False}]
    assert worker.run("sub_RLM?").finished.payload[0]["source"] == "page"
    assert worker.run("1").finished.payload == []


def test_completion(worker: WorkerDriver) -> None:
    """Names, attributes of live objects and keys, with the types beside them."""
    worker.run("some_long_name = {'a key': 1}")
    worker.send(messages.Complete(id=1, code="x = some_lo", cursor_pos=11))
    found = worker.wait_for(messages.Completions)
    assert found.matches == ["some_long_name"]
    assert (found.cursor_start, found.cursor_end) == (4, 11)
    kinds = found.metadata["_jupyter_types_experimental"]
    assert kinds[0]["text"] == "some_long_name"
    assert kinds[0]["type"] in ("instance", "<unknown>")
    worker.send(messages.Complete(id=2, code="some_long_name['a", cursor_pos=17))
    assert "a key" in worker.wait_for(messages.Completions).matches[0]


def test_inspection_and_completeness(worker: WorkerDriver) -> None:
    """An object's documentation, and whether code wants another line."""
    worker.run("def documented():\n    'Says what it does.'")
    worker.send(messages.Inspect(id=1, code="documented()", cursor_pos=4))
    found = worker.wait_for(messages.Inspection)
    assert found.found
    assert "Says what it does." in found.data["text/plain"]
    worker.send(messages.Inspect(id=2, code="nothing_such", cursor_pos=4))
    assert not worker.wait_for(messages.Inspection).found
    for code, status in [
        ("1 + 1", "complete"),
        ("for x in y:", "incomplete"),
        ("1 +* 2", "invalid"),
    ]:
        worker.send(messages.IsComplete(id=3, code=code))
        assert worker.wait_for(messages.Completeness).status == status


def test_help_with_typing_survives_hostile_objects(worker: WorkerDriver) -> None:
    """A `__dir__` that raises or leaves must not take the worker with it."""
    worker.run("class Bad:\n    def __dir__(self): raise SystemExit\nbad = Bad()")
    worker.send(messages.Complete(id=1, code="bad.", cursor_pos=4))
    assert worker.wait_for(messages.Completions).id == 1
    assert worker.run("'alive'").result == "'alive'"


def test_changed_variables_are_told(worker: WorkerDriver) -> None:
    """New, changed and deleted ones with type and size; no modules, no private names."""
    cell = worker.run("import math\nfresh_list = [1, 2]\n_hidden = 1\ndef fresh_f(): pass")
    found = {v.name: (v.type, v.size, v.change) for v in cell.finished.variables}
    assert found == {"fresh_list": ("list", 2, "new"), "fresh_f": ("function", None, "new")}
    cell = worker.run("fresh_list.append(3)")
    assert [(v.name, v.size, v.change) for v in cell.finished.variables] == [
        ("fresh_list", 3, "changed")
    ]
    cell = worker.run("del fresh_list")
    assert [(v.name, v.change) for v in cell.finished.variables] == [("fresh_list", "deleted")]
    worker.send(messages.Variables(id=9))
    names = {v.name for v in worker.wait_for(messages.VariableList).variables}
    assert "fresh_f" in names
    assert not names & {"fresh_list", "math", "sub_RLM", "answer", "In", "exit", "_hidden"}


def test_telling_variables_runs_no_code_of_theirs(worker: WorkerDriver) -> None:
    """`len` of a class of the user's may do anything and is not called."""
    worker.run("class Lazy:\n    def __len__(self): raise SystemExit\nlazy = Lazy()")
    assert worker.run("'alive'").result == "'alive'"


def test_autoreload_sees_an_edited_module(worker: WorkerDriver, tmp_path: Path) -> None:
    """`%autoreload 2` works, and a module in the working directory can be imported."""
    worker.run(f"%cd {tmp_path}")
    (tmp_path / "edited_module.py").write_text("value = 1\n")
    worker.run("%load_ext autoreload\n%autoreload 2\nimport edited_module")
    (tmp_path / "edited_module.py").write_text("value = 'another'\n")
    assert worker.run("edited_module.value").result == "'another'"


def test_warnings_and_logging_go_to_stderr(worker: WorkerDriver) -> None:
    """Where they are in any Python."""
    cell = worker.run("import warnings, logging\nwarnings.warn('careful')\nlogging.warning('odd')")
    assert "UserWarning: careful" in cell.err
    assert "WARNING:root:odd" in cell.err


def test_a_forked_child_prints_to_the_pipes_and_has_no_link(fresh: WorkerDriver) -> None:
    """Its prints arrive beside the link, a sub-call in it fails clearly, the parent goes on."""
    cell = fresh.run(
        "import multiprocessing as mp\n"
        "def child(x):\n"
        "    print('from the child')\n"
        "    try: sub_RLM('x')\n"
        "    except Exception as error: return f'{type(error).__name__}: {error}'\n"
        "with mp.get_context('fork').Pool(1) as pool: got = pool.map(child, [1])\n"
        "got[0]"
    )
    assert cell.result is not None
    assert "SubcallError" in cell.result
    assert "threads" in cell.result
    fresh.raw_until(1, "from the child")
    assert fresh.run("'alive'").result == "'alive'"


def test_a_fork_that_runs_to_the_end_of_the_cell_ends_there(fresh: WorkerDriver) -> None:
    """A child of os.fork() in a cell must not answer for its parent."""
    cell = fresh.run("import os\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])")
    assert cell.out == "0\n"
    assert fresh.run("'alive'").result == "'alive'"


def test_closed_descriptors_are_survived(fresh: WorkerDriver) -> None:
    """After `os.close(1)` printing still works: it goes over the link."""
    assert fresh.run("import os; os.close(1); os.close(2)").finished.ok
    assert fresh.run("print('still here')").out == "still here\n"


def test_the_link_is_no_descriptor_of_subprocesses(worker: WorkerDriver) -> None:
    """A child process cannot reach the kernel."""
    code = "import subprocess; subprocess.run(['ls', '/proc/self/fd'], capture_output=True).stdout"
    result = worker.run(code).result
    assert result is not None
    listed = result.strip("b'").replace("\\n", " ").split()
    assert set(listed) == {"0", "1", "2", "3"}  # 3 is the folder that ls reads
    worker.run("import socket")
    result = worker.run("!ls -l /proc/self/fd").out
    assert "socket" not in result


def test_the_end_of_the_link_is_the_end_of_the_worker(fresh: WorkerDriver) -> None:
    """When the kernel is gone, so is an idle worker."""
    fresh.sock.shutdown(2)
    assert fresh.process.wait(20) == 0
    with pytest.raises(WorkerGone):
        fresh.receive()


def test_stuck_code_tells_where_on_request(fresh: WorkerDriver) -> None:
    """SIGUSR2 writes the Python stack to descriptor 2 and changes nothing else."""
    number = fresh.start("def stuck_here(): input()\nstuck_here()", allow_stdin=True)
    request = fresh.wait_for(messages.GetInput)
    fresh.process.send_signal(signal.SIGUSR2)
    fresh.raw_until(2, "stuck_here")
    fresh.send(messages.InputReply(id=request.id, text=""))
    assert fresh.finish(number).finished.ok


def test_ping_and_pong(worker: WorkerDriver) -> None:
    """An idle worker answers."""
    worker.send(messages.Ping(id=77))
    assert worker.wait_for(messages.Pong).id == 77
