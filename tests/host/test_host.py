"""The host drives real runs in real kernel processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest

from rlm_kernel.driver.document import Document
from rlm_kernel.driver.host import Host
from rlm_kernel.driver.kernel_process import KernelDied
from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.driver.protocol import Operation, State
from rlm_kernel.driver.request import Outcome, RunRequest
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.record.notebook import CellMeta, NotebookMeta
from tests.host.conftest import LINES

pytestmark = pytest.mark.usefixtures("no_orphans")

Playbook = Callable[..., str]
QUERY = "What is the needle?"
LENGTH = len("".join(LINES))
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4


class Reacts:
    """A listener that does something once, when the run is in a state of a turn."""

    def __init__(self, turn: int, state: str, react: Callable[[], object]) -> None:
        self._waiting_for: tuple[int, str] | None = (turn, state)
        self._react = react
        self.notes: list[str] = []

    def operation(self, op: Operation) -> None:
        if isinstance(op, State) and (op.turn, op.state) == self._waiting_for:
            self._waiting_for = None
            self._react()

    def subcalls(self, tally: Tally | None) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def requested(prompt: Path, root: str, **options: str) -> RunRequest:
    return RunRequest(prompt=str(prompt), query=QUERY, options={"root": root, **options})


async def ran(prompt: Path, root: str, out: Path | None = None) -> tuple[Outcome, Document]:
    document = Document(out)
    return await Host(requested(prompt, root), document).run(), document


async def test_the_host_is_undumpable_since_it_has_the_keys_too(
    prompt: Path, playbook: Playbook
) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0)
    assert libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    await ran(prompt, playbook("Final = 1"))

    assert libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0


async def test_a_run_leaves_its_trajectory_as_a_valid_notebook(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    root = playbook(
        ("I *look* first.", "import re\nprint(len(P))"),
        ("Then I search.", "hit = re.search(r'needle is (\\d+)', P)\nhit[1]"),
        "Final = hit[1]",
    )
    out = tmp_path / "run.ipynb"
    outcome, _ = await ran(prompt, root, out)

    assert outcome.final is not None
    assert (outcome.final.state, outcome.final.response) == ("answered", "42")
    notebook = nbformat.read(out, as_version=4)
    nbformat.validate(notebook)
    kinds = [(cell.cell_type, cell.source.split("\n")[0][:14]) for cell in notebook.cells]
    assert kinds == [
        ("markdown", "> What is the "),
        ("code", f"%prompt {prompt}"[:14]),
        ("code", "%%rlm --root p"),
        ("markdown", "I *look* first"),
        ("code", "import re"),
        ("markdown", "Then I search."),
        ("code", "hit = re.searc"),
        ("code", "Final = hit[1]"),
        ("markdown", "**Answer:** 42"),
    ]
    assert notebook.cells[4].outputs[0].text == f"{LENGTH}\n"
    assert notebook.cells[6].outputs[0].data["text/plain"] == "'42'"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3, 4, 5]


async def test_metadata_tells_the_run_and_finds_its_record(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    out = tmp_path / "run.ipynb"
    outcome, _ = await ran(prompt, playbook("Final = 1"), out)

    notebook = nbformat.read(out, as_version=4)
    meta = NotebookMeta.from_dict(notebook.metadata["rlm"])
    assert outcome.final is not None
    assert meta.runs == [outcome.final.run_id]
    assert (meta.query, meta.state, meta.response) == (QUERY, "answered", "1")
    assert (tmp_path / meta.record).is_file()
    assert not Path(meta.record).is_absolute()
    cell = CellMeta.from_dict(notebook.cells[3].metadata["rlm"])
    assert (cell.turn, cell.kind, cell.state, cell.sampled) == (1, "cell", "done", False)


async def test_a_cell_that_raises_is_marked_and_the_run_goes_on(
    prompt: Path, playbook: Playbook
) -> None:
    outcome, document = await ran(prompt, playbook("1/0", "Final = 'after'"))

    assert outcome.final is not None
    assert outcome.final.response == "after"
    failed = document.render()["cells"][3]
    assert CellMeta.from_dict(failed["metadata"]["rlm"]).state == "failed"
    assert failed["outputs"][0]["ename"] == "ZeroDivisionError"


async def test_a_run_that_is_stopped_says_why(prompt: Path, playbook: Playbook) -> None:
    outcome, document = await ran(prompt, playbook("x = 1"))

    assert outcome.final is not None
    assert outcome.final.state == "stopped"
    assert "playbook" in outcome.final.reason
    assert outcome.final.reason in document.render()["cells"][-1]["source"]


async def test_the_notebook_is_saved_after_every_turn(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    """The second cell finds the output of the first in the file."""
    out = tmp_path / "run.ipynb"
    outcome, _ = await ran(
        prompt, playbook("print('first turn')", f"Final = open({str(out)!r}).read()"), out
    )

    assert outcome.final is not None
    assert "first turn\\n" in outcome.final.response


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing", None, "missing"),
        ("empty", b"", "empty"),
        ("binary", bytes(range(256)) * 9, "binary"),
    ],
)
async def test_a_bad_prompt_is_a_usage_error(
    name: str, content: bytes | None, complaint: str, playbook: Playbook, tmp_path: Path
) -> None:
    bad = tmp_path / name
    if content is not None:
        bad.write_bytes(content)

    with pytest.raises(UsageError, match=complaint):
        await ran(bad, playbook("Final = 1"))


async def test_a_playbook_without_cells_leaves_no_notebook(prompt: Path, tmp_path: Path) -> None:
    """What is found out in the kernel only leaves as little as what is known beforehand."""
    script, out = tmp_path / "script.py", tmp_path / "run.ipynb"
    script.write_text("Final = 1\n")
    with pytest.raises(UsageError, match="has no code cell"):
        await ran(prompt, f"playbook:{script}", out)

    assert sorted(os.listdir(tmp_path)) == ["prompt.txt", "script.py"]


async def test_a_path_with_blanks_and_quotes_is_loaded(playbook: Playbook, tmp_path: Path) -> None:
    odd = tmp_path / "it's a {prompt} $HOME.txt"
    odd.write_text("text")
    outcome, _ = await ran(odd, playbook("Final = P"))

    assert outcome.final is not None
    assert outcome.final.response == "text"


async def test_a_playbook_below_a_folder_with_blanks_is_found(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    written = playbook("Final = 1").removeprefix("playbook:")
    moved = tmp_path / "my play's book.py"
    os.rename(written, moved)
    outcome, _ = await ran(prompt, f"playbook:{moved}")

    assert outcome.final is not None
    assert outcome.final.state == "answered"


async def test_a_query_may_hold_anything(prompt: Path, playbook: Playbook) -> None:
    query = '%%rlm {x} $y ```\n# heading\n\'quoted\' \\ """ ?'
    request = RunRequest(
        prompt=str(prompt), query=query, options={"root": playbook('Final = """{{query}}"""')}
    )
    outcome = await Host(request, Document()).run()

    assert outcome.final is not None
    assert outcome.final.response == query


