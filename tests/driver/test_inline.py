"""A run in the output of one cell: what is displayed, when, and that nothing in it is live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output

from rlm_kernel.cells import CellResult, Display, ErrorOutput, SubcallParams
from rlm_kernel.driver.inline import INTERVAL, InlineView
from rlm_kernel.engine.events import (
    AnswerRejected,
    RunPaused,
    SubcallEnded,
    SubcallJudged,
    SubcallStarted,
    TurnExecuted,
    TurnObserved,
)
from tests.driver.parties import RUN, Clock, Script, cell_result, picture, run_started

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&lt;`*_]("
TAGS = {"div", "span", "b", "pre", "code", "details", "summary"}


@dataclass
class Output:
    """The output area of a cell."""

    shown: list[tuple[str, bool]] = field(default_factory=list)
    """Display id and whether it was an update."""

    bundles: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What stands there, in order."""

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, update: bool
    ) -> None:
        assert update == (display_id in self.bundles)
        self.shown.append((display_id, update))
        self.bundles[display_id] = data

    def plain(self, name: str) -> str:
        return str(self.bundles[f"{RUN}-{name}" if name else RUN]["text/plain"])

    def html(self, name: str) -> str:
        return str(self.bundles[f"{RUN}-{name}" if name else RUN]["text/html"])


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.fixture
def view(output: Output, clock: Clock) -> InlineView:
    return _view(output, clock)


@pytest.fixture
def script(view: InlineView, clock: Clock) -> Script:
    return Script(view.on_event, clock)


def _view(output: Output, clock: Clock, *, live: bool = True) -> InlineView:
    return InlineView(
        output.display,
        "Which code?",
        live=live,
        loop_time=clock.time,
        call_later=clock.call_later,
    )


def _turn(script: Script, turn: int, result: CellResult | None = None) -> None:
    script.turn(turn, f"x = {turn}", f"Step {turn}.")
    script.executed(result or cell_result("x"))


def test_a_run_is_a_head_its_turns_and_its_answer(
    output: Output, script: Script, clock: Clock
) -> None:
    """One display each, in that order, with ids that stay."""
    script.emit(run_started())
    _turn(script, 1)
    clock.advance(1)
    _turn(script, 2)
    script.end("48213")

    assert list(output.bundles) == [RUN, f"{RUN}-1", f"{RUN}-2", f"{RUN}-answer"]
    assert "48213" in output.plain("answer")
    assert "Which code?" in output.plain("")
    assert "answered" in output.plain("")


def test_a_turn_is_updated_in_place(output: Output, script: Script, clock: Clock) -> None:
    """The same display goes from the streamed reply to the observation."""
    script.emit(run_started())
    script.ask(1)
    script.stream("I look at")
    clock.advance(1)
    assert "proposing" in output.plain("1")
    assert "I look at" in output.plain("1")
    script.propose("n = len(P)", "I look at it.")
    script.decided()
    script.executing("n = len(P)")
    clock.advance(1)
    assert "executing" in output.plain("1")
    script.executed(cell_result("n"))
    clock.advance(1)

    shown = output.plain("1")
    assert "done" in shown
    assert "    n = len(P)" in shown
    assert "it ran" in shown
    assert "110 tokens" in shown


def test_at_most_ten_updates_a_second(output: Output, script: Script, clock: Clock) -> None:
    """However fast events come, the output is refreshed at intervals."""
    script.emit(run_started())
    script.ask(1)
    clock.advance(1)
    before = len(output.shown)
    for _ in range(1000):
        script.stream("word ")
        clock.advance(0.001)

    refreshed = sum(1 for name, _ in output.shown[before:] if name == f"{RUN}-1")
    assert 1 < refreshed <= 1 / INTERVAL + 1
    assert sum(1 for name, _ in output.shown[before:] if name == RUN) <= refreshed


