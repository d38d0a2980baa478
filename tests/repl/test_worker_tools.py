"""Tools of sub-models: functions that run in the worker while a cell of it waits for a sub-call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.pickled import pickled
from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver, echo

DEFINED = '''
seen = []

def search(text: str, limit: int = 3):
    """Find a text.

    This is not told.
    """
    seen.append((text, limit))
    return f"{limit} times {text}"

def talk():
    """Say something."""
    print("below")
    display("also below")
    import sys
    print("and here", file=sys.stderr)

def fail():
    """Fail."""
    raise KeyError("the key")

def leave():
    """Leave."""
    raise SystemExit(3)

def huge():
    """Return much."""
    return "a" * 50_000 + "z"

def ask():
    """Ask a model."""
    return sub_RLM("from a tool")

def again(depth: int):
    """Call itself, and another tool."""
    return search("end") if depth == 0 else again(depth - 1)

def pair():
    """Return what is no text."""
    return {"a": [1, None]}

def spin():
    """Never return."""
    print("go")
    while True:
        pass
'''

NAMES = ["search", "talk", "fail", "leave", "huge", "ask", "again", "pair", "spin"]


class Model:
    """Answers sub-calls like a model that uses *uses* first, one after the other."""

    def __init__(self, worker: WorkerDriver, *uses: tuple[str, Any]) -> None:
        self.worker = worker
        self.uses = uses
        self.returned: dict[int, messages.ToolReturned] = {}
        self._batches: dict[int, tuple[messages.SendSubcalls, Iterator[tuple[str, Any]]]] = {}

    @property
    def results(self) -> list[str]:
        return [result.error or result.text for result in self.returned.values()]

    def __call__(self, message: messages.FromWorker) -> messages.ToWorker | None:
        if isinstance(message, messages.SendSubcalls):
            number = message.id
            self._batches[number] = (message, iter(self.uses))
        elif isinstance(message, messages.ToolReturned):
            self.returned[message.id] = message
            number = message.id // 1000
        else:
            return None
        request, uses = self._batches[number]
        use = next(uses, None)
        if use is None:
            return echo(request)
        name, arguments = use
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call_id = number * 1000 + len(self.returned)
        return messages.CallTool(id=call_id, batch=number, name=name, arguments=text)


def begin(worker: WorkerDriver, names: list[str] = NAMES, pickled: bytes = b"") -> messages.Ready:
    """Begin a run with tools."""
    message = messages.Begin(id=worker.next_id(), run_id="r", tools=names, pickled=pickled)
    worker.send(message)
    ready = worker.wait_for(messages.Ready)
    assert isinstance(ready, messages.Ready)
    return ready


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


@pytest.fixture
def worker(shared: WorkerDriver) -> WorkerDriver:
    """A worker with the functions of `DEFINED`, and a run that has them as tools."""
    shared.run(DEFINED)
    ready = begin(shared)
    assert ready.error == ""
    assert [tool.name for tool in ready.tools] == NAMES
    return shared


WAITS = [
    "sub_RLM('p')",
    "await sub_RLM.aio('p')",
    "import asyncio\n(await asyncio.gather(asyncio.sleep(0), sub_RLM.aio('p')))[1]",
    "import asyncio\nasyncio.run(sub_RLM.aio('p'))",
    "from concurrent.futures import ThreadPoolExecutor as T\n"  # noqa: ISC004
    "with T(1) as pool: r = pool.submit(sub_RLM, 'p').result()\nr",
    "import asyncio\nawait asyncio.to_thread(sub_RLM, 'p')",
]


@pytest.mark.parametrize("code", WAITS)
def test_a_tool_runs_while_a_cell_waits_for_the_sub_call(worker: WorkerDriver, code: str) -> None:
    """However it waits; the cell gets the reply alone."""
    model = Model(worker, ("search", {"text": "x", "limit": "5"}), ("search", {"text": "y"}))
    cell = worker.run(code, answer=model, turn=1)
    assert model.results == ["5 times x", "3 times y"]
    assert (cell.result, cell.out, cell.err) == ("'P'", "", "")
    assert worker.run("seen").result == "[('x', 5), ('y', 3)]"


def test_what_is_told_of_a_tool(worker: WorkerDriver) -> None:
    """Its name, its docstring's first paragraph, the schema of its arguments."""
    tool = begin(worker, ["search"]).tools[0]
    schema = json.loads(tool.parameters)
    assert (tool.name, tool.description) == ("search", "Find a text.")
    assert schema["properties"] == {"text": {"type": "string"}, "limit": {"type": "integer"}}
    assert (schema["type"], schema["required"]) == ("object", ["text"])


