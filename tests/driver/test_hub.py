"""Clients of the hub: who drives, what is refused, and how what was lost is made good."""

from __future__ import annotations

from typing import Any

import pytest

from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.protocol import (
    Accepted,
    Decide,
    Edited,
    Open,
    Pause,
    Resume,
    Snapshot,
    Stop,
    source_sha,
)
from tests.driver.parties import RUN, Clock, FrontEnd, Script, finals


def test_opening_is_answered_where_there_is_no_run(front: FrontEnd) -> None:
    """A front end learns at once that its comm works."""
    assert [(update.seq, update.ops) for update in front.updates] == [(1, [])]


def test_a_comm_may_say_who_it_is_later(hub: Hub) -> None:
    """Without data in the comm_open, the client waits for its `open`."""
    front = FrontEnd(hub)
    hub.connect("comm", front.receive, {})
    assert not hub.has_driver

    front.say(Open(client="page", can_drive=True))

    assert hub.has_driver


def test_the_first_that_can_drive_drives(hub: Hub, script: Script, clock: Clock) -> None:
    """Cells go to one client; states go to all."""
    panel = FrontEnd(hub, "a").open("panel", can_drive=False)
    first = FrontEnd(hub, "b").open("first")
    second = FrontEnd(hub, "c").open("second")
    script.start(hub)
    script.turn(1, "x = 1")
    clock.advance(1)

    assert first.text(f"{RUN}-1") == "x = 1"
    assert panel.ids() == second.ids() == ["start"]
    assert [op.driving for op in first.all(Snapshot)] == [True]
    assert [op.driving for op in panel.all(Snapshot) + second.all(Snapshot)] == [False, False]
    assert panel.states[-1].state == second.states[-1].state == "executing"


def test_after_the_driver_closed_the_next_one_drives(
    hub: Hub, script: Script, clock: Clock
) -> None:
    """It is told all cells so far, and gets those that follow."""
    FrontEnd(hub, "a").open("first")
    second = FrontEnd(hub, "b").open("second")
    script.start(hub)
    script.turn(1, "x = 1")
    hub.disconnect("a")
    script.turn(2, "y = 2")
    clock.advance(1)

    assert second.ids() == ["start", f"{RUN}-1", f"{RUN}-2"]
    assert hub.has_driver


def test_a_reloaded_page_takes_its_own_place(hub: Hub, script: Script, clock: Clock) -> None:
    """A page that opens again under its name drives, though its old comm was never closed."""
    old = FrontEnd(hub, "a").open("page")
    script.start(hub)
    script.turn(1, "x = 1")
    clock.advance(1)
    new = FrontEnd(hub, "b").open("page")
    script.turn(2, "y = 2")
    clock.advance(1)

    assert new.ids() == ["start", f"{RUN}-1", f"{RUN}-2"]
    assert f"{RUN}-2" not in old.ids()


