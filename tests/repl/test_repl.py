"""Cells, prompts and questions through a real supervisor and worker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rlm_kernel.budget_view import BudgetView, Spending
from rlm_kernel.cells import ErrorOutput, Output, Stream, Variable
from rlm_kernel.errors import PromptError, RLMError, SubcallError, UsageError, WorkerDied
from rlm_kernel.repl import Nobody, Repl
from rlm_kernel.repl.messages import SendSubcalls, SubcallFailure, SubcallResult
from tests.repl.conftest import Run, text_of, until


async def test_output_comes_in_order_whoever_writes_it(run: Run) -> None:
    """What a descriptor got before something was printed comes before it, and nothing is lost."""
    code = """import os, subprocess
for i in range(50):
    os.write(1, f"{i} by descriptor\\n".encode())
    subprocess.run(["echo", f"{i} by child"])
    print(i, "printed")
"""
    lines = text_of(await run(code)).splitlines()

    for kind in ("by descriptor", "by child", "printed"):
        assert [x for x in lines if x.endswith(kind)] == [f"{i} {kind}" for i in range(50)]
    for i in range(50):
        assert lines.index(f"{i} by descriptor") < lines.index(f"{i} by child")
        assert lines.index(f"{i} by child") < lines.index(f"{i} printed")


async def test_characters_cut_by_a_write_are_whole_and_other_bytes_are_replaced(run: Run) -> None:
    code = r"""import os, time
for byte in "héß€".encode():
    os.write(1, bytes([byte]))