def test_the_root_has_no_tools(worker: WorkerDriver) -> None:
    """Not in the namespace of its cells nor among its variables; a person's cells have them."""
    code = "[n for n in ('search', 'talk') if n in globals() or n in SHOW_VARS()]"
    cell = worker.run(f"mine = {code}\nmine", turn=1)
    assert cell.result == "[]"
    assert [variable.name for variable in cell.finished.variables] == ["mine"]
    assert worker.run(code).result == "['search', 'talk']"
    assert worker.run("search('x')", turn=2).errors[0].ename == "NameError"


def test_a_name_that_the_root_gives_to_something_else_stays_its_own(worker: WorkerDriver) -> None:
    """In its later cells too; the tool runs as before."""
    worker.run("search = 5", turn=1)
    model = Model(worker, ("search", {"text": "x"}))
    assert worker.run("sub_RLM('p'), search", turn=2, answer=model).result == "('P', 5)"
    assert model.results == ["3 times x"]


def test_a_tool_may_call_itself_and_others(worker: WorkerDriver) -> None:
    """Though their names are hidden from the cell that waits."""
    model = Model(worker, ("again", {"depth": 3}))
    worker.run("sub_RLM('p')", turn=1, answer=model)
    assert model.results == ["3 times end"]
    assert worker.run("'again' in globals()", turn=2).result == "False"


@pytest.mark.parametrize("code", WAITS)
def test_what_a_tool_writes_stays_below(worker: WorkerDriver, code: str) -> None:
    """Where it returns nothing, that is what the model is told."""
    model = Model(worker, ("talk", {}))
    cell = worker.run(f"print('above')\n{code}", answer=model)
    assert model.results == ["below\nand here\n"]
    assert (cell.out, cell.err, cell.displays) == ("above\n", "", [])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (("fail", {}), "KeyError: 'the key'"),
        (("leave", {}), "SystemExit: 3"),
        (("search", '{"text": '), "ValueError: the arguments are not what search takes"),
        (("search", '["x"]'), "ValueError: the arguments are not what search takes"),
        (("search", {}), "missing required field `text`"),
        (("search", {"text": "x", "n": 1}), "unknown field `n`"),
        (("search", {"text": "x", "limit": "many"}), "`int`"),
        (("nothing", {}), "the tool nothing was lost"),
        (("ask", {}), "SubcallError: a tool cannot make sub-calls"),
    ],
)
def test_the_model_is_told_what_went_wrong(
    worker: WorkerDriver, use: tuple[str, Any], said: str
) -> None:
    """And the cell goes on."""
    model = Model(worker, use)
    assert worker.run("sub_RLM('p')", answer=model).result == "'P'"
    (result,) = model.returned.values()
    assert said in result.error
    assert result.text == ""


def test_values_are_told_as_json_and_long_ones_cut(worker: WorkerDriver) -> None:
    """Head and tail of a long one, with the number of characters between them."""
    model = Model(worker, ("pair", {}), ("huge", {}))
    worker.run("sub_RLM('p')", answer=model)
    pair, huge = model.results
    assert pair == '{"a":[1,null]}'
    assert len(huge) <= 20_000
    assert (huge[0], huge[-1]) == ("a", "z")
    head, _, tail = huge.partition("\n[… ")
    cut = int(tail.partition(" ")[0].replace(",", ""))
    assert len(head) + cut + len(tail.partition("]\n")[2]) == 50_001


@pytest.mark.parametrize("code", WAITS[:3])
def test_an_interrupt_ends_the_cell_of_a_tool_that_does_not_end(
    worker: WorkerDriver, code: str
) -> None:
    """The kernel is told, and the next cell and tool run."""
    worker.run(
        "import sys\ndef spin():\n    'Spin.'\n    sys.__stderr__.flush(); signal()\n"
        "    while True: pass\ndef signal():\n    import os; os.write(2, b'go')"
    )
    begin(worker, ["spin", "search"])
    model = Model(worker, ("spin", {}))
    number = worker.start(code)
    worker.send(model(worker.wait_for(messages.SendSubcalls)))
    worker.raw_until(2, "go")
    worker.interrupt()
    cell = worker.finish(number, answer=model, nudge=worker.interrupt)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    assert model.results == ["the tool was interrupted"]
    after = Model(worker, ("search", {"text": "x"}))
    assert worker.run("sub_RLM('p')", answer=after).result == "'P'"
    assert after.results == ["3 times x"]


def test_tools_run_one_at_a_time(worker: WorkerDriver) -> None:
    """Also where several threads wait for sub-calls."""
    worker.run("""
import threading, time
active = 0
peak = 0
def slow():
    "Overlap, if it can."
    global active, peak
    active += 1
    peak = max(peak, active)
    for _ in range(100): time.sleep(0.0001)
    active -= 1
""")
    begin(worker, ["slow"])
    model = Model(worker, *[("slow", {})] * 3)
    code = (
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "with T(4) as pool: r = list(pool.map(sub_RLM, 'abcd'))\nr"
    )
    assert worker.run(code, answer=model).result == "['A', 'B', 'C', 'D']"
    assert worker.run("peak, active").result == "(1, 0)"


