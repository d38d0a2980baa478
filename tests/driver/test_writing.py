"""How replies become cells, as a front end sees them."""

from __future__ import annotations

from itertools import groupby, pairwise

import msgspec
import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.protocol import CloseCell, Delta, Edited, OpenCell, State
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import ReplyWithoutCode
from rlm_kernel.engine.fences import fence_for
from tests.driver.parties import RUN, Cell, Clock, FrontEnd, Script, finals


def test_prose_and_code_stand_in_two_cells_after_the_one_that_started_the_run(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Prose becomes a markdown cell and code a code cell, in order, turn after turn."""
    script.start(hub)
    script.turn(1, "n = len(P)", "I look at the size.")
    script.turn(2, "print(n)")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1-p", f"{RUN}-1", f"{RUN}-2"]
    assert [cell.kind for cell in front.cells] == ["code", "markdown", "code", "code"]
    assert front.text(f"{RUN}-1-p") == "I look at the size."
    assert front.text(f"{RUN}-1") == "n = len(P)"
    assert front.text(f"{RUN}-2") == "print(n)"


def test_cell_ids_are_valid_in_a_notebook(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """nbformat accepts the ids of all cells that a run makes."""
    script.start(hub)
    script.turn(1234, "1", "prose")
    clock.advance(1)

    makers = {"code": new_code_cell, "markdown": new_markdown_cell}
    cells = [makers[cell.kind](cell.source, id=cell.cell_id) for cell in front.cells]
    nbformat.validate(new_notebook(cells=cells))


def test_text_appears_while_the_reply_comes_in(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Lines of prose and code are in their cells before the reply has ended."""
    script.start(hub)
    script.ask(1)
    script.stream("First I look.\n", "```python\n", "a = 1\nb =")
    clock.advance(1)

    assert front.text(f"{RUN}-1-p") == "First I look."
    assert front.text(f"{RUN}-1").startswith("a = 1")
    assert front.all(CloseCell) == []


def test_the_proposal_corrects_what_was_streamed(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Where the live guess was wrong, cells hold what was proposed once it is known."""
    script.start(hub)
    script.ask(1)
    script.stream("So:\n```python\nwrong = 1\n```\nmore")
    script.propose("right = 2", "Other prose.")
    clock.advance(1)

    assert front.text(f"{RUN}-1-p") == "Other prose."
    assert front.text(f"{RUN}-1") == "right = 2"


def test_prose_that_turns_out_empty_leaves_no_cell(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A prose cell that was streamed and is not part of the proposal is removed."""
    script.start(hub)
    script.ask(1)
    script.stream("hm\n```python\nx = 1\n```\n")
    script.propose("x = 1", "")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1"]


def test_prose_that_is_known_late_stands_before_its_code(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A prose cell opened after the code cell of its turn is inserted before it."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nx = 1\n```\n")
    clock.advance(1)
    script.propose("x = 1", "Said at the end.")
    script.turn(2, "y = 2")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1-p", f"{RUN}-1", f"{RUN}-2"]


def test_thoughts_are_not_streamed_as_code(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A fence inside <think> opens no code cell."""
    script.start(hub)
    script.ask(1)
    script.stream("<think>\n```python\nrm = 1\n```\n</think>\nNow.\n")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1-p"]


def test_prose_that_turns_out_a_thought_is_not_mixed_with_what_follows(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Some servers send thoughts without their opening tag: the cell waits for the close."""
    script.start(hub)
    script.ask(1)
    script.stream("Let me think, it may be 7.\n")
    clock.advance(1)
    script.stream("</think>\nI look at the size of P and then at its beginning.\n")
    clock.advance(1)
    assert front.text(f"{RUN}-1-p") == "Let me think, it may be 7."
    script.propose("n = len(P)", "I look at the size of P and then at its beginning.")
    clock.advance(1)

    assert front.text(f"{RUN}-1-p") == "I look at the size of P and then at its beginning."
    assert front.outgoing == []


def test_a_regenerated_proposal_takes_the_place_of_the_first(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """The first attempt's cells are taken back and the same ids are written anew."""
    script.start(hub)
    script.ask(1)
    script.stream("One.\n```python\nfirst = 1\n```\n")
    script.propose("first = 1", "One.")
    script.decided("regenerate", by="page")
    clock.advance(1)
    script.ask(1, attempt=2)
    clock.advance(1)
    assert front.ids() == ["start"]
    script.stream("```python\nsecond = 2\n```\n", attempt=2)
    script.propose("second = 2")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1"]
    assert front.text(f"{RUN}-1") == "second = 2"


def test_a_cell_that_a_person_changed_survives_a_regeneration(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """The person's cell keeps its text; the next attempt is written into another cell."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nfirst = 1\n```\n")
    script.propose("first = 1", wait=True)
    clock.advance(1)
    _edit(front, f"{RUN}-1", "mine = 0")
    script.decided("regenerate", by="page")
    script.ask(1, attempt=2)
    script.stream("```python\nsecond = 2\n```\n", attempt=2)
    script.propose("second = 2")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1", f"{RUN}-1-2"]
    assert front.text(f"{RUN}-1") == "mine = 0"
    assert front.text(f"{RUN}-1-2") == "second = 2"


def test_a_skipped_proposal_is_removed(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Skipping takes back what the model added; the next turn follows the cell before."""
    script.start(hub)
    script.ask(1)
    script.stream("Prose.\n```python\nbad = 1\n```\n")
    script.propose("bad = 1", "Prose.")
    script.decided("skip", by="page")
    script.turn(2, "good = 1")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-2"]


def test_an_edit_replaces_the_source(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """An edit that came with a decision is what stands in the cell."""
    script.start(hub)
    script.ask(1)
    script.propose("a = 1")
    script.decided("edit", "a = 2", by="panel")
    script.executing("a = 2")
    clock.advance(1)

    assert front.text(f"{RUN}-1") == "a = 2"


def test_a_reply_without_code_stays_until_the_root_is_asked_again(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """It is shown as prose, and taken back by the next attempt of the turn."""
    script.start(hub)
    script.ask(1)
    script.stream("The answer is 42.")
    script.emit(ReplyWithoutCode(turn=1, reply="The answer is 42.", usage=Usage()))
    clock.advance(1)
    assert front.text(f"{RUN}-1-p") == "The answer is 42."

    script.ask(1, attempt=2)
    script.stream("```python\nFinal = 42\n```\n", attempt=2)
    script.propose("Final = 42")
    clock.advance(1)

    assert front.ids() == ["start", f"{RUN}-1"]


def test_a_reply_that_is_cut_by_the_end_keeps_its_text(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A run that is stopped in the middle of a reply closes the cells as they are."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nhalf = 1\nother = ")
    script.end(state="stopped", reason="stopped by page", response="")
    clock.advance(1)

    assert front.text(f"{RUN}-1").startswith("half = 1")
    assert [op.cell_id for op in front.all(CloseCell)] == [f"{RUN}-1"]
    assert finals(front)[0].reason == "stopped by page"


def test_a_persons_text_is_never_overwritten(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A person who types into the cell that is written keeps their text, and gets no deltas."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    clock.advance(1)
    _edit(front, f"{RUN}-1", "a = 100")
    deltas = len(front.all(Delta))
    script.stream("b = 2\nc = 3\n```\n")
    script.propose("a = 1\nb = 2\nc = 3")
    clock.advance(1)

    assert front.text(f"{RUN}-1") == "a = 100"
    assert len(front.all(Delta)) == deltas


def test_a_conflict_is_mended_with_what_is_missing(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A front end that lost text gets it from where it is, without a snapshot."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    clock.advance(1)
    cell = front.cell(f"{RUN}-1")
    assert cell is not None
    cell.source = "a ="  # lost in the front end, not typed
    script.stream("b = 2\n")
    clock.advance(1)
    front.speak()
    clock.advance(1)

    assert front.text(f"{RUN}-1") == "a = 1\nb = 2"


def test_a_front_end_that_always_conflicts_is_not_answered_for_ever(
    hub: Hub, script: Script, clock: Clock, front: FrontEnd
) -> None:
    """Conflicts about a cell end the repetition of its text; the close still comes."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    clock.advance(1)
    before = len(front.updates)
    for _ in range(50):
        hub.message("comm", {"op": "conflict", "cell_id": f"{RUN}-1", "have": 0})
        clock.advance(0.1)
    script.propose("a = 1")
    clock.advance(1)

    assert len(front.updates) - before < 10
    assert front.text(f"{RUN}-1") == "a = 1"


def test_states_tell_every_change_in_order(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """However fast a turn passes, each state of it is told."""
    script.start(hub)
    script.turn(1, "x")
    clock.advance(1)

    shown = [state for state, _ in groupby(state.state for state in front.states)]
    assert shown == ["idle", "proposing", "proposed", "executing"]
    assert front.states[-1].cell_id == f"{RUN}-1"


def test_the_state_carries_what_was_used(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Usage, budget and specs are in the state."""
    script.start(hub)
    script.turn(1, "x")
    clock.advance(1)

    last = front.states[-1]
    assert last.usage.tokens == 110
    assert last.root.startswith("openai:")
    assert last.budget is not None


def test_the_end_is_told_with_the_answer_and_the_record(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Final holds the response, the usage of the whole tree and where the record lies."""
    script.start(hub)
    script.turn(1, "x")
    script.end("48213")
    clock.advance(1)

    (final,) = finals(front)
    assert (final.state, final.response, final.record) == ("answered", "48213", "run.rlm.sqlite")
    assert final.usage.tokens == 1100


def test_two_runs_write_cells_of_their_own(hub: Hub, front: FrontEnd, clock: Clock) -> None:
    """A second run in the same notebook opens other cells; the first one's stay."""
    for run_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        script = Script(hub.on_event, clock, run_id)
        script.start(hub)
        script.turn(1, f"run = '{run_id}'")
        script.end(run_id)
        clock.advance(1)

    assert {"aaaaaaaaaaaa-1", "bbbbbbbbbbbb-1"} <= set(front.ids())
    assert [final.response for final in finals(front)] == ["aaaaaaaaaaaa", "bbbbbbbbbbbb"]


def _edit(front: FrontEnd, cell_id: str, source: str) -> None:
    """A person types into a cell."""
    cell = front.cell(cell_id)
    assert cell is not None
    cell.source, cell.person = source, True
    front.say(Edited(cell_id=cell_id, source=source))


TEXTS = st.text(st.sampled_from("ab =1\n`~#é😀<>'\""), max_size=60)


@st.composite
def attempts(draw: st.DrawFn) -> list[tuple[str, str, list[int]]]:
    """Prose and source of the attempts of one turn, and where the stream of each is cut."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        prose, source = draw(TEXTS).strip(), draw(TEXTS).strip("\n") or "pass"
        cuts = draw(st.lists(st.integers(0, 150), max_size=8))
        made.append((prose, source, sorted(cuts)))
    return made


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(attempts(), min_size=1, max_size=3),
    lost=st.sets(st.integers(1, 40), max_size=10),
    pauses=st.lists(st.floats(0, 0.1), min_size=1, max_size=5),
)
def test_front_end_and_proposal_agree_whatever_was_streamed_or_lost(
    turns: list[list[tuple[str, str, list[int]]]], lost: set[int], pauses: list[float]
) -> None:
    """Any stream, cut anywhere, with any updates lost on the way, ends with the proposal."""
    clock = Clock()
    hub = Hub(clock.time, clock.call_later)
    front = FrontEnd(hub, lose=lambda count: count in lost).open()
    script = Script(hub.on_event, clock)
    script.start(hub)
    expected: list[tuple[str, str]] = []
    for number, made in enumerate(turns, 1):
        for attempt, (prose, source, cuts) in enumerate(made, 1):
            script.ask(number, attempt)
            for piece in _pieces(prose, source, cuts):
                script.stream(piece, attempt=attempt)
                clock.advance(pauses[number % len(pauses)])
                front.speak()
            script.propose(source, prose)
        script.decided()
        script.executing(source)
        expected += [("markdown", prose)] * bool(prose) + [("code", source)]
    script.end()
    for _ in range(30):  # what was lost is asked for again, until all is there
        clock.advance(1)
        front.speak()
        hub.message("comm", {"op": "need", "from_seq": front._expected})

    assert [(cell.kind, cell.source) for cell in front.cells[1:]] == expected
    assert front.refusals() == []


def _pieces(prose: str, source: str, cuts: list[int]) -> list[str]:
    mark = fence_for(f"{prose}{source}")
    reply = f"{prose}\n{mark}repl\n{source}\n{mark}\n"
    places = [0, *(min(cut, len(reply)) for cut in cuts), len(reply)]
    return [reply[a:b] for a, b in pairwise(places) if a < b]


def test_what_is_sent_is_json(hub: Hub, front: FrontEnd, script: Script, clock: Clock) -> None:
    """Every update survives JSON, and decodes into the types of the protocol."""
    script.start(hub)
    script.turn(1, "x = '😀'", "prose")
    script.end()
    clock.advance(1)

    for update in front.updates:
        assert msgspec.json.decode(msgspec.json.encode(update), type=type(update)) == update
    assert front.all(OpenCell)
    assert front.all(State)


@pytest.mark.parametrize("late_prose", [True, False])
def test_a_snapshot_tells_where_cells_stand(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock, late_prose: bool
) -> None:
    """Also after prose came late or was taken away, no cell lands at the notebook's end."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nx = 1\n```\n" if late_prose else "hm\n```python\nx = 1\n```\n")
    script.propose("x = 1", "Said late." if late_prose else "")
    clock.advance(1)
    hub.disconnect("comm")
    late = FrontEnd(hub, "late")
    late.cells.append(Cell("mine", "code"))
    late.open("page")
    clock.advance(1)

    prose = [f"{RUN}-1-p"] if late_prose else []
    assert late.ids() == ["start", *prose, f"{RUN}-1", "mine"]


@pytest.mark.parametrize("turn", [1, 2])
def test_a_snapshot_keeps_the_order_of_cells(
    hub: Hub, script: Script, clock: Clock, front: FrontEnd, turn: int
) -> None:
    """A front end that begins with an empty notebook gets the cells in the order of turns."""
    script.start(hub)
    for number in range(1, turn + 1):
        script.turn(number, f"x = {number}", f"prose {number}")
    clock.advance(1)
    hub.disconnect("comm")
    late = FrontEnd(hub, "late").open("late")
    clock.advance(1)

    assert late.ids() == front.ids()