def test_the_last_state_is_always_shown(output: Output, script: Script, clock: Clock) -> None:
    """What came within an interval is shown when it is over, without another event."""
    script.emit(run_started())
    script.ask(1)
    script.stream("the last word")
    clock.advance(INTERVAL)

    assert "the last word" in output.plain("1")


def test_the_end_is_shown_at_once(output: Output, script: Script) -> None:
    """No timer is needed for it: the cell that shows the run ends with it."""
    script.emit(run_started())
    _turn(script, 1)
    script.end("48213")

    assert "done" in output.plain("1")
    assert output.shown[-1] == (f"{RUN}-answer", False)


def test_a_run_without_an_answer_says_why(output: Output, script: Script) -> None:
    """The reason of a stop stands where the answer would."""
    script.emit(run_started())
    script.end("", state="stopped", reason="the run used its 30 turns; raise max_turns")

    assert "stopped without an answer" in output.plain("answer")
    assert "raise max_turns" in output.html("answer")


def test_counts_of_sub_calls_stand_in_the_turn_that_made_them(
    output: Output, script: Script, clock: Clock
) -> None:
    """Done, running and failed, of the turn and of its children."""
    script.emit(run_started())
    script.turn(1, "x")
    for index in range(3):
        script.emit(SubcallStarted(call_id=f"c{index}", kind="llm", prompt="p", model="m", turn=1))
    script.emit(SubcallEnded(call_id="c0", ok=True))
    script.emit(SubcallEnded(call_id="c1", ok=False, error="timed out"))
    clock.advance(1)

    assert "1 done, 1 running, 1 failed" in output.plain("1")
    assert "1 done, 1 running, 1 failed" in output.plain("")


def test_calls_that_are_others_than_were_asked_for_say_why(
    output: Output, script: Script, clock: Clock
) -> None:
    """Once for each reason, with their number; those of child runs too."""
    script.emit(run_started())
    script.turn(1, "x")
    call = SubcallStarted(call_id="c", kind="rlm", prompt="p", model="m", turn=1)
    script.emit(call)
    script.emit(run_started(parent_run_id=RUN, parent_call_id="c", depth=1), "cccccccccccc")
    for number in range(3):
        plain = SubcallStarted(
            call_id=f"d{number}", kind="llm", prompt="p", model="m", turn=1, note="a plain call"
        )
        script.emit(plain, "cccccccccccc" if number else "")
    clock.advance(1)

    assert "3 sub-calls: a plain call" in output.plain("1")
    assert output.html("1").count("a plain call") == 1


def test_calls_that_were_refused_with_their_batches_are_one_line(
    output: Output, script: Script, clock: Clock
) -> None:
    """However many batches a cell makes, each with another number of calls."""
    script.emit(run_started())
    script.turn(1, "x")
    for number in range(1, 1200, 7):
        note = f"a plain call; refused together with {number:,} more calls of its batch"
        script.emit(
            SubcallStarted(
                call_id=f"c{number}", kind="llm", prompt="p", model="m", turn=1, note=note
            )
        )
    clock.advance(1)

    expected = "172 sub-calls: a plain call; refused together with more calls of its batch"
    assert expected in output.plain("1")
    assert output.plain("1").count("refused together") == 1


def test_a_sub_task_tells_how_many_replies_were_unfit(
    output: Output, script: Script, clock: Clock
) -> None:
    """By name and with the rate; a sub-task whose replies all fit is no news."""
    script.emit(run_started())
    script.turn(1, "x")
    for index, task in enumerate(["year", "year", "year", "place"]):
        call = f"c{index}"
        params = SubcallParams(task=task)
        script.emit(
            SubcallStarted(call_id=call, kind="llm", prompt="p", model="m", turn=1, params=params)
        )
        script.emit(SubcallEnded(call_id=call, ok=True))
        script.emit(SubcallJudged(call_id=call, task=task, ok=index != 1))
    clock.advance(1)

    assert "sub-task year: 3 replies, 1 unfit (33%)" in output.plain("1")
    assert "place" not in output.plain("1")