os.write(1, b"\xff\n")"""

    assert text_of(await run(code)) == "héß€\N{REPLACEMENT CHARACTER}\n"


async def test_burst_of_lines_goes_on_whole(repl: Repl) -> None:
    pieces: list[Output] = []

    executed = await repl.execute("for i in range(20_000): print(i)", on_output=pieces.append)

    text = "".join(f"{i}\n" for i in range(20_000))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Stream)) == text
    assert executed.result.outputs == [Stream("stdout", text)]


async def test_lines_that_came_meanwhile_go_on_as_one_piece(repl: Repl, tmp_path: Path) -> None:
    """While the owner is busy with the first one."""
    printed = tmp_path / "printed"
    pieces: list[Output] = []

    def on_output(piece: Output) -> None:
        pieces.append(piece)
        end = time.monotonic() + 30
        while not printed.exists():
            assert time.monotonic() < end
            time.sleep(0.001)

    await repl.execute(
        f"for i in range(100): print(i)\nopen({str(printed)!r}, 'w').close()", on_output=on_output
    )

    assert "".join(piece.text for piece in pieces if isinstance(piece, Stream)).count("\n") == 100
    assert len(pieces) <= 2


async def test_cells_run_one_at_a_time_in_the_order_of_the_calls(repl: Repl) -> None:
    await repl.execute("order = []")
    cells = [repl.execute(f"order.append({i})") for i in range(20)]

    executed = await asyncio.gather(*cells)

    result = (await repl.execute("print(order == list(range(20)))")).result
    assert text_of(result) == "True\n"
    assert [e.cell for e in executed] == sorted(e.cell for e in executed)


async def test_result_tells_variables_expressions_and_the_cell_id_before_it_runs(
    repl: Repl,
) -> None:
    started: list[int] = []

    executed = await repl.execute(
        "x = [1, 2]", user_expressions={"twice": "2 * len(x)"}, on_start=started.append
    )

    assert started == [executed.cell]
    assert executed.result.ok
    assert executed.result.variables == [Variable("x", "list", 2, "new")]
    assert executed.user_expressions["twice"]["data"]["text/plain"] == "4"


async def test_error_of_a_cell_is_the_last_of_its_outputs(run: Run) -> None:
    result = await run("print('before')\n1/0")

    assert not result.ok
    assert result.error is not None
    assert result.error.ename == "ZeroDivisionError"
    assert [type(o) for o in result.outputs] == [Stream, ErrorOutput]
    assert result.outputs[-1] == result.error


async def test_defect_in_the_owner_s_callback_is_reported_and_costs_no_output(repl: Repl) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def defect(output: Output) -> None:
        raise ZeroDivisionError

    result = (await repl.execute("print(1)", on_output=defect)).result

    assert text_of(result) == "1\n"
    assert isinstance(reported[0]["exception"], ZeroDivisionError)


async def test_late_output_goes_to_the_owner_with_its_cell(repl: Repl, tmp_path: Path) -> None:
    late: list[tuple[int, Output]] = []
    repl.handler = Nobody()
    repl.handler.output = lambda cell, output: late.append((cell, output))  # type: ignore[method-assign]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"import subprocess; child = subprocess.Popen(['cat', {str(fifo)!r}])"
    cell = (await repl.execute(code)).cell

    await asyncio.to_thread(fifo.write_text, "late\n")
    await until(lambda: late)

    assert late == [(cell, Stream("stdout", "late\n"))]


async def test_prompt_of_any_kind_comes_back_as_it_went_down(repl: Repl) -> None:
    text = "naïve \ud800 text\n" * 100_000

    info = await repl.load_prompt(text, source="a file")
    assert (info.kind, info.chars, info.items, info.source) == ("str", len(text), 1, "a file")
    assert text_of((await repl.execute("print(len(P), P[:5])")).result) == f"{len(text)} naïve\n"
    data = b"".join([chunk async for chunk in repl.read_prompt()])
    assert data.decode("utf-8", "surrogatepass") == text

    info = await repl.load_prompt(["one", "zwölf"] * 50_000)
    assert (info.kind, info.items) == ("list", 100_000)
    assert text_of((await repl.execute("print(P[-1])")).result) == "zwölf\n"

    info = await repl.load_prompt({"a": "x", "b": "y"})
    assert (info.kind, info.items) == ("dict", 2)
    assert b"".join([chunk async for chunk in repl.read_prompt()]) == b'{"a":"x","b":"y"}'


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (5, "not int"),
        (b"bytes", "not bytes"),
        (["a", 1], "of type int"),
        ({"a": None}, "of type NoneType"),
    ],
)
async def test_what_is_no_prompt_is_refused(repl: Repl, prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        await repl.load_prompt(prompt)  # type: ignore[arg-type]


async def test_prompt_that_is_read_slowly_waits_in_the_worker(repl: Repl) -> None:
    """A reader that stops taking, or goes away, leaves a REPL that works."""
    await repl.load_prompt("x" * 40_000_000)
    reading = repl.read_prompt()
    assert len(await anext(reading)) > 0
    taken = 1
    async for _ in reading:
        taken += 1
        if taken == 5:
            break
    await reading.aclose()  # type: ignore[attr-defined]

    assert text_of((await repl.execute("print(len(P))")).result) == "40000000\n"
    total = 0
    async for chunk in repl.read_prompt():
        await asyncio.sleep(0)
        total += len(chunk)
    assert total == 40_000_000


async def test_prompt_whose_worker_dies_is_not_read_to_a_false_end(repl: Repl) -> None:
    await repl.load_prompt("x" * 40_000_000)
    reading = repl.read_prompt()
    await anext(reading)

    await repl.restart()

    with pytest.raises(WorkerDied):
        await _read_all(reading)


async def _read_all(reading: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in reading])


async def test_begin_tells_of_the_prompt_and_installs_the_history(repl: Repl) -> None:
    assert (await repl.begin("run")).prompt is None
    await repl.load_prompt("abc")

    ready = await repl.begin("run", [{"role": "system", "content": "hello"}])

    assert ready.prompt is not None
    assert ready.prompt.chars == 3
    assert text_of((await repl.execute("print(history)")).result) == (
        "[{'role': 'system', 'content': 'hello'}]\n"
    )


async def test_questions_are_answered_when_idle_and_at_once_when_not(repl: Repl) -> None:
    await repl.execute("needle_one = 1")
    completions = await repl.complete("needle_", 7)
    assert "needle_one" in completions.matches
    assert (await repl.inspect("needle_one", 3)).found
    assert (await repl.is_complete("for x in y:")).status == "incomplete"
    assert await repl.variables() == [Variable("needle_one", "int", None, "same")]

    up = asyncio.Event()
    code = "print('up', flush=True); input()"
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    repl.handler = Answering(input=answer)
    cell = asyncio.ensure_future(repl.execute(code, allow_stdin=True, on_output=lambda _: up.set()))
    await up.wait()
    assert (await repl.complete("needle_", 7)).matches == []
    assert not (await repl.inspect("needle_one", 3)).found
    assert (await repl.is_complete("for x in y:")).status == "unknown"
    assert [v.name for v in await repl.variables()] == ["needle_one"]
    answer.set_result("line")
    assert (await cell).result.ok


class Answering(Nobody):
    """Answers sub-calls and input as told."""

    def __init__(
        self,
        subcalls: Callable[[SendSubcalls, Callable[..., None], Callable[..., None]], None] = (
            lambda request, deliver, fail: None
        ),
        input: asyncio.Future[str] | None = None,  # noqa: A002
    ) -> None:
        self._subcalls = subcalls
        self._input = input

    def subcalls(self, request, deliver, fail):  # type: ignore[no-untyped-def]
        self._subcalls(request, deliver, fail)
        return lambda: None

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        assert self._input is not None
        return f"{prompt}{password}{await self._input}"

    def budget(self) -> BudgetView:
        return BudgetView(run=Spending(tokens_left=5))


async def test_subcalls_are_answered_in_any_order_and_failures_stay_single(repl: Repl) -> None:
    def answer(request: SendSubcalls, deliver: Callable[..., None], _: object) -> None:
        last = len(request.prompts) - 1
        deliver([SubcallResult(index=last, error=SubcallFailure(reason="too long"))])
        deliver([SubcallResult(index=last, text="a second answer is not heard")])
        deliver([SubcallResult(index=9_999, text="nobody asked")])
        for i in reversed(range(last)):
            deliver([SubcallResult(index=i, text=request.prompts[i].upper())])

    repl.handler = Answering(answer)

    result = (await repl.execute("r = sub_RLM(['a', 'b', 'c']); print(r[:2], r[2])")).result

    assert text_of(result) == "['A', 'B'] too long\n"


@pytest.mark.parametrize("error", [UsageError("no such option"), SubcallError("no model")])
async def test_refused_batch_raises_in_the_cell(repl: Repl, error: RLMError) -> None:
    repl.handler = Answering(lambda request, deliver, fail: fail(error))

    result = (await repl.execute("sub_RLM('a')")).result

    assert result.error is not None
    assert result.error.ename == type(error).__name__
    assert str(error) in result.error.evalue


async def test_results_larger_than_a_frame_together_all_arrive(repl: Repl) -> None:
    def answer(request: SendSubcalls, deliver: Callable[..., None], _: object) -> None:
        deliver([SubcallResult(index=i, text=p * 8_000_000) for i, p in enumerate(request.prompts)])

    repl.handler = Answering(answer)
    code = "r = sub_RLM([str(i) for i in range(10)]); print([(x[0], len(x)) for x in r])"

    result = (await repl.execute(code)).result

    assert text_of(result) == f"{[(str(i), 8_000_000) for i in range(10)]}\n"


async def test_input_asks_the_owner_and_is_refused_where_nobody_can_be_asked(repl: Repl) -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answer.set_result("line")
    repl.handler = Answering(input=answer)

    asked = (await repl.execute("print(input('? '))", allow_stdin=True)).result
    refused = (await repl.execute("input('? ')")).result

    assert text_of(asked).endswith("? Falseline\n")
    assert refused.error is not None
    assert refused.error.ename == "StdinNotImplementedError"


async def test_defect_in_the_owner_s_answer_is_an_error_of_the_cell(repl: Repl) -> None:
    """The cell must not wait for ever for an answer that will never come."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def defect(*_: object) -> None:
        raise ZeroDivisionError

    repl.handler = Answering(defect)

    for code in ("sub_RLM('a')", "input()"):
        result = (await repl.execute(code, allow_stdin=True)).result
        assert result.error is not None
        assert "defect" in result.error.evalue
    assert len(reported) == 2


