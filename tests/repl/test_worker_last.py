"""What a batch leaves behind in `sub_RLM.last`, above all where it was interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from rlm_kernel.errors import RLMError
from rlm_kernel.repl import Nobody, Repl, messages
from rlm_kernel.repl.messages import SendSubcalls, SubcallResult
from tests.repl.conftest import text_of
from tests.repl.model import FAIL, Model
from tests.repl.worker_driver import Cell, WorkerDriver


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def interrupted(worker: WorkerDriver, code: str, texts: dict[int, str]) -> Cell:
    """Run *code*, deliver *texts* for its batch, and interrupt it; one more comes too late."""
    number = worker.start(code)
    asked = worker.wait_for(messages.SendSubcalls)

    def deliver(results: dict[int, str]) -> None:
        sent = [SubcallResult(index=index, text=text) for index, text in results.items()]
        worker.send(messages.SubcallResults(id=asked.id, results=sent))

    deliver(texts)
    worker.interrupt()
    cell = worker.finish(number, nudge=worker.interrupt)
    worker.send(messages.Failed(id=asked.id, ename="SubcallError", reason="cancelled"))
    deliver({len(texts): "late"})
    return cell


@pytest.mark.parametrize(
    "call",
    [
        "sub_RLM([str(i) for i in range(10_000)])",
        "await sub_RLM.aio([str(i) for i in range(10_000)])",
        "sub_RLM.map('{}', range(10_000))",
    ],
)
def test_an_interrupt_keeps_what_had_come(worker: WorkerDriver, call: str) -> None:
    """All that was delivered, whether it had been read or not; the rest says that it was not."""
    texts = {index: f"r{index}" for index in range(3_000)}
    cell = interrupted(worker, call, texts)
    assert [error.ename for error in cell.errors] == ["KeyboardInterrupt"]
    code = (
        "last = sub_RLM.last\n"
        "done = last.done\n"
        "print(len(last), len(done), done == {i: f'r{i}' for i in range(3_000)})\n"
        "print(last[2_999], type(last[3_000]).__name__, last[-1])\n"
        "print(last)"
    )
    assert worker.run(code).out.splitlines() == [
        "10000 3000 True",
        "r2999 SubcallError the sub-call was not finished: its batch was interrupted",
        "<outcomes of 10,000 sub-calls, 3,000 of them done>",
    ]


def test_the_finished_ones_of_a_typed_batch_are_values(worker: WorkerDriver) -> None:
    """And those that were none are errors."""
    cell = interrupted(worker, "sub_RLM(['p'] * 5, schema=int)", {0: "1", 1: "one"})
    assert not cell.finished.ok
    result = worker.run("{k: str(v) for k, v in sub_RLM.last.done.items()}").result
    assert result is not None
    assert result.startswith("{0: '1',")
    assert "int: the reply holds no number, where one is asked for; it was" in result


def test_a_check_that_was_interrupted_is_not_called_by_who_looks(worker: WorkerDriver) -> None:
    """It may hang; the replies are there as they came."""
    worker.run(
        "import signal\ncalled = 0\n"
        "def check(value):\n    global called\n    called += 1\n"
        "    signal.raise_signal(signal.SIGINT)"
    )
    model = Model(lambda prompt: "7")
    cell = worker.run("sub_RLM(['p', 'q'], schema=int, check=check)", answer=model)
    assert cell.errors[0].ename == "KeyboardInterrupt"
    assert worker.run("sub_RLM.last.done, called").result == "({0: '7', 1: '7'}, 1)"


def test_a_defect_of_a_check_meets_who_looks_once(worker: WorkerDriver) -> None:
    """After that the replies of an interrupted batch are there as they came."""
    interrupted(worker, "sub_RLM(['p'] * 3, schema=int, check=lambda v: v.nothing)", {0: "7"})
    assert worker.run("sub_RLM.last.done").errors[0].ename == "AttributeError"
    assert worker.run("sub_RLM.last.done").result == "{0: '7'}"


def test_an_interrupted_second_try_keeps_the_values_of_the_first(worker: WorkerDriver) -> None:
    """Also of those that were asked again, where the new reply had come."""
    number = worker.start("sub_RLM(['1', 'a', 'b'], schema=int)")
    first = worker.wait_for(messages.SendSubcalls)
    worker.send(
        messages.SubcallResults(
            id=first.id,
            results=[
                SubcallResult(index=index, text=text) for index, text in enumerate(first.prompts)
            ],
        )
    )
    second = worker.wait_for(messages.SendSubcalls)
    assert second.retry_of == ["", ""]
    worker.send(messages.SubcallResults(id=second.id, results=[SubcallResult(index=0, text="2")]))
    worker.interrupt()
    assert not worker.finish(number, nudge=worker.interrupt).finished.ok
    result = worker.run("[str(r) for r in sub_RLM.last]").result or ""
    assert result.startswith("['1',\n '2',\n \"int: the reply holds no number")
    worker.send(messages.Failed(id=second.id, ename="SubcallError", reason="cancelled"))


def test_what_came_of_earlier_messages_of_a_batch_is_kept(worker: WorkerDriver) -> None:
    """A batch over the limit of a message is asked in parts."""
    number = worker.start("sub_RLM(['z' * 12_000_000] * 5)")
    first = worker.wait_for(messages.SendSubcalls)
    results = [SubcallResult(index=index, text="x") for index in range(len(first.prompts))]
    worker.send(messages.SubcallResults(id=first.id, results=results))
    worker.wait_for(messages.SendSubcalls)
    worker.interrupt()
    assert not worker.finish(number, nudge=worker.interrupt).finished.ok
    assert worker.run("list(sub_RLM.last.done)").result == str(list(range(len(first.prompts))))


def test_a_refusal_in_the_middle_of_a_batch_costs_no_result(worker: WorkerDriver) -> None:
    """What was not taken fails, and no more of it is offered."""
    model = Model(lambda prompt: "x")

    def answer(message: messages.FromWorker) -> messages.ToWorker | None:
        if isinstance(message, SendSubcalls) and model.asked:
            return messages.Failed(id=message.id, ename="SubcallError", reason="spent")
        return model(message)

    cell = worker.run("[str(r) for r in sub_RLM(['z' * 12_000_000] * 7)]", answer=answer)
    count = len(model.asked[0].prompts)
    assert cell.result == str(["x"] * count + ["spent"] * (7 - count))
    assert len([r for r in cell.requests if isinstance(r, SendSubcalls)]) == 2


def test_a_refusal_keeps_what_had_come_of_the_same_message(worker: WorkerDriver) -> None:
    """As where the budget ends in the middle of it."""
    number = worker.start("[str(r) for r in sub_RLM(['z' * 12_000_000] * 4)]")
    first = worker.wait_for(SendSubcalls)
    results = [SubcallResult(index=index, text="x") for index in range(len(first.prompts))]
    worker.send(messages.SubcallResults(id=first.id, results=results))
    second = worker.wait_for(SendSubcalls)
    assert len(first.prompts) == len(second.prompts) == 2
    worker.send(messages.SubcallResults(id=second.id, results=[SubcallResult(index=1, text="y")]))
    worker.send(messages.Failed(id=second.id, ename="SubcallError", reason="spent"))
    assert worker.finish(number).result == "['x', 'x', 'spent', 'y']"


def test_the_keys_of_a_dict_name_what_is_done(worker: WorkerDriver) -> None:
    """So that the rest can be asked again."""
    interrupted(worker, "sub_RLM.map('{}', {'a': 1, 'b': 2, 'c': 3})", {0: "x", 1: "y"})
    assert worker.run("sub_RLM.last.done").result == "{'a': 'x', 'b': 'y'}"


def test_last_of_a_batch_that_ended(worker: WorkerDriver) -> None:
    """All outcomes, as they were returned, as a sequence; also of one that raised."""
    model = Model(lambda prompt: FAIL if prompt == "b" else prompt.upper())
    code = "r = sub_RLM(['a', 'b', 'c'])\nall(x is y for x, y in zip(r, sub_RLM.last, strict=True))"
    assert worker.run(code, answer=model).result == "True"
    assert worker.run("sub_RLM.last[0], sub_RLM.last[1:][-1], len(sub_RLM.last)").result == (
        "('A', 'C', 3)"
    )
    worker.run("sub_RLM('b')", answer=model)
    assert worker.run("[str(x) for x in sub_RLM.last]").result == "['the server is gone']"


def test_calls_that_a_check_makes_do_not_take_the_place_of_the_batch(worker: WorkerDriver) -> None:
    """It ended last."""
    code = "sub_RLM(['a', 'b'], check=lambda v: sub_RLM('inner') == 'INNER')\nlen(sub_RLM.last)"
    assert worker.run(code, answer=Model(str.upper)).result == "2"


class Delivers(Nobody):
    """Answers the first *count* calls of a batch, one after the other, and then no more."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.delivered = asyncio.Event()
        self.cancelled = asyncio.Event()

    def subcalls(
        self,
        request: SendSubcalls,
        deliver: Callable[[list[SubcallResult]], None],
        fail: Callable[[RLMError], None],
    ) -> Callable[[], None]:
        self._task = asyncio.ensure_future(self._answer(deliver))

        def cancel() -> None:
            deliver([SubcallResult(index=self.count, text="at the last moment")])
            self.cancelled.set()

        return cancel

    async def _answer(self, deliver: Callable[[list[SubcallResult]], None]) -> None:
        for index in range(self.count):
            deliver([SubcallResult(index=index, text=f"r{index}")])
            if index % 100 == 0:
                await asyncio.sleep(0)
        self.delivered.set()