def test_recorded_replies_and_calls_that_were_retried_are_counted(
    output: Output, script: Script, clock: Clock
) -> None:
    script.emit(run_started())
    script.turn(1, "x")
    for index in range(3):
        script.emit(SubcallStarted(call_id=f"c{index}", kind="llm", prompt="p", model="m", turn=1))
    script.emit(SubcallEnded(call_id="c0", ok=True, cached=True, attempts=0))
    script.emit(SubcallEnded(call_id="c1", ok=True, attempts=3))
    script.emit(SubcallEnded(call_id="c2", ok=True))
    clock.advance(1)

    assert "3 done, 1 cached, 1 retried" in output.plain("1")


def test_a_cell_that_waited_tells_both_times(output: Output, script: Script, clock: Clock) -> None:
    """Its own and that of its sub-calls."""
    script.emit(run_started())
    script.turn(1, "x")
    result = CellResult(ok=True, execution_count=1, seconds=9.25, waited_s=9.0)
    script.emit(TurnExecuted(turn=1, result=result))
    clock.advance(1)

    assert "cell 9.2 s, waiting 9.0 s" in output.plain("1")


def test_child_runs_have_no_displays(output: Output, script: Script, clock: Clock) -> None:
    """Their events change counts only."""
    script.emit(run_started())
    script.turn(1, "x")
    script.emit(SubcallStarted(call_id="c", kind="rlm", prompt="p", model="m", turn=1))
    script.emit(run_started(parent_run_id=RUN, parent_call_id="c", depth=1), "cccccccccccc")
    clock.advance(1)

    assert list(output.bundles) == [RUN, f"{RUN}-1"]


def test_a_waiting_proposal_says_so(output: Output, script: Script, clock: Clock) -> None:
    """A person sees that it is their turn."""
    script.emit(run_started())
    script.ask(1)
    script.propose("x = 1")
    script.emit(RunPaused(turn=1))
    clock.advance(1)

    assert "waiting for a decision" in output.plain("1")
    assert "waiting for a decision" in output.html("")


def test_errors_and_rejected_answers_are_seen(output: Output, script: Script, clock: Clock) -> None:
    """The header names the exception; remarks stand in the turn."""
    script.emit(run_started())
    script.turn(1, "1/0")
    error = ErrorOutput("ZeroDivisionError", "division by zero", [])
    script.emit(TurnExecuted(turn=1, result=CellResult(ok=False, execution_count=1, error=error)))
    script.emit(AnswerRejected(turn=1, reason="the cell that set it ended with ZeroDivisionError"))
    clock.advance(1)

    assert "raised ZeroDivisionError" in output.plain("1")
    assert "the cell that set it" in output.html("1")


def test_terminal_colours_do_not_reach_the_output(
    output: Output, script: Script, clock: Clock
) -> None:
    """ANSI sequences of a traceback are taken out of the observation."""
    script.emit(run_started())
    script.turn(1, "x")
    script.emit(TurnObserved(turn=1, observation="\x1b[0;31mZeroDivisionError\x1b[0m: division"))
    clock.advance(1)

    assert "ZeroDivisionError: division" in output.html("1")
    assert "\x1b" not in output.html("1") + output.plain("1")


def test_pictures_stand_after_their_turn(output: Output, script: Script, clock: Clock) -> None:
    """The same bundle is displayed, once; outputs that are only text are not."""
    script.emit(run_started())
    text_only = Display({"text/plain": "3"})
    result = CellResult(ok=True, execution_count=3, outputs=[text_only, picture()])
    _turn(script, 1, result)
    clock.advance(1)
    _turn(script, 2)
    script.end()

    names = [RUN, f"{RUN}-1", f"{RUN}-1-1", f"{RUN}-2", f"{RUN}-answer"]
    assert list(output.bundles) == names
    assert output.bundles[f"{RUN}-1-1"] == picture().data
    assert [name for name, _ in output.shown].count(f"{RUN}-1-1") == 1


