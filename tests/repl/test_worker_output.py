"""What cells write and show arrives whole, in order, and within the limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from rlm_kernel.cells import ErrorOutput, Result, Stream
from rlm_kernel.repl import messages
from tests.repl.worker_driver import WorkerDriver


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerDriver]:
    with WorkerDriver() as driver:
        yield driver


def test_lines_are_sent_as_they_end(worker: WorkerDriver) -> None:
    """Output is seen while the cell runs, not at its end."""
    number = worker.start("print('first')\ninput()", allow_stdin=True)
    assert worker.receive().output == Stream("stdout", "first\n")  # type: ignore[union-attr]
    request = worker.wait_for(messages.GetInput)
    worker.send(messages.InputReply(id=request.id, text=""))
    assert worker.finish(number).finished.ok


def test_the_order_of_streams_displays_and_results(worker: WorkerDriver) -> None:
    """Partial lines too stand where they were written."""
    cell = worker.run(
        "import sys\nprint('a', end='')\nprint('b', end='', file=sys.stderr)\n"
        "print('c', end='')\ndisplay(1)\nprint('d', end='')\n5"
    )
    shown = [(o.name, o.text) if isinstance(o, Stream) else type(o).__name__ for o in cell.outputs]
    assert shown == [
        ("stdout", "a"),
        ("stderr", "b"),
        ("stdout", "c"),
        "Display",
        ("stdout", "d"),
        "Result",
    ]


def test_a_print_is_one_message(worker: WorkerDriver) -> None:
    """Text and line end are two writes but one piece of output."""
    cell = worker.run("print('x', 'y')")
    assert cell.outputs == [Stream("stdout", "x y\n")]


def test_text_of_every_kind(worker: WorkerDriver) -> None:
    """Lone surrogates are escaped; the rest of Unicode and bytes pass."""
    cell = worker.run(
        "import sys\nprint('\\ud800 é 漢 😀')\nsys.stdout.buffer.write(b'raw \\xc3\\xa9\\n');"
    )
    assert cell.out == "\\ud800 é 漢 😀\nraw é\n"
    assert worker.run("'\\ud800'").result == "'\\ud800'"
    assert worker.run("raise ValueError('\\ud800')").errors[0].evalue == "\\ud800"
    assert worker.run("display({'text/plain': '\\udcff'}, raw=True)").displays


def test_the_streams_are_like_files(worker: WorkerDriver) -> None:
    """fileno, isatty, encoding, writelines, and a type error for what is not text."""
    code = "import sys\no = sys.stdout\no.fileno(), sys.stderr.fileno(), o.isatty(), o.encoding"
    assert worker.run(code).result == "(1, 2, False, 'utf-8')"
    assert worker.run("sys.stdout.writelines(['a', 'b\\n'])").out == "ab\n"
    assert worker.run("sys.stdout.write(b'x')").errors[0].ename == "TypeError"
    assert worker.run("sys.stdout.write('five\\n');").out == "five\n"


def test_a_large_print_is_sent_in_pieces(worker: WorkerDriver) -> None:
    """No message is longer than 1 MiB of UTF-8, and no character is lost between them."""
    cell = worker.run("print('漢' * 700_000)")
    texts = [o.text for o in cell.outputs if isinstance(o, Stream)]
    assert "".join(texts) == "漢" * 700_000 + "\n"
    assert max(len(text.encode()) for text in texts) <= 1 << 20


def test_output_beyond_the_limit_is_counted(worker: WorkerDriver) -> None:
    """Exactly the limit is sent; the result and an error are shown even then."""
    cell = worker.run("for _ in range(100): print('x' * 99)\n1 / 0", max_output=1_000)
    assert len(cell.out) == 1_000
    assert cell.finished.dropped_chars == 9_000
    assert isinstance(cell.outputs[-1], ErrorOutput)
    cell = worker.run("print('y' * 5_000)\n'the result'", max_output=1_000)
    assert cell.result == "'the result'"
    assert worker.run("print('z')").finished.dropped_chars == 0


def test_a_huge_display_is_bounded(worker: WorkerDriver) -> None:
    """What does not fit is left out and counted; its short forms stay."""
    cell = worker.run("from IPython.display import HTML\nHTML('<b>' * 1_000_000)", max_output=1_000)
    (result,) = [o for o in cell.outputs if isinstance(o, Result)]
    assert set(result.data) == {"text/plain"}
    assert cell.finished.dropped_chars == 3_000_000


def test_a_message_over_the_limit_of_the_link_is_not_sent(worker: WorkerDriver) -> None:
    """The cell and the worker go on, and say so."""
    code = "display({'x/y': ['q' * 70_000_000]}, raw=True)\n'after'"
    cell = worker.run(code, max_output=1 << 40)
    assert "not shown" in cell.err
    assert cell.result == "'after'"


def test_a_very_long_str_as_result_shows_its_beginning(worker: WorkerDriver) -> None:
    """Looking at P by its name is cheap."""
    cell = worker.run("'p' * 3_000_000")
    assert cell.result is not None
    assert len(cell.result) < 1_000_100
    assert cell.result.endswith("(+2,000,000 characters)")


def test_displays_can_be_updated_and_cleared(worker: WorkerDriver) -> None:
    """display_id, update_display and clear_output are carried as they are."""
    cell = worker.run(
        "from IPython.display import clear_output\n"
        "handle = display('one', display_id='d1')\nhandle.update('two')\nclear_output(wait=True)"
    )
    first, second = cell.displays
    assert (first.display_id, first.update) == ("d1", False)
    assert (second.display_id, second.update, second.data["text/plain"]) == ("d1", True, "'two'")
    assert [clear.wait for clear in cell.clears] == [True]


def test_rich_results(worker: WorkerDriver) -> None:
    """HTML beside text, and binary images as base64."""
    code = (
        "class R:\n    def _repr_html_(self): return '<b>x</b>'\n"
        "    def _repr_png_(self): return b'\\x89PNG'\nR()"
    )
    (result,) = [o for o in worker.run(code).outputs if isinstance(o, Result)]
    assert result.data["text/html"] == "<b>x</b>"
    assert result.data["image/png"] == "iVBORw=="


def test_figures_are_shown_at_the_end_of_the_cell(worker: WorkerDriver) -> None:
    """matplotlib draws inline without being asked to."""
    cell = worker.run("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2]);")
    assert [set(display.data) for display in cell.displays] == [{"image/png", "text/plain"}]
    assert worker.run("1").displays == []


def test_capture_and_redirection(worker: WorkerDriver) -> None:
    """What a cell catches of its own output is not sent, and the streams are whole afterwards."""
    cell = worker.run("%%capture got\nprint('caught')\ndisplay(1)")
    assert cell.outputs == []
    assert worker.run("got.stdout, len(got.outputs)").result == "('caught\\n', 1)"
    cell = worker.run(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: print('in')\n"
        "print('out')"
    )
    assert cell.outputs == [Stream("stdout", "out\n")]


@pytest.mark.parametrize(
    "code",
    [
        "import sys, io; sys.stdout = io.StringIO()",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout.close()",
        "import sys; del sys.stdout",
    ],
)
def test_a_replaced_or_closed_stream_is_back_after_the_cell(
    worker: WorkerDriver, code: str
) -> None:
    """And the cell is told."""
    cell = worker.run(code)
    assert "sys.stdout was replaced or closed" in cell.err
    assert worker.run("print('works')").out == "works\n"


def test_a_display_that_fails_fails_the_cell(worker: WorkerDriver) -> None:
    """A repr that raises is an error of the cell's."""
    cell = worker.run("class B:\n    def __repr__(self): raise ValueError('no repr')\nB()")
    assert not cell.finished.ok
    assert [error.ename for error in cell.errors] == ["ValueError"]