async def test_an_unknown_root_is_a_usage_error_in_one_line(prompt: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'openai:x'") as caught:
        await ran(prompt, "opnai:x")

    assert "\n" not in str(caught.value)


# --- interruption -----------------------------------------------------------------------------


async def test_the_first_interrupt_stops_the_run_in_order(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    out = tmp_path / "run.ipynb"
    root = playbook("import time\ntime.sleep(600)", "Final = 1")

    def stop() -> None:
        host.interrupt()

    listener = Reacts(1, "executing", stop)
    host = Host(requested(prompt, root), Document(out), listener=listener)
    outcome = await host.run()

    assert outcome.interrupted
    assert outcome.final is not None
    assert outcome.final.state == "stopped"
    assert nbformat.read(out, as_version=4).metadata["rlm"]["state"] == "stopped"


async def test_the_second_interrupt_ends_everything_at_once(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    out = tmp_path / "run.ipynb"
    root = playbook("print('shown', flush=True)\nimport time\ntime.sleep(600)", "Final = 1")

    def twice() -> None:
        host.interrupt()
        host.interrupt()

    listener = Reacts(1, "executing", twice)
    host = Host(requested(prompt, root), Document(out), listener=listener)
    outcome = await host.run()

    assert outcome.interrupted
    assert outcome.final is None
    assert "time.sleep(600)" in nbformat.read(out, as_version=4).cells[3].source


# --- kernels that fail ------------------------------------------------------------------------


def kill_kernel() -> None:
    for child in psutil.Process().children():
        if "rlm_kernel" in child.cmdline():
            child.send_signal(signal.SIGKILL)


async def test_the_death_of_the_kernel_ends_the_run_and_keeps_what_was_there(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    out = tmp_path / "run.ipynb"
    root = playbook("print('kept')", "import time\ntime.sleep(600)")
    listener = Reacts(2, "executing", kill_kernel)
    host = Host(requested(prompt, root), Document(out), listener=listener)

    with pytest.raises(KernelDied, match="SIGKILL"):
        await host.run()
    assert nbformat.read(out, as_version=4).cells[3].outputs[0].text == "kept\n"


async def host_with(prompt: Path, *argv: str, timeout: float = 60.0) -> Outcome:
    """Run with another kernel: *argv* of this interpreter."""
    host = Host(
        requested(prompt, "playbook:none.py"),
        Document(),
        kernel_argv=[sys.executable, *argv],
        start_timeout=timeout,
    )
    return await host.run()


async def test_a_kernel_that_cannot_start_is_told_with_its_last_words(prompt: Path) -> None:
    code = "import sys; print('no such module: frobnicate', file=sys.stderr); sys.exit(3)"

    with pytest.raises(KernelDied, match=r"exit code 3 \(no such module: frobnicate\)"):
        await host_with(prompt, "-c", code)


async def test_a_kernel_that_never_answers_is_given_up(prompt: Path) -> None:
    with pytest.raises(RLMError, match=r"did not answer within 0\.5 seconds"):
        await host_with(prompt, "-c", "import time; time.sleep(600)", timeout=0.5)


async def test_a_kernel_of_another_kind_is_told_apart(prompt: Path) -> None:
    with pytest.raises(RLMError, match="closed the comm"):
        await host_with(prompt, "-m", "ipykernel_launcher", "-f", "{connection_file}")


async def test_a_program_that_does_not_exist_is_one_sentence(prompt: Path) -> None:
    host = Host(requested(prompt, "playbook:none.py"), Document(), kernel_argv=["/nowhere/python"])

    with pytest.raises(RLMError, match="could not be started"):
        await host.run()


async def test_a_notebook_that_cannot_be_saved_does_not_lose_the_answer(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    root = playbook("x = 1", "Final = 7")

    def remove() -> None:
        os.rename(folder, tmp_path / "moved")

    listener = Reacts(1, "executing", remove)
    host = Host(requested(prompt, root), Document(folder / "run.ipynb"), listener=listener)
    outcome = await host.run()

    assert outcome.final is not None
    assert outcome.final.response == "7"
    assert "run.ipynb" in outcome.unsaved
    assert len(listener.notes) == 1


async def test_the_notebook_says_what_was_asked_of_whom(
    prompt: Path, playbook: Playbook, tmp_path: Path
) -> None:
    """Without the record, the notebook's metadata tells query, prompt, dialect and record."""
    path = tmp_path / "run.ipynb"
    root = playbook("Final = 1")
    await Host(requested(prompt, root, dialect="rlms"), Document(path)).run()
    meta = NotebookMeta.from_dict(nbformat.read(path, 4).metadata["rlm"])
    assert (meta.query, meta.dialect, meta.record) == (QUERY, "rlms", "run.rlm.sqlite")
    assert meta.prompt is not None
    assert meta.prompt.chars == LENGTH