def test_a_console_sees_each_turn_once_when_it_is_over(output: Output, clock: Clock) -> None:
    """Where updates are not shown, nothing is shown that is not final."""
    view = _view(output, clock, live=False)
    script = Script(view.on_event, clock)
    script.emit(run_started())
    for turn in (1, 2):
        script.turn(turn, "x = 1")
        clock.advance(1)
        script.executed(CellResult(ok=True, execution_count=1, outputs=[picture()]))
        clock.advance(1)
    script.end("48213")

    names = [RUN, f"{RUN}-1", f"{RUN}-1-1", f"{RUN}-2", f"{RUN}-2-1", f"{RUN}-answer"]
    assert [name for name, _ in output.shown] == names
    assert "done" in output.plain("2")


def test_very_long_texts_are_clipped(output: Output, script: Script, clock: Clock) -> None:
    """An output of a notebook stays small; what was cut is said."""
    script.emit(run_started())
    script.turn(1, "x = 1\n" * 200_000)
    clock.advance(1)

    assert len(output.html("1")) < 100_000
    assert "characters are in the record" in output.plain("1")


def test_every_output_is_valid_in_a_notebook(output: Output, script: Script, clock: Clock) -> None:
    """All bundles are display data that nbformat accepts, with a text for consoles."""
    script.emit(run_started())
    _turn(script, 1)
    script.end()
    outputs = [new_output("display_data", data=data) for data in output.bundles.values()]
    nbformat.validate(new_notebook(cells=[new_code_cell("%%rlm", outputs=outputs)]))

    kinds = {"text/html", "text/markdown", "text/plain"}
    assert all(set(data) == kinds for data in output.bundles.values())


class _Elements(HTMLParser):
    """Tags, attributes and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _pages(text: str) -> Iterator[str]:
    """HTML of a run in which *text* stands everywhere that others write."""
    output, clock = Output(), Clock()
    view = InlineView(output.display, text, loop_time=clock.time, call_later=clock.call_later)
    script = Script(view.on_event, clock)
    script.emit(run_started(query=text, root=text, sub=text))
    script.ask(1)
    script.stream(text)
    clock.advance(1)
    yield output.html("1")
    script.propose(text, text)
    script.emit(AnswerRejected(turn=1, reason=text))
    error = ErrorOutput(text, text, [text])
    script.emit(TurnExecuted(turn=1, result=CellResult(ok=False, execution_count=1, error=error)))
    script.emit(TurnObserved(turn=1, observation=text))
    script.end(text)
    yield from (str(bundle["text/html"]) for bundle in output.bundles.values())


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.just(HOSTILE), st.text(st.sampled_from("<>&\"'/=ab \n`;"), min_size=1)))
def test_nothing_that_a_model_wrote_becomes_markup(text: str) -> None:
    """Only our own elements are in the HTML, balanced, without handlers, scripts or links."""
    for html in _pages(text):
        page = _Elements(html)
        assert page.open == []
        assert {tag for tag, _ in page.tags} <= TAGS
        assert all(set(attributes) <= {"style"} for _, attributes in page.tags)


def test_what_a_model_wrote_is_read_as_it_is() -> None:
    """Escaping loses nothing: the text of the page holds the text of the model."""
    pages = [_Elements(html).text for html in _pages(HOSTILE)]

    assert all(HOSTILE in page for page in pages)


def test_markdown_keeps_fences_that_a_cell_contains(
    output: Output, script: Script, clock: Clock
) -> None:
    """Source with a fence in it is fenced by a longer one."""
    script.emit(run_started())
    source = 'text = """\n```\n"""'
    script.turn(1, source)
    clock.advance(1)

    assert f"````python\n{source}\n````" in output.bundles[f"{RUN}-1"]["text/markdown"]