@pytest.mark.parametrize("call", ["sub_RLM(prompts)", "await sub_RLM.aio(prompts)"])
async def test_what_the_kernel_delivered_before_an_interrupt_is_there(
    repl: Repl, call: str
) -> None:
    """Every single one, though the interrupt comes at once; the rest is cancelled."""
    handler = repl.handler = Delivers(2_500)
    cell = asyncio.ensure_future(repl.execute(f"prompts = ['p'] * 10_000\n{call}"))
    await handler.delivered.wait()
    await repl.interrupt()
    result = (await cell).result
    assert result.error is not None
    assert result.error.ename == "KeyboardInterrupt"
    await handler.cancelled.wait()
    done = await repl.execute("done = sub_RLM.last.done; print(len(done), done[2499], done[2500])")
    assert text_of(done.result) == "2501 r2499 at the last moment\n"


async def test_a_cancelled_task_keeps_what_had_come(repl: Repl) -> None:
    """The kernel cancels its batch, and says that this was all."""
    handler = repl.handler = Delivers(3)
    code = (
        "import asyncio\n"
        "task = asyncio.create_task(sub_RLM.aio(['p'] * 5))\n"
        "while len(sub_RLM.last.done) < 3: await asyncio.sleep(0.001)\n"
        "task.cancel()\n"
        "await asyncio.wait([task])\n"
        "while len(sub_RLM.last.done) < 4: await asyncio.sleep(0.001)\n"
        "print(task.cancelled(), list(sub_RLM.last.done.values()))"
    )
    done = await repl.execute(code)
    assert text_of(done.result) == "True ['r0', 'r1', 'r2', 'at the last moment']\n"
    assert handler.cancelled.is_set()