def test_threads_print_whole_lines(worker: WorkerDriver) -> None:
    """Nothing that a thread prints is lost."""
    cell = worker.run(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def say(i):\n    for k in range(200): print(f'{i}:{k}')\n"
        "with ThreadPoolExecutor(8) as pool: list(pool.map(say, range(8)))"
    )
    assert sorted(cell.out.split()) == sorted(f"{i}:{k}" for i in range(8) for k in range(200))


def test_a_finalizer_that_prints_in_the_middle_of_printing(worker: WorkerDriver) -> None:
    """The streams may be entered again by the garbage collector."""
    cell = worker.run(
        "import gc\n"
        "class Loud:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self): print('gone')\n"
        "gc.set_threshold(1)\n"
        "for i in range(300):\n    Loud(); print('line', [i])\n"
        "gc.set_threshold(700, 10, 10)\ngc.collect();"
    )
    assert cell.out.count("gone") == 300
    assert cell.out.count("line") == 300


def test_tqdm_and_rich_know_a_notebook(worker: WorkerDriver) -> None:
    """Libraries look at the configuration and at the name of the shell's class."""
    assert worker.run("type(get_ipython()).__name__").result == "'ZMQInteractiveShell'"
    assert worker.run("'IPKernelApp' in get_ipython().config").result == "True"
    code = "from tqdm.auto import tqdm; 'tqdm_notebook' in [c.__name__ for c in tqdm.__mro__]"
    assert worker.run(code).result == "True"
    displays = worker.run("from rich import print as rprint; rprint('[b]x[/b]')").displays
    assert "text/html" in displays[0].data


def test_what_holds_more_values_than_a_message_may_is_left_out(worker: WorkerDriver) -> None:
    """The kernel would end a worker that sent it; here the person hears what is wrong."""
    cell = worker.run("display({'application/json': [1] * 1_200_000}, raw=True)")
    assert cell.displays == []
    assert "not shown: more than the 1,000,000 numbers" in cell.err
    cell = worker.run("Final = [1] * 1_200_000")
    assert cell.finished.answer is None
    assert "could not be handed over: more than the 1,000,000" in cell.err
    cell = worker.run("globals().update({f'v{i}': i for i in range(250_000)})")
    assert cell.finished.ok
    assert worker.run("v249999").result == "249999"


@pytest.mark.parametrize(
    "raising",
    [
        "raise ValueError('x' * 100_000_000)",
        "raise ValueError('\\n' * 3_000_000)",
        "e = ValueError(0)\ne.add_note('\\n' * 3_000_000)\nraise e",
        "raise type('E' * 100_000_000, (Exception,), {})",
        "raise ExceptionGroup('x' * 100_000_000, [ValueError('\\ud800' * 30_000_000)])",
    ],
)
def test_a_huge_exception_is_told_by_its_beginning(worker: WorkerDriver, raising: str) -> None:
    """The worker and its variables outlive it."""
    cell = worker.run(f"kept = 1\n{raising}")
    error = cell.errors[0]
    assert cell.finished.error == error
    assert len(error.ename) < 1100
    assert len(error.evalue) < 130_000
    assert sum(map(len, error.traceback)) < 2_000_000
    assert re.search(r"… \(\+[\d,]+ (characters|lines)\)", str(error))
    assert worker.run("kept").result == "1"
