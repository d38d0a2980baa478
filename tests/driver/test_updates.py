"""What a client is sent: numbers, rates, gaps, and the tree of sub-calls."""

from __future__ import annotations

from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.driver.hub import Hub
from rlm_kernel.driver.outbox import KEPT, PER_SECOND
from rlm_kernel.driver.protocol import Need, OpenCell, Snapshot
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import (
    RunEnded,
    SubcallEnded,
    SubcallJudged,
    SubcallStarted,
    TurnProposed,
)
from tests.driver.parties import RUN, Clock, FrontEnd, Script, finals, run_started

CHILD = "cccccccccccc"


def test_at_most_thirty_updates_in_any_second(hub: Hub, script: Script, clock: Clock) -> None:
    """A storm of events is joined; nothing of it is lost."""
    sent: list[float] = []
    front = FrontEnd(hub)

    def receive(data: dict[str, Any]) -> None:
        sent.append(clock.now)
        front.receive(data)

    hub.connect("comm", receive, {"op": "open", "client": "page", "can_drive": True})
    script.start(hub)
    for number in range(1, 40):
        script.ask(number)
        source = "".join(f"x{line} = {line}\n" for line in range(20)).strip()
        for piece in f"```python\n{source}\n```\n".split("1"):
            script.stream(piece)
            clock.advance(0.001)
        script.propose(source)
        script.executing(source)
    clock.advance(1)

    busiest = max(sum(1 for at in sent if start <= at < start + 1) for start in sent)
    assert busiest <= PER_SECOND
    assert front.text(f"{RUN}-39") == source


def test_urgent_updates_keep_to_the_limit_too(hub: Hub, front: FrontEnd, clock: Clock) -> None:
    """A client that sends nonsense all the time is answered thirty times a second at most."""
    clock.advance(10)
    front.updates.clear()
    for _ in range(200):
        hub.message("comm", {"op": "nonsense"})
        clock.advance(0.004)

    assert len(front.updates) <= PER_SECOND
    clock.advance(1)
    assert len(front.refusals()) == 200


