"""Sub-calls from a cell: one, many, in threads and in coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlm_kernel.budget_view import BudgetView, Spending
from rlm_kernel.cells import SubcallParams
from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver, echo


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def test_one_prompt_and_many(worker: WorkerDriver) -> None:
    """A str gives a str, a list a list in the order of its prompts."""
    assert worker.run("sub_RLM('abc')", answer=echo).result == "'ABC'"
    assert worker.run("sub_RLM(['a', 'b'])", answer=echo).result == "['A', 'B']"
    assert worker.run("sub_RLM([])", answer=echo).result == "[]"


def test_a_failed_call(worker: WorkerDriver) -> None:
    """Alone it raises; in a batch it stands at its place and loses no other."""
    cell = worker.run("sub_RLM('fail')", answer=echo)
    assert (cell.errors[0].ename, cell.errors[0].evalue) == ("SubcallError", "it was asked to")
    code = "r = sub_RLM(['a', 'fail', 'b'])\nr[0], isinstance(r[1], SubcallError), str(r[1]), r[2]"
    result = worker.run(code, answer=echo).result
    assert result == "('A', True, 'it was asked to', 'B')"


@pytest.mark.parametrize("ename", ["UsageError", "SubcallError", "RLMError"])
def test_a_refused_request_raises_what_the_kernel_names(worker: WorkerDriver, ename: str) -> None:
    """In the cell, with the kernel's reason."""

    def refuse(message: messages.FromWorker) -> messages.ToWorker | None:
        assert isinstance(message, messages.SendSubcalls)
        return messages.Failed(id=message.id, ename=ename, reason="no")  # type: ignore[arg-type]

    for code in ("sub_RLM(['a', 'b'])", "await sub_RLM.aio('a')"):
        cell = worker.run(code, answer=refuse)
        assert (cell.errors[0].ename, cell.errors[0].evalue) == (ename, "no")


def test_results_may_come_in_any_order_and_number(worker: WorkerDriver) -> None:
    """A batch is complete when every index came; repeats and strangers change nothing."""
    number = worker.start("sub_RLM(['a', 'b', 'c'])")
    asked = worker.wait_for(messages.SendSubcalls)
    for batch in ([(2, "C"), (9, "?")], [(2, "again")], [(0, "A"), (1, "B")]):
        results = [messages.SubcallResult(index=index, text=text) for index, text in batch]
        worker.send(messages.SubcallResults(id=asked.id, results=results))
    assert worker.finish(number).result == "['A', 'B', 'C']"


def test_options_reach_the_kernel(worker: WorkerDriver) -> None:
    """As given, and with the cell that made the call; what is not given stays open."""
    code = (
        "sub_RLM('p', model='m', temperature=0.5, max_tokens=7, stop='x', seed=1, system='s',"
        " timeout=3, depth='rlm', query='q')"
    )
    cell = worker.run(code, answer=echo)
    (request,) = cell.requests
    assert isinstance(request, messages.SendSubcalls)
    assert request.kind == "rlm"
    assert request.cell == cell.finished.id
    assert request.params == SubcallParams(
        model="m",
        temperature=0.5,
        max_tokens=7,
        stop=["x"],
        seed=1,
        system="s",
        timeout=3,
        query="q",
    )
    (request,) = worker.run("sub_RLM('p')", answer=echo).requests
    assert isinstance(request, messages.SendSubcalls)
    assert (request.kind, request.params) == ("llm", SubcallParams())


