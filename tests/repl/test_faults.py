"""Whatever becomes of a worker, its supervisor or the kernel: said, survived, and nothing left."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_kernel.cells import ErrorOutput, Stream
from rlm_kernel.errors import UsageError, WorkerDied
from rlm_kernel.repl import Repl
from tests.repl.conftest import STANDIN, Run, marked, text_of, until

DEATHS = {
    "os._exit": ("import os; os._exit(3)", "exited with code 3"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "abort": ("import os; os.abort()", "SIGABRT"),
    "kill": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "closed link": ("import os, time; os.closerange(3, 256); time.sleep(60)", "closed its link"),
    # Recursion in C that no version of the interpreter counts: the C stack ends.
    "recursion": (
        "it = iter([0])\nfor _ in range(10**6): it = filter(None, it)\nnext(it, None)",
        "SIGSEGV",
    ),
}


@pytest.mark.parametrize("name", DEATHS)
async def test_cell_whose_worker_dies_says_why_and_the_next_runs_in_a_new_worker(
    repl: Repl, run: Run, name: str
) -> None:
    code, reason = DEATHS[name]
    await run("kept, also = 1, 2")
    first = repl.worker_pid

    result = await run(f"print('last words', flush=True)\n{code}")

    assert not result.ok
    assert reason in result.worker_lost
    assert "last words" in text_of(result)
    assert result.error is not None
    assert result.error.ename == "WorkerDied"
    assert reason in result.error.evalue
    assert "also, kept" in result.error.evalue
    assert result.outputs[-1] == result.error
    assert text_of(await run("print(6 * 7)")) == "42\n"
    assert repl.worker_pid != first


async def test_worker_killed_from_outside_while_idle_is_replaced_and_its_loss_is_told(
    repl: Repl, run: Run
) -> None:
    told: list[tuple[str, list[str]]] = []
    repl.handler.worker_lost = lambda reason, lost: told.append((reason, lost))  # type: ignore[method-assign]
    await run("x = 1")
    assert repl.worker_pid is not None

    os.kill(repl.worker_pid, signal.SIGKILL)
    await until(lambda: told)

    assert told == [("was killed by SIGKILL (Killed)", ["x"])]
    assert text_of(await run("print('x' in globals())")) == "False\n"


async def test_killed_supervisor_takes_its_tree_along_and_a_new_tree_starts(
    repl: Repl, run: Run, mark: str
) -> None:
    await run("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
    before = set(marked(mark))
    assert len(before) == 3

    os.kill(repl.supervisor_pid, signal.SIGKILL)
    result = await run("import time; time.sleep(600)")

    assert "lost its supervisor process, which was killed by SIGKILL" in result.worker_lost
    assert text_of(await run("print(1)")) == "1\n"
    assert before.isdisjoint(marked(mark))
    assert len(marked(mark)) == 2


async def test_children_of_a_dead_worker_are_swept_daemons_too(
    repl: Repl, run: Run, mark: str
) -> None:
    daemon = "(setsid sleep 600 & setsid setsid sleep 600 &) ; sleep 600 & disown; exit 0"
    await run(f"import subprocess; subprocess.run(['bash', '-c', {daemon!r}])")
    await until(lambda: len(marked(mark)) == 5)

    await run("import os; os._exit(0)")
    await run("1")

    assert sorted(marked(mark)) == sorted([repl.supervisor_pid, repl.worker_pid])


KERNEL = """
import asyncio, os, sys
from rlm_kernel.repl import Repl

async def main():
    repl = await Repl.start()
    cell = "import os, subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    await repl.execute(cell)
    asyncio.ensure_future(repl.execute(sys.argv[1]))
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os._exit(7)

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", ["1", "while True: pass", "import signal; signal.pause()"])
@pytest.mark.parametrize("how", ["os._exit", "kill"])
async def test_death_of_the_kernel_process_leaves_no_process(
    environ: dict[str, str], mark: str, how: str, busy: str
) -> None:
    kernel = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", KERNEL, busy],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with kernel:
        assert kernel.stdout is not None
        assert await asyncio.to_thread(kernel.stdout.readline) == b"up\n"
        assert len(marked(mark)) == 4
        if how == "kill":
            kernel.kill()
        else:
            kernel.communicate(b"now\n")

    await until(lambda: not marked(mark))


async def test_cancelled_close_leaves_no_process(environ: dict[str, str], mark: str) -> None:
    repl = await Repl.start(environ=environ, protect=False)
    closing = asyncio.ensure_future(repl.close())
    await asyncio.sleep(0)
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing

    await until(lambda: not marked(mark))
    await repl.close()