def test_what_something_waits_for_is_sent_at_once(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """The end of a run does not wait for the next interval."""
    script.start(hub)
    clock.advance(1)
    script.ask(1)
    script.stream("hm")
    assert front.states[-1].state == "proposing"
    script.end("48213")

    assert finals(front)


def test_the_memory_of_kept_updates_is_bounded(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """After very many nodes, an old gap is closed by a snapshot and not from memory."""
    script.start(hub)
    script.turn(1, "x")
    for index in range(60_000):
        script.emit(SubcallStarted(call_id=f"c{index}", kind="llm", prompt="", model="m", turn=1))
    clock.advance(10)
    snapshots = len(front.all(Snapshot))
    assert front.updates[-1].seq < KEPT
    front.say(Need(from_seq=2))
    clock.advance(10)

    assert len(front.all(Snapshot)) == snapshots + 1
    assert len(front.nodes) == 60_000


def test_the_first_after_a_silence_is_sent_at_once(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """No timer has to pass before a turn begins to appear."""
    script.start(hub)
    clock.advance(1)
    script.ask(1)

    assert front.states[-1].state == "proposing"


def test_ten_thousand_sub_calls_are_a_few_messages(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Nodes are told in batches with their last state, and none is missing."""
    script.start(hub)
    script.turn(1, "sub_RLM(parts)")
    clock.advance(1)
    before = len(front.updates)
    for index in range(10_000):
        script.emit(SubcallStarted(call_id=f"c{index}", kind="llm", prompt="p", model="m", turn=1))
    for index in range(10_000):
        script.emit(SubcallEnded(call_id=f"c{index}", ok=index % 10 > 0))
    clock.advance(1)

    assert len(front.updates) - before <= 10
    assert len(front.nodes) == 10_000
    assert {node.state for node in front.nodes.values()} == {"done", "failed"}
    state = front.states[-1]
    assert (state.subcalls_done, state.subcalls_running, state.subcalls_failed) == (9000, 0, 1000)


@pytest.mark.parametrize("run_id", [RUN, CHILD])
def test_a_node_tells_of_what_its_call_was_part_and_what_became_of_it(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock, run_id: str
) -> None:
    """Its sub-task and the verdict on its reply, the requests, whether the record had it."""
    script.start(hub)
    script.turn(1, "rlm_query(part)")
    script.emit(SubcallStarted(call_id="c", kind="rlm", prompt="p", model="m", turn=1))
    script.emit(run_started(depth=1, parent_run_id=RUN, parent_call_id="c"), CHILD)
    for call in ("c1", "c2"):
        params = SubcallParams(task="year")
        started = SubcallStarted(
            call_id=call, kind="llm", prompt="q", model="m", turn=1, params=params
        )
        script.emit(started, run_id)
    script.emit(SubcallEnded(call_id="c1", ok=True, attempts=2), run_id)
    script.emit(SubcallEnded(call_id="c2", ok=True, attempts=0, cached=True), run_id)
    clock.advance(1)
    assert [front.nodes[call].verdict for call in ("c1", "c2")] == ["", ""]
    script.emit(SubcallJudged(call_id="c1", task="year", ok=False, reason="is no number"), run_id)
    script.emit(SubcallJudged(call_id="c2", task="year", ok=True), run_id)
    clock.advance(1)

    first, second = front.nodes["c1"], front.nodes["c2"]
    assert (first.task, first.verdict, first.attempts, first.cached) == ("year", "unfit", 2, False)
    assert (second.task, second.verdict, second.attempts, second.cached) == ("year", "ok", 0, True)


def test_a_gap_is_closed_by_repeating(hub: Hub, script: Script, clock: Clock) -> None:
    """A lost update is asked for by number and comes again, with the same number."""
    front = FrontEnd(hub, lose=lambda count: count == 3).open()
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    clock.advance(1)
    script.stream("b = 2\n")
    clock.advance(1)
    assert front.outgoing
    assert isinstance(front.outgoing[0], Need)
    front.speak()
    clock.advance(1)

    assert front.text(f"{RUN}-1").startswith("a = 1\nb = 2")
    assert len(front.all(Snapshot)) == 1


def test_too_wide_a_gap_is_closed_by_a_snapshot(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Updates that are not kept any more are not needed: the snapshot holds all."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\n")
    for number in range(KEPT + 10):
        script.stream(f"x{number} = 1\n")
        clock.advance(0.1)
    source = front.text(f"{RUN}-1")
    front.cells = [front.cells[0]]
    front.say(Need(from_seq=2))
    clock.advance(1)

    assert front.text(f"{RUN}-1") == source


def test_needing_what_is_not_sent_yet_is_nothing(front: FrontEnd, clock: Clock) -> None:
    """A number in the future is answered with nothing."""
    front.say(Need(from_seq=1000))
    clock.advance(1)

    assert len(front.updates) == 1


def test_nothing_is_sent_after_the_close(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """A comm that was closed in the middle of a turn gets no message any more."""
    script.start(hub)
    script.ask(1)
    script.stream("```python\na = 1\n")
    hub.disconnect("comm")
    seen = len(front.updates)
    script.stream("b = 2\n")
    script.end()
    clock.advance(10)

    assert len(front.updates) == seen


def test_a_child_run_has_nodes_and_no_cells(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Turns of a child run are not shown as cells; its calls count, and tell their parent."""
    script.start(hub)
    script.turn(1, "rlm_query(part)")
    script.emit(SubcallStarted(call_id="c1", kind="rlm", prompt="p", model="m", turn=1))
    script.emit(run_started(depth=1, parent_run_id=RUN, parent_call_id="c1"), CHILD)
    script.emit(
        TurnProposed(turn=1, reply="", prose="", source="x", usage=Usage(input_tokens=7)), CHILD
    )
    script.emit(SubcallStarted(call_id="c2", kind="llm", prompt="q", model="m", turn=1), CHILD)
    script.emit(SubcallEnded(call_id="c2", ok=True, usage=Usage(output_tokens=5)), CHILD)
    script.emit(RunEnded(state="answered", response="child"), CHILD)
    ended = SubcallEnded(call_id="c1", ok=True, usage=Usage(output_tokens=12), child_run_id=CHILD)
    script.emit(ended)
    clock.advance(1)

    assert [op.cell_id for op in front.all(OpenCell)] == [f"{RUN}-1"]
    assert front.nodes["c1"].run_id == front.nodes["c2"].parent == CHILD
    assert front.states[-1].subcalls_done == 2
    assert front.states[-1].usage.tokens == 110 + 7 + 5
    assert finals(front) == []


def test_events_of_other_runs_are_ignored(
    hub: Hub, front: FrontEnd, script: Script, clock: Clock
) -> None:
    """Calls of a person's cell outside any run, and runs nobody attached, show nothing."""
    script.start(hub)
    clock.advance(1)
    before = len(front.updates)
    script.emit(SubcallStarted(call_id="c", kind="llm", prompt="p", model="m"), "person")
    script.emit(run_started(), "dddddddddddd")
    clock.advance(1)

    assert len(front.updates) == before


def test_a_late_client_is_told_the_whole_tree(
    hub: Hub, script: Script, clock: Clock, front: FrontEnd
) -> None:
    """Nodes that were told before it came are told to it."""
    script.start(hub)
    script.turn(1, "x")
    for index in range(5000):
        script.emit(SubcallStarted(call_id=f"c{index}", kind="llm", prompt="p", model="m", turn=1))
    clock.advance(1)
    panel = FrontEnd(hub, "panel").open("panel", can_drive=False)
    clock.advance(1)

    assert len(panel.nodes) == 5000
    assert panel.states[-1].subcalls_running == 5000