@pytest.mark.parametrize(
    ("code", "kind", "prompts", "model"),
    [
        ("llm_query('a')", "llm", ["a"], None),
        ("llm_query('a', 'm')", "llm", ["a"], "m"),
        ("llm_query_batched(['a', 'b'], model='m')", "llm", ["a", "b"], "m"),
        ("llm_batch(['a', 'b'])", "llm", ["a", "b"], None),
        ("rlm_query('a', model='m', query='q')", "rlm", ["a"], "m"),
        ("rlm_query_batched(['a'], 'm')", "rlm", ["a"], "m"),
    ],
)
def test_the_other_names(
    worker: WorkerDriver, code: str, kind: str, prompts: list[str], model: str | None
) -> None:
    """Other systems' functions make the same calls."""
    cell = worker.run(code, answer=echo)
    assert cell.finished.ok
    (request,) = cell.requests
    assert isinstance(request, messages.SendSubcalls)
    assert (request.kind, request.prompts, request.params.model) == (kind, prompts, model)


@pytest.mark.parametrize(
    "code", ["sub_RLM(5)", "sub_RLM({'a': 1})", "sub_RLM(['a', 5])", "llm_batch('one str')"]
)
def test_what_is_no_prompt_is_refused_at_once(worker: WorkerDriver, code: str) -> None:
    """Nothing is sent then."""
    cell = worker.run(code, answer=echo)
    assert cell.errors[0].ename == "TypeError"
    assert cell.requests == []


@pytest.mark.parametrize(
    ("prompt", "remedy"),
    [
        ("b'text'", "not bytes; use decode() on it"),
        ("(p for p in 'ab')", "not generator; use list() on it, or sub_RLM.map"),
        ("{'a', 'b'}", "not set; use list() on it, or sub_RLM.map"),
        ("{'a': 1}", "not dict; use str() or json.dumps() on it"),
    ],
)
def test_the_refusal_says_what_to_do(worker: WorkerDriver, prompt: str, remedy: str) -> None:
    """What suits the type that was given."""
    assert worker.run(f"sub_RLM({prompt})").errors[0].evalue.endswith(remedy)


def test_concurrent_coroutines(worker: WorkerDriver) -> None:
    """A thousand calls under way at once, each with its own reply."""
    code = (
        "import asyncio\n"
        "got = await asyncio.gather(*(sub_RLM.aio(f'p{i}') for i in range(1000)))\n"
        "got == [f'P{i}' for i in range(1000)]"
    )
    assert worker.run(code, answer=echo).result == "True"


def test_coroutines_in_a_loop_of_the_users(worker: WorkerDriver) -> None:
    """`asyncio.run` in a cell, and in a thread, reads the link too."""
    worker.run("import asyncio, threading\nasync def two(): return await sub_RLM.aio(['a', 'b'])")
    assert worker.run("asyncio.run(two())", answer=echo).result == "['A', 'B']"
    code = (
        "got = []\nt = threading.Thread(target=lambda: got.append(asyncio.run(two())))\n"
        "t.start(); t.join(); got"
    )
    assert worker.run(code, answer=echo).result == "[['A', 'B']]"


def test_many_threads_share_the_link(worker: WorkerDriver) -> None:
    """16 threads with 2000 calls in all neither lose a reply nor wait for ever."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    got = list(pool.map(sub_RLM, [f'p{i}' for i in range(2000)]))\n"
        "got == [f'P{i}' for i in range(2000)]"
    )
    assert worker.run(code, answer=echo, timeout=60).result == "True"


def test_threads_beside_an_awaiting_cell(worker: WorkerDriver) -> None:
    """The event loop and threads read the same link."""
    code = (
        "import asyncio\n"
        "a = [asyncio.to_thread(sub_RLM, f't{i}') for i in range(50)]\n"
        "b = [sub_RLM.aio(f'c{i}') for i in range(50)]\n"
        "got = await asyncio.gather(*a, *b)\n"
        "got == [f'T{i}' for i in range(50)] + [f'C{i}' for i in range(50)]"
    )
    assert worker.run(code, answer=echo).result == "True"


def test_large_batches_on_full_buffers(worker: WorkerDriver) -> None:
    """Kernel and worker, both writing megabytes, do not wait for each other."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    got = list(pool.map(sub_RLM, ['q' * 3_000_000] * 8))\n"
        "[len(g) for g in got] == [3_000_000] * 8"
    )
    assert worker.run(code, answer=echo, timeout=60).result == "True"