def test_a_reload_in_the_middle_of_a_reply_goes_on_where_it_was(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """The snapshot holds the text so far, and the deltas continue from there."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    clock.advance(1)
    hub.disconnect("comm")
    script.stream("b = 2\n")
    again = FrontEnd(hub, "again").open("page")
    script.stream("c = 3\n")
    clock.advance(1)

    assert again.text(f"{RUN}-1").startswith("a = 1\nb = 2\nc = 3")
    assert again.outgoing == []


def test_the_snapshot_keeps_a_persons_text(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """What a person made of a cell is what a reloaded page shows."""
    script.start(hub)
    script.ask(1)
    script.propose("a = 1", wait=True)
    clock.advance(1)
    front.say(Edited(cell_id=f"{RUN}-1", source="a = 5"))
    again = FrontEnd(hub, "again").open("page")
    clock.advance(1)

    assert again.text(f"{RUN}-1") == "a = 5"


def test_the_end_is_told_to_a_driver_that_was_away(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A run that ended while no front end was there is told when one comes, and only once."""
    script.start(hub)
    script.turn(1, "x = 1")
    clock.advance(1)
    hub.disconnect("comm")
    script.end("48213")
    late = FrontEnd(hub, "late").open("page")
    clock.advance(1)
    assert late.ids() == ["start", f"{RUN}-1"]
    assert [final.response for final in finals(late)] == ["48213"]

    hub.disconnect("late")
    later = FrontEnd(hub, "later").open("page")

    assert later.ops == []


def test_a_run_that_began_without_a_driver_stays_out_of_the_notebook(
    hub: Hub, script: Script, clock: Clock
) -> None:
    """It is shown in the output of its cell; a driver that comes later gets no cells of it."""
    driven = script.start(hub)
    script.turn(1, "x = 1")
    front = FrontEnd(hub).open()
    script.turn(2, "y = 2")
    script.ask(3)
    script.propose("z = 3", "Nothing of this was streamed.")
    clock.advance(1)

    assert driven is False
    assert front.ids() == ["start"]
    assert front.states[-1].turn == 3


@pytest.mark.parametrize(
    "data",
    [
        None,
        7,
        "open",
        [],
        {},
        {"op": "no such"},
        {"op": "decide", "turn": "one", "action": "run"},
        {"op": "decide", "turn": 1, "action": "explode"},
        {"op": "need"},
        {"op": ["open"]},
        {"client": "x", "can_drive": True},
    ],
)
def test_a_malformed_message_is_refused(hub: Hub, front: FrontEnd, clock: Clock, data: Any) -> None:
    """It never raises, and the client is told in one sentence."""
    hub.message("comm", data)
    clock.advance(1)

    (reason,) = front.refusals()
    assert "could not be read" in reason
    assert hub.has_driver


def test_malformed_data_of_the_comm_open_is_refused(hub: Hub, clock: Clock) -> None:
    """Also the first message is checked, and what follows can still be right."""
    front = FrontEnd(hub)
    hub.connect("comm", front.receive, {"op": "open", "client": 3})
    clock.advance(1)
    assert len(front.refusals()) == 1

    front.say(Open(client="page", can_drive=True))

    assert hub.has_driver


def test_another_version_is_refused_and_does_not_drive(hub: Hub, clock: Clock) -> None:
    """The sentence names both versions."""
    front = FrontEnd(hub)
    hub.connect("comm", front.receive, {})
    front.say(Open(client="page", can_drive=True, schema=99))
    clock.advance(1)

    assert "99" in front.refusals()[0]
    assert not hub.has_driver


def test_a_client_must_open_first(hub: Hub, clock: Clock) -> None:
    """A request on a comm that has not said who it is is refused."""
    front = FrontEnd(hub)
    hub.connect("comm", front.receive, {})
    front.say(Pause())

    assert "open" in front.refusals()[0]


def test_messages_of_an_unknown_comm_are_ignored(hub: Hub) -> None:
    """A message that crosses with the close of its comm does no harm."""
    hub.message("never", {"op": "pause"})
    hub.disconnect("never")


@pytest.mark.parametrize("request_", [Pause(), Resume(), Stop(), Decide(turn=1, action="run")])
def test_requests_without_a_run_are_refused(front: FrontEnd, clock: Clock, request_: Any) -> None:
    """The sentence says how a run is started."""
    front.say(request_)
    clock.advance(1)

    assert front.refusals() == ["no run is under way; start one with %%rlm"]


def test_pause_resume_and_stop_reach_the_run(hub: Hub, front: FrontEnd, script: Script) -> None:
    """Each is passed on; the reason of a stop names who asked."""
    script.start(hub)
    front.say(Pause())
    front.say(Resume())
    front.say(Stop())

    assert script.control.asked == ["pause", "resume", "stop: stopped by page"]


def test_a_viewer_may_decide(hub: Hub, front: FrontEnd, script: Script) -> None:
    """The panel, which does not drive, decides about the waiting proposal."""
    panel = FrontEnd(hub, "panel").open("panel", can_drive=False)
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    panel.say(Decide(turn=1, action="regenerate", note="shorter"))

    (decision,) = script.control.decisions
    assert (decision.action, decision.by, decision.note) == ("regenerate", "panel", "shorter")


def test_a_decision_about_another_turn_is_refused(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A button that was pressed too late decides nothing."""
    script.start(hub)
    script.ask(2)
    script.propose("x = 1", wait=True)
    front.say(Decide(turn=1, action="run"))
    clock.advance(1)

    assert "turn 2 does" in front.refusals()[0]
    assert script.control.decisions == []


def test_a_decision_where_nothing_waits_is_refused(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """The sentence says what to do to be asked."""
    script.start(hub)
    script.ask(1)
    front.say(Decide(turn=1, action="run"))
    clock.advance(1)

    assert "pause" in front.refusals()[0]


def test_an_edit_needs_its_source(hub: Hub, front: FrontEnd, script: Script, clock: Clock) -> None:
    """An edit without a text is refused, and the proposal still waits."""
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    front.say(Decide(turn=1, action="edit"))
    clock.advance(1)

    assert "source" in front.refusals()[0]
    assert script.control.proposal is not None


def test_run_means_the_text_that_the_person_sees(hub: Hub, front: FrontEnd, script: Script) -> None:
    """Deciding 'run' about a cell that was edited runs what the person wrote."""
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 2"))
    front.say(Decide(turn=1, action="run"))

    (decision,) = script.control.decisions
    assert (decision.action, decision.source) == ("edit", "x = 2")


def test_an_edit_that_was_taken_back_is_none(hub: Hub, front: FrontEnd, script: Script) -> None:
    """Undo in the front end makes the cell the model's again."""
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 2"))
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 1"))
    front.say(Decide(turn=1, action="run"))

    (decision,) = script.control.decisions
    assert (decision.action, decision.source) == ("run", None)


def test_resume_runs_what_a_person_edited(hub: Hub, front: FrontEnd, script: Script) -> None:
    """Letting the run go on with an edited proposal runs the person's text."""
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 2"))
    front.say(Resume())

    assert [decision.source for decision in script.control.decisions] == ["x = 2"]
    assert script.control.asked == ["resume"]


def test_typing_into_the_cell_that_is_written_pauses_the_run(
    hub: Hub, front: FrontEnd, script: Script
) -> None:
    """The run waits for the person, and goes on as before once they executed the cell."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\nx = 1\n")
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 5"))
    front.say(Edited(cell_id=f"{RUN}-1", source="x = 56"))
    assert script.control.asked == ["pause"]

    script.propose("x = 1", wait=True)
    script.decided("edit", "x = 56", by="page")
    script.executing("x = 56")

    assert script.control.asked == ["pause", "resume"]


def test_a_hash_that_is_not_of_its_source_is_refused(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """An `accepted` with a wrong hash is answered with what to do."""
    script.start(hub)
    script.turn(1, "x = 1")
    front.say(Accepted(cell_id=f"{RUN}-1", source="x = 1", sha=source_sha("other")))
    clock.advance(1)

    assert "hash" in front.refusals()[0]


def test_only_the_driver_speaks_of_cells(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A second window cannot make a cell a person's that stands in the first one."""
    other = FrontEnd(hub, "other").open("other")
    script.start(hub)
    script.ask(1)
    script.propose("x = 1", wait=True)
    other.say(Edited(cell_id=f"{RUN}-1", source="y"))
    front.say(Decide(turn=1, action="run"))
    clock.advance(1)

    assert "another front end" in other.refusals()[0]
    assert [decision.action for decision in script.control.decisions] == ["run"]