def test_end_of_the_event_loop_without_close_leaves_no_process(
    environ: dict[str, str], mark: str
) -> None:
    """A closing that the end of the loop cancels still waits for the supervisor's end."""

    async def main() -> None:
        repl = await Repl.start(environ=environ, protect=False)
        await repl.execute("import subprocess; subprocess.Popen(['sleep', '600'])")
        repl._closing = asyncio.ensure_future(repl._close())
        await asyncio.sleep(0)

    asyncio.run(main())
    assert marked(mark) == []


async def test_close_while_a_cell_runs_ends_the_cell(environ: dict[str, str], mark: str) -> None:
    repl = await Repl.start(environ=environ, protect=False)
    outputs: list[object] = []
    cell = asyncio.ensure_future(
        repl.execute("print('up', flush=True)\nwhile True: pass", on_output=outputs.append)
    )
    await until(lambda: outputs)

    await repl.close()
    await repl.close()

    assert "closed" in (await cell).result.worker_lost
    assert marked(mark) == []
    after = (await repl.execute("1")).result
    assert after.error is not None
    assert "closed" in after.error.evalue


async def test_worker_that_cannot_start_says_why(environ: dict[str, str], mark: str) -> None:
    with pytest.raises(WorkerDied, match=r"exited with code 1.*no such thing as a module"):
        await Repl.start(
            environ={**environ, "STANDIN_SAYS": "no such thing as a module"},
            protect=False,
            worker_argv=STANDIN,
        )
    assert marked(mark) == []


async def test_program_of_the_worker_that_is_missing_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(WorkerDied, match="No such file or directory"):
        await Repl.start(environ=environ, protect=False, worker_argv=("/nowhere/python",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cwd": Path("/nowhere")}, "/nowhere: it is not a folder"),
        ({"launcher": ["/nowhere/bwrap"]}, "/nowhere/bwrap"),
    ],
)
def test_what_cannot_be_started_is_refused_at_once(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Repl.spawn(protect=False, **arguments)  # type: ignore[arg-type]


async def test_launcher_that_fails_is_quoted(environ: dict[str, str]) -> None:
    launcher = ["sh", "-c", "echo setting up uid map: Permission denied >&2; exit 1"]
    with pytest.raises(WorkerDied, match=r"exited with code 1 .*uid map: Permission denied"):
        await Repl.start(environ=environ, protect=False, launcher=launcher)


async def test_launcher_is_a_prefix_of_the_processes(environ: dict[str, str]) -> None:
    repl = await Repl.start(environ=environ, protect=False, launcher=["env", "THROUGH=launcher"])
    async with repl:
        result = (await repl.execute("import os; print(os.environ['THROUGH'])")).result

    assert text_of(result) == "launcher\n"


FLOODS = {
    "descriptor": "import os; status = os.system('head -c 1000000000 /dev/zero')",
    "print": "line = 'x' * 99_999\nfor _ in range(10_000): print(line)",
}


@pytest.mark.parametrize("name", FLOODS)
async def test_gigabyte_of_output_is_bounded_in_result_and_memory(repl: Repl, name: str) -> None:
    passed = 0

    def count(output: object) -> None:
        nonlocal passed
        passed += len(output.text) if isinstance(output, Stream) else 0

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = (await repl.execute(FLOODS[name], on_output=count, max_output=1_000_000)).result
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert result.ok
    assert len(text_of(result)) == 1_000_000
    assert passed < 1_000_200
    assert result.dropped_chars == 1_000_000_000 - 1_000_000
    assert text_of(result, "stderr") == "[999,000,000 more characters of output are not shown]\n"
    assert grown_kib < 64 << 10


async def test_worker_that_ignores_the_limit_is_bounded_by_the_kernel(standin: Repl) -> None:
    code = """for _ in range(1000):
    send(Emit(id=request.id, output=Stream("stdout", "x" * 1_000_000)))"""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count_turns())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = (await standin.execute(code, max_output=2_500_000)).result
    other.cancel()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert len(text_of(result)) == 2_500_000
    assert result.dropped_chars == 1_000_000_000 - 2_500_000
    assert grown_kib < 64 << 10
    # Others had their turn at least once for every MiB that came.
    assert turns > 1000


async def test_endless_displays_and_errors_are_bounded(standin: Repl) -> None:
    code = """for i in range(30_000):
    send(Emit(id=request.id, output=Display({"text/plain": ""})))
for i in range(100):
    send(Emit(id=request.id, output=ErrorOutput("E", "v" * 1_000_000, ["t" * 1_000_000])))"""

    result = (await standin.execute(code, max_output=100_000)).result

    errors = [output for output in result.outputs if isinstance(output, ErrorOutput)]
    assert len(result.outputs) <= 20_002
    assert len(errors) == 1
    assert len(errors[0].evalue) == 200_000