def test_a_batch_over_the_limit_of_a_message_is_split(worker: WorkerDriver) -> None:
    """The cell sees one list; a single prompt that is too long fails alone."""
    cell = worker.run("r = sub_RLM(['z' * 12_000_000] * 5)\n[len(x) for x in r]", answer=echo)
    assert cell.result == str([12_000_000] * 5)
    assert len(cell.requests) > 1
    cell = worker.run("sub_RLM('z' * 80_000_000)", answer=echo)
    assert cell.errors[0].ename == "SubcallError"
    assert "MiB" in cell.errors[0].evalue


def test_a_list_of_more_prompts_than_a_call_takes_is_refused_in_the_cell(
    worker: WorkerDriver,
) -> None:
    """Nothing is sent: empty prompts fit into a message by the million."""
    for code in ("sub_RLM([''] * 100_001)", "await sub_RLM.aio([''] * 100_001)"):
        error = worker.run(code, answer=echo).errors[0]
        assert error.ename == "ValueError"
        assert "a list of 100,001 prompts is too long for one call, which takes 100,000" in (
            error.evalue
        )


def test_lone_surrogates_in_a_prompt(worker: WorkerDriver) -> None:
    """They are escaped, since no server takes them."""
    assert worker.run("sub_RLM('x\\ud800')", answer=echo).result == "'X\\\\UD800'"


def test_cancelling_a_task_cancels_its_calls(worker: WorkerDriver) -> None:
    """The kernel is told that nobody waits any more."""
    code = (
        "import asyncio\nt = asyncio.create_task(sub_RLM.aio('x'))\nawait asyncio.sleep(0)\n"
        "t.cancel()\nawait asyncio.wait([t]);"
    )
    kinds = [type(message).__name__ for message in worker.run(code).requests]
    assert kinds == ["SendSubcalls", "CancelSubcalls"]


def test_waiting_is_told_apart_from_working(worker: WorkerDriver) -> None:
    """Waits that overlap count once, and never more than the cell took."""
    done = worker.run("sub_RLM('a')", answer=echo).finished
    assert 0 < done.waited_s <= done.seconds
    code = "import asyncio\nawait asyncio.gather(*(sub_RLM.aio('x') for _ in range(50)));"
    done = worker.run(code, answer=echo).finished
    assert 0 < done.waited_s <= done.seconds
    assert worker.run("1").finished.waited_s == 0


def test_budget(worker: WorkerDriver) -> None:
    """What the kernel says of this run as a dict, beside it that of the tree, and a table."""
    view = BudgetView(run=Spending(tokens_left=5), tree=Spending(tokens_used=1234))

    def left(message: messages.FromWorker) -> messages.ToWorker | None:
        assert isinstance(message, messages.GetBudget)
        return messages.BudgetLeft(id=message.id, budget=view)

    code = (
        "b = budget()\nb['tokens_left'], b['seconds_left'], b.tree.tokens_used, 'turns_used' in b"
    )
    assert worker.run(code, answer=left).result == "(5, None, 1234, True)"
    shown = worker.run("budget()", answer=left).result
    assert shown is not None
    assert ("this run" in shown, "whole tree" in shown, "1,234" in shown) == (True,) * 3
    assert worker.run("dict(budget())['tokens_left']", answer=left).result == "5"


def test_budget_counts_the_waits_of_the_cell_that_asks(worker: WorkerDriver) -> None:
    """The kernel hears of them only when the cell is over."""

    def answer(message: messages.FromWorker) -> messages.ToWorker | None:
        if isinstance(message, messages.GetBudget):
            return messages.BudgetLeft(id=message.id, budget=BudgetView())
        return echo(message)

    code = "first = budget()['waited_s']\nsub_RLM('x')\nfirst == 0 < budget()['waited_s'] < 60"
    cell = worker.run(code, answer=answer)
    assert cell.result == "True"