async def test_input_that_nobody_waits_for_any_more_is_cancelled(repl: Repl) -> None:
    """A cell whose own thread interrupts its wait ends, and the question with it."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    repl.handler = Answering(input=answer)
    code = """import os, signal, threading
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
input()"""

    result = (await repl.execute(code, allow_stdin=True)).result

    assert result.error is not None
    assert result.error.ename == "KeyboardInterrupt"
    await until(answer.cancelled)


async def test_budget_is_the_owner_s(repl: Repl) -> None:
    repl.handler = Answering()

    assert text_of((await repl.execute("print(budget()['tokens_left'])")).result) == "5\n"


async def test_restart_forgets_everything_and_ends_what_runs(repl: Repl, run: Run) -> None:
    await run("x = 1")
    up = asyncio.Event()
    cell = asyncio.ensure_future(
        repl.execute("print('up', flush=True)\nwhile True: pass", on_output=lambda _: up.set())
    )
    await up.wait()

    await repl.restart()

    assert (await cell).result.worker_lost == "was restarted"
    result = await run("print('x' in globals())")
    assert text_of(result) == "False\n"
    assert result.execution_count == 1


async def test_environment_and_folder_of_cells(
    environ: dict[str, str], mark: str, tmp_path: Path
) -> None:
    environ |= {"OPENAI_API_KEY": "sk-abcdefgh12345678", "PLAIN": "value"}
    async with await Repl.start(environ=environ, cwd=tmp_path, protect=False) as repl:
        code = (
            "import os; print(os.getcwd(), sorted(set(os.environ) & {'OPENAI_API_KEY', 'PLAIN'}))"
        )
        result = (await repl.execute(code)).result

    assert text_of(result) == f"{tmp_path} ['PLAIN']\n"


async def test_surrogates_in_code_do_not_break_the_link(run: Run) -> None:
    """A front end's JSON can hold a lone surrogate, which UTF-8 cannot."""
    assert text_of(await run("print(len('\ud800'))")) == "1\n"


def test_spawn_needs_no_event_loop_and_makes_the_caller_undumpable(
    environ: dict[str, str],
) -> None:
    code = """
import asyncio, ctypes
from rlm_kernel.repl import Repl

repl = Repl.spawn()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))

async def main():
    async with repl:
        result = (await repl.execute("print('ran')")).result
        print(result.outputs[0].text, end="")

asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)

    assert out.stdout == "0\nran\n"
    assert out.stderr == ""


async def test_each_process_has_a_session_of_its_own(repl: Repl) -> None:
    """So no signal of a terminal, or of a front end to the kernel's group, reaches them."""
    assert repl.worker_pid is not None

    assert os.getsid(repl.supervisor_pid) == repl.supervisor_pid
    assert os.getsid(repl.worker_pid) == repl.worker_pid
    assert os.getsid(0) not in (repl.supervisor_pid, repl.worker_pid)


async def test_children_of_cells_inherit_no_descriptor_of_ours(run: Run) -> None:
    code = """import subprocess
subprocess.run(["ls", "/proc/self/fd"], close_fds=False)"""

    # Standard streams and the folder that ls reads.
    assert text_of(await run(code)).split() == ["0", "1", "2", "3"]