def test_time_in_a_tool_is_time_waiting_for_the_sub_call(worker: WorkerDriver) -> None:
    """It is no run time of the cell's own, which reports both."""
    worker.run(
        "import time\ndef work():\n    'Compute.'\n    global spent\n"
        "    begun = time.perf_counter()\n    sum(range(10**6))\n"
        "    spent = time.perf_counter() - begun"
    )
    begin(worker, ["work"])
    for code in WAITS[:2]:
        done = worker.run(code, answer=Model(worker, ("work", {}))).finished
        spent = float(worker.run("spent").result or "")
        assert 0 < spent <= done.waited_s <= done.seconds


def test_a_use_that_nobody_waits_for_any_more_is_answered(worker: WorkerDriver) -> None:
    """So that the kernel is not left without a word."""
    worker.send(messages.CallTool(id=77, batch=10**6, name="search", arguments="{}"))
    returned = worker.wait_for(messages.ToolReturned)
    assert (returned.id, returned.text) == (77, "")
    assert "no cell waits" in returned.error


def test_a_background_task_gets_its_tools_between_cells(worker: WorkerDriver) -> None:
    """It waits in the event loop, which goes on when the cell is over."""
    model = Model(worker, ("search", {"text": "late"}))
    code = "import asyncio\ntask = asyncio.create_task(sub_RLM.aio('p'))\nNone"
    worker.run(code, answer=model)
    while not model.returned:
        reply = model(worker.receive())
        if reply is not None:
            worker.send(reply)
    assert model.results == ["3 times late"]
    assert worker.run("await task", answer=model).result == "'P'"


@pytest.mark.parametrize(
    ("code", "names", "said"),
    [
        ("", ["nowhere"], "there is no function nowhere"),
        ("", ["llm_query"], "llm_query is a name of the REPL"),
        ("x = 5", ["x"], "a tool is a function, not 5"),
        ("class C: pass", ["C"], "not the class C"),
        ("def f(): pass", ["f"], "the tool f has no docstring"),
        ("def f(*a): 'd'", ["f"], "takes *a"),
        ("async def f(): 'd'", ["f"], "coroutine"),
        ("def f(x: complex): 'd'", ["f"], "complex"),
        ("def f(x: 'Unknown'): 'd'", ["f"], "NameError"),
        ("def f(): 'd'\ng = f", ["g"], "called f"),
        ("def f(): 'd'", ["f", "f"], "two tools are called f"),
        ("", ["nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_what_can_be_no_tool_is_refused_with_the_reason(
    worker: WorkerDriver, code: str, names: list[str], said: str
) -> None:
    """When the run begins, which then has none."""
    worker.run(code)
    ready = begin(worker, names)
    assert said in ready.error
    assert "\n" not in ready.error
    assert ready.tools == []


def test_a_file_gives_its_public_documented_functions(worker: WorkerDriver, tmp_path: Path) -> None:
    """Those that it defines itself; they see what else is in it."""
    (tmp_path / "mine.py").write_text(
        "from textwrap import dedent\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Where:\n    line: int\n"
        "def _private(): 'd'\ndef bare(): pass\n"
        "def look(where: Where) -> str:\n    'Look.'\n    return f'{where!r} {_private.__doc__}'\n"
    )
    ready = begin(worker, [str(tmp_path / "mine.py")])
    assert [tool.name for tool in ready.tools] == ["look"]
    model = Model(worker, ("look", {"where": {"line": 7}}))
    worker.run("sub_RLM('p')", answer=model, turn=1)
    assert model.results == ["Where(line=7) d"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("1/0", "ZeroDivisionError"), ("raise SystemExit", "SystemExit"), ("x = 1", "no function")],
)
def test_a_file_without_tools_is_refused(
    worker: WorkerDriver, tmp_path: Path, text: str, said: str
) -> None:
    """With what is wrong with it."""
    (tmp_path / "mine.py").write_text(text)
    assert said in begin(worker, [str(tmp_path / "mine.py")]).error


def test_functions_of_a_program_come_with_what_they_refer_to(worker: WorkerDriver) -> None:
    """Also those of a module that the worker cannot import."""
    secret = ["of the program"]

    def recall(place: int) -> str:
        """Recall something."""
        return secret[place] + _suffix

    ready = begin(worker, [], pickled([recall]))
    assert [tool.name for tool in ready.tools] == ["recall"]
    model = Model(worker, ("recall", {"place": 0}))
    worker.run("sub_RLM('p')", answer=model, turn=1)
    assert model.results == ["of the program!"]


_suffix = "!"


def test_broken_pickles_are_refused(worker: WorkerDriver) -> None:
    """As an error of the run, not of the worker."""
    assert "cannot be loaded" in begin(worker, [], b"no pickle").error
    assert worker.run("1").result == "1"
