"""The view of a run fits its terminal and says what goes on."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from rlm_kernel.app.progress import Progress, code_preview, prose_preview
from rlm_kernel.app.terminal import LiveView, PlainView, RunView, View, wants_plain
from rlm_kernel.driver.progress_bar import Tally
from rlm_kernel.driver.protocol import (
    CloseCell,
    Delta,
    Final,
    Node,
    Nodes,
    OpenCell,
    State,
    source_sha,
)
from rlm_kernel.engine.budget import Usage

RUN = "0123456789ab"


def play_turn(
    view: View, turn: int, source: str, calls: int = 0, done: int = 0, prose: str = ""
) -> None:
    """One turn up to its execution, *done* of its *calls* ended and the first of those failed."""

    def state(name: str, **more: int) -> State:
        usage = Usage(input_tokens=1000 * turn)
        return State(
            run_id=RUN,
            state=name,
            turn=turn,
            usage=usage,
            root="openai:a-root@http://localhost:8000/v1",
            sub="embedded:smollm2",
            **more,
        )

    view.operation(state("proposing"))
    for suffix, kind, text in (("-p", "markdown", prose), ("", "code", source)):
        if text:
            cell = f"{RUN}-{turn}{suffix}"
            view.operation(OpenCell(cell_id=cell, after="", turn=turn, run_id=RUN, kind=kind))
            view.operation(Delta(cell_id=cell, offset=0, text=text[:5]))
            view.operation(CloseCell(cell_id=cell, sha=source_sha(text), source=text))
    view.operation(state("executing"))
    view.operation(Nodes(nodes=[node(turn, i, "running") for i in range(calls)]))
    ended = [node(turn, i, "failed" if i == 0 else "done") for i in range(done)]
    view.operation(Nodes(nodes=ended))
    counts = {"subcalls_done": max(done - 1, 0), "subcalls_running": calls - done}
    view.operation(state("executing", subcalls_failed=min(done, 1), **counts))


def node(turn: int, index: int, state: str) -> Node:
    return Node(id=f"{turn}.{index}", parent=RUN, turn=turn, kind="llm", state=state, start=0.0)


def live(width: int, height: int = 30) -> tuple[LiveView, Console]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, record=True
    )
    return LiveView("a-long-file-name.txt (11.0 MB)", "Where is " + "it? " * 40, console), console


def drawn(view: LiveView, console: Console) -> list[str]:
    console.print(RunView(view))
    return console.export_text().rstrip("\n").split("\n")


LONG = "x = '" + "long " * 60 + "'\n" + "\tprint(\x1b[31mx, 'ツ' * 9)"


@pytest.mark.parametrize("width", [20, 60, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    view, console = live(width)
    play_turn(view, 1, LONG, prose="**Wide** " * 40)
    play_turn(view, 2, LONG, calls=1234, done=77)
    view.note("a note " * 40)

    for tally in (None, Tally(calls=1234, done=77, failed=1, seconds=9, rate=4)):
        view.subcalls(tally)
        lines = drawn(view, console)
        assert max(map(cell_len, lines)) <= width
        assert len(lines) < 30


def test_the_newest_turns_are_shown_where_there_is_no_room_for_all() -> None:
    view, console = live(60, height=16)
    for turn in range(1, 31):
        play_turn(view, turn, f"x = {turn}", prose=f"Now {turn}.")
    lines = drawn(view, console)

    assert len(lines) <= 16
    assert any("turn 30 " in line for line in lines)
    assert not any("turn 3 " in line for line in lines)
    assert any("earlier turns" in line for line in lines)


def test_the_counts_of_the_batch_under_way_are_shown() -> None:
    view, console = live(100)
    play_turn(view, 1, "ask()", calls=40, done=10)
    text = "\n".join(drawn(view, console))

    assert "10/40 sub-calls · 30 running · 1 failed" in text
    assert "1 turn · 40 sub-calls (1 failed) · 1,000 tokens" in text
    assert "root openai:a-root@http://localhost:8000/v1 · sub embedded:smollm2" in text


def test_cached_calls_are_told_apart() -> None:
    """In the line of their turn and in that of the run, once each, those of child runs too."""
    view, console = live(100)
    play_turn(view, 1, "ask()", calls=40, done=10)
    recorded = [msgspec.structs.replace(node(1, i, "done"), cached=True) for i in range(4, 10)]
    below = msgspec.structs.replace(node(1, 50, "done"), parent="a child run", cached=True)
    view.operation(Nodes(nodes=[*recorded, below]))
    view.operation(Nodes(nodes=recorded))
    text = "\n".join(drawn(view, console))

    assert "10/40 sub-calls · 30 running · 1 failed · 6 cached" in text
    assert "40 sub-calls (1 failed, 7 cached)" in text


def test_calls_that_wait_to_be_sent_are_counted_while_their_cell_runs() -> None:
    view, console = live(100)
    play_turn(view, 1, "ask()", calls=40, done=10)
    view.subcalls(Tally(calls=1000, done=312, failed=4, seconds=10, rate=31.2))
    assert "312/1,000 sub-calls · 4 failed · 31/s · 23 s left" in "\n".join(drawn(view, console))

    view.subcalls(None)
    assert "10/40 sub-calls" in "\n".join(drawn(view, console))


def test_calls_that_are_others_than_were_asked_for_say_why() -> None:
    view, console = live(100)
    play_turn(view, 1, "ask()", calls=3, done=3)
    plain = Node(
        id="n", parent=RUN, turn=1, kind="llm", state="done", start=0, note="a plain call: because"
    )
    view.operation(Nodes(nodes=[plain, plain]))
    assert "1 sub-call: a plain call: because" in "\n".join(drawn(view, console))

    for number in range(5):  # each batch is refused with another number of calls
        note = f"refused together with {number + 2:,} more calls of its batch"
        view.operation(Nodes(nodes=[msgspec.structs.replace(plain, id=f"b{number}", note=note)]))
    shown = "\n".join(drawn(view, console))
    assert "5 sub-calls: refused together with more calls of its batch" in shown
    assert shown.count("refused together") == 1


def test_a_sub_task_tells_how_many_replies_were_unfit() -> None:
    """Each reply counts once, however often its node comes."""
    view, console = live(100)
    play_turn(view, 1, "ask()", calls=3, done=3)
    for index, verdict in enumerate(["unfit", "ok", "ok", "ok"]):
        told = msgspec.structs.replace(node(1, index, "done"), task="year", verdict=verdict)
        view.operation(Nodes(nodes=[told]))
        view.operation(Nodes(nodes=[told]))
    assert "sub-task year: 4 replies, 1 unfit (25%)" in "\n".join(drawn(view, console))


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    view, console = live(100)
    play_turn(view, 1, "print('\x1b]0;title\x07')", prose="\x1b[2J gone")
    console.print(RunView(view))
    written = console.file.getvalue()

    assert "\x1b]0;" not in written
    assert "\x1b[2J" not in written
    assert "gone" in written
    assert "print('" in written


def test_the_end_is_shown_with_its_reason() -> None:
    view, console = live(100)
    play_turn(view, 1, "x = 1")
    view.operation(Final(run_id=RUN, state="stopped", reason="the turns are used up"))
    text = "\n".join(drawn(view, console))

    assert "■ stopped" in text
    assert "the turns are used up" in text


def test_plain_lines_tell_each_change_once_without_escapes() -> None:
    stream = io.StringIO()
    view = PlainView("p.txt", "why?", stream)
    play_turn(view, 1, LONG)
    play_turn(view, 2, "y = 2")
    view.operation(Final(run_id=RUN, state="failed", reason="no such model"))
    said = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]

    assert said == [
        "p.txt · why?",
        "turn 1 proposing (1,000 tokens)",
        "turn 1 executing (1,000 tokens)",
        "turn 2 proposing (2,000 tokens)",
        "turn 2 executing (2,000 tokens)",
        "failed: no such model",
    ]
    assert "\x1b" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "plain"),
    [
        (Terminal(), {"TERM": "xterm"}, False),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (Terminal(), {"TERM": "dumb"}, True),
        (Terminal(), {}, True),
        (io.StringIO(), {"TERM": "xterm"}, True),
    ],
)
def test_who_gets_plain_lines(stream: io.StringIO, environ: dict[str, str], plain: bool) -> None:
    assert wants_plain(stream, environ) is plain


def test_seconds_and_tokens_belong_to_their_turn() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    for turn, tokens in ((1, 100), (2, 250)):
        for name, used in (("proposing", 0 if turn == 1 else 100), ("executing", tokens)):
            usage = Usage(input_tokens=used)
            progress.apply(State(run_id=RUN, state=name, turn=turn, usage=usage))
            now[0] += 1.0

    assert [(t.seconds(now[0]), t.tokens) for t in progress.turns.values()] == [(2, 100), (2, 150)]


def test_previews_say_most_in_little_room() -> None:
    assert code_preview("if x:\n    a = 1\n\n    b = 2\n", 2) == ["a = 1", "b = 2"]
    assert code_preview("", 2) == []
    assert prose_preview("**Look** at `P` first. Then\nmore.\n\nAnd more.") == "Look at P first."
