"""Progress of sub-calls in a cell: one bar, in place, that leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.driver.outputs import CellOutputs, Displays
from rlm_kernel.driver.progress_bar import Tally, bar_bundle, is_bar, tally_in, tally_words
from rlm_kernel.errors import SubcallError
from rlm_kernel.kernel import _as_message
from rlm_kernel.session.cell_view import CellView
from rlm_kernel.session.progress import INTERVAL_S, BatchProgress, Progress
from rlm_kernel.subcalls.scheduling.batch import Outcome
from tests.driver.parties import Clock

CELL = 7


class Page:
    """A cell of a front end with progress in it: what it was sent, and what it shows of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sent: list[Output] = []
        self.outputs = CellOutputs(Displays())
        self.view = CellView(self._publish)
        self.progress = Progress(self.clock.time, self.clock.call_later)
        self.progress.watch(CELL, self.view)

    def _publish(self, output: Output) -> None:
        self.sent.append(output)
        self.outputs.message(*_as_message(output))

    def begin(self, calls: int) -> BatchProgress:
        return self.progress.begin(CELL, calls)

    def seconds(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def nodes(self) -> list[dict[str, Any]]:
        return self.outputs.nodes()

    def bars(self) -> list[Tally | None]:
        """What the bars say that are there; ``None`` for an empty one."""
        return [
            tally_in(node["metadata"]) for node in self.nodes() if is_bar(node.get("metadata", {}))
        ]

    @property
    def tally(self) -> Tally:
        """What the only bar says."""
        (tally,) = self.bars()
        assert tally is not None
        return tally


@pytest.fixture
def page() -> Page:
    return Page()


def ended(calls: int, *, failed: int = 0, cached: int = 0) -> list[Outcome]:
    return [
        Outcome(
            index=index,
            call_id=f"c-{index}",
            error=SubcallError("no") if index < failed else None,
            cached=index >= calls - cached,
        )
        for index in range(calls)
    ]


def said(tally: Tally) -> str:
    return " · ".join(tally_words(tally))


# --- when -------------------------------------------------------------------------------------


def test_a_batch_that_is_done_at_once_shows_nothing(page: Page) -> None:
    page.begin(500).done(ended(500))
    page.seconds(60)

    assert page.sent == []


def test_a_batch_shows_one_bar_that_is_updated_in_place(page: Page) -> None:
    batch = page.begin(40)
    for _ in range(10):
        page.seconds(0.5)
        batch.done(ended(2))
    page.seconds(0.5)

    assert (page.tally.done, page.tally.calls) == (20, 40)
    first, *more = page.sent
    assert isinstance(first, Display)
    assert not first.update
    assert more
    assert all(
        isinstance(output, Display) and output.update and output.display_id == first.display_id
        for output in more
    )


def test_a_single_call_is_given_more_time(page: Page) -> None:
    page.begin(1)
    page.seconds(1.9)
    assert page.sent == []
    page.seconds(0.3)
    assert (page.tally.done, page.tally.calls) == (0, 1)


def test_updates_are_as_many_for_ten_thousand_calls_as_for_ten(page: Page) -> None:
    def updates(calls: int) -> int:
        before = len(page.sent)
        batch = page.begin(calls)
        for outcome in ended(calls):
            batch.done([outcome])
            page.seconds(10 / calls)
        page.seconds(5)
        return len(page.sent) - before

    few, many = updates(100), updates(10_000)
    assert few <= many <= 10 / INTERVAL_S + 2


def test_a_bar_that_did_not_change_is_not_sent_again(page: Page) -> None:
    batch = page.begin(2)
    batch.done(ended(1, cached=1))
    page.seconds(30.4)
    sent = len(page.sent)
    page.seconds(0.2)

    assert len(page.sent) == sent


# --- what -------------------------------------------------------------------------------------


def test_all_batches_of_a_cell_are_one_bar(page: Page) -> None:
    first, second = page.begin(30), page.begin(70)
    first.done(ended(10, failed=2))
    second.done(ended(20, cached=5))
    page.seconds(1)

    tally = page.tally
    assert (tally.done, tally.calls, tally.failed, tally.cached) == (30, 100, 2, 5)


def test_calls_that_were_taken_back_are_not_counted(page: Page) -> None:
    kept, refused = page.begin(10), page.begin(90)
    refused.end()
    refused.end()
    kept.done(ended(3))
    page.seconds(1)

    assert (page.tally.done, page.tally.calls) == (3, 10)


def test_rate_and_what_is_left_follow_the_last_seconds(page: Page) -> None:
    """What came from a cache at once says nothing of how it goes on."""
    batch = page.begin(1000)
    batch.done(ended(500, cached=500))
    for _ in range(30):
        page.seconds(1)
        batch.done(ended(10))

    assert page.tally.rate == pytest.approx(10, rel=0.1)
    assert page.tally.seconds_left == pytest.approx(20, rel=0.2)


def test_the_words_of_a_bar() -> None:
    tally = Tally(calls=1000, done=312, failed=4, cached=20, seconds=10, rate=31.2)
    assert said(tally) == "312/1,000 · 4 failed · 20 cached · 31/s · 23 s left"
    assert said(Tally(calls=3, seconds=75.2)) == "0/3 · 1:16 min"
    assert said(Tally(calls=9, done=2, seconds=400, rate=0.005)) == "2/9 · 0.3/min · 23:20 min left"
    assert said(Tally(calls=9, done=9, seconds=4, rate=2)) == "9/9"


@pytest.mark.parametrize(("calls", "done", "full"), [(0, 0, 0), (1, 0, 0), (8, 6, 15), (9, 9, 20)])
def test_a_bar_reads_in_html_and_in_text(calls: int, done: int, full: int) -> None:
    bundle = bar_bundle(Tally(calls=calls, done=done, seconds=1, rate=1))

    assert f'aria-valuenow="{done}"' in bundle["text/html"]
    assert f'aria-valuemax="{calls}"' in bundle["text/html"]
    bar = "█" * full + " " * (20 - full)
    assert bundle["text/plain"].startswith(f"sub-calls ▕{bar}▏ {done}/{calls}")


# --- how it goes ------------------------------------------------------------------------------


def test_a_bar_that_was_alone_leaves_an_empty_cell(page: Page) -> None:
    batch = page.begin(4)
    page.seconds(1)
    batch.done(ended(4))
    page.progress.unwatch(CELL)

    assert page.nodes() == []


def test_a_bar_is_cleared_before_the_first_output_of_its_cell(page: Page) -> None:
    batch = page.begin(4)
    page.seconds(1)
    batch.done(ended(4))
    page.view.output(Stream("stdout", "done\n"))
    page.seconds(10)
    page.progress.unwatch(CELL)

    assert [node["output_type"] for node in page.nodes()] == ["stream"]


def test_a_bar_among_outputs_is_emptied_and_they_stay(page: Page) -> None:
    page.view.output(Stream("stdout", "before\n"))
    batch = page.begin(4)
    page.seconds(1)
    batch.done(ended(4))
    page.view.output(Stream("stdout", "after\n"))
    page.progress.unwatch(CELL)

    texts = [node.get("text", "") or "".join(node["data"].values()) for node in page.nodes()]
    assert texts == ["before\n", "", "after\n"]


def test_an_interrupted_cell_shows_its_error_and_no_bar(page: Page) -> None:
    batch = page.begin(40)
    page.seconds(3)
    batch.end()
    page.view.output(ErrorOutput("KeyboardInterrupt", "", []))
    page.seconds(0.5)
    page.progress.unwatch(CELL)

    assert [node["output_type"] for node in page.nodes()] == ["error"]


def test_a_loop_of_batches_uses_one_output(page: Page) -> None:
    page.view.output(Stream("stdout", "a loop\n"))
    for turn in range(30):
        batch = page.begin(5)
        page.seconds(0.7)
        batch.done(ended(5))
        page.view.output(Stream("stdout", f"{turn}\n"))
        page.seconds(3 if turn % 10 == 9 else 0.1)
    page.progress.unwatch(CELL)

    assert page.bars() == [None]


def test_after_a_pause_the_count_begins_anew(page: Page) -> None:
    page.view.output(Stream("stdout", "a loop\n"))
    for _ in range(2):
        batch = page.begin(5)
        page.seconds(0.8)
        assert (page.tally.done, page.tally.calls) == (0, 5)
        batch.done(ended(5))
        page.seconds(3)
        assert page.bars() == [None]


@pytest.mark.parametrize("wait", [False, True])
def test_a_cell_that_clears_its_output_gets_its_bar_back(page: Page, wait: bool) -> None:
    page.begin(5)
    page.seconds(1)
    page.view.output(Clear(wait))
    page.view.output(Stream("stdout", "fresh\n"))
    page.seconds(1)

    assert page.nodes()[0]["text"] == "fresh\n"
    assert page.tally.calls == 5


def test_a_bar_stays_between_two_batches_of_a_loop(page: Page) -> None:
    for turn in range(1, 4):
        batch = page.begin(5)
        page.seconds(1)
        batch.done(ended(5))
        page.seconds(0.5)
        assert (page.tally.done, page.tally.calls) == (5 * turn, 5 * turn)


def test_what_a_cell_keeps_until_its_next_output_is_not_cleared_by_the_bar(page: Page) -> None:
    page.view.output(Stream("stdout", "old\n"))
    page.view.output(Clear(wait=True))
    batch = page.begin(5)
    page.seconds(5)

    assert [node["text"] for node in page.nodes()] == ["old\n"]
    batch.done(ended(5))


def test_a_line_that_goes_on_is_not_cut_in_two(page: Page) -> None:
    """Such as that of tqdm around a loop of sub-calls."""
    page.view.output(Stream("stderr", "\r 0%"))
    for percent in (10, 20):
        batch = page.begin(5)
        page.seconds(3)
        batch.done(ended(5))
        page.view.output(Stream("stderr", f"\r{percent}%"))

    assert [node["text"] for node in page.nodes()] == ["20%"]


def test_what_a_person_typed_is_not_cleared(page: Page) -> None:
    batch = page.begin(5)
    page.seconds(1)
    page.view.touched()
    batch.done(ended(5))
    page.seconds(5)

    assert Clear(wait=False) not in page.sent
    assert page.bars() == [None]


def test_a_cell_that_is_over_shows_no_bar(page: Page) -> None:
    """A thread or a task of its may go on; so may one of a cell that nobody looked at."""
    page.begin(5)
    page.seconds(1)
    page.progress.unwatch(CELL)
    sent = len(page.sent)
    late, other = page.begin(5), page.progress.begin(CELL + 1, 5)
    page.seconds(5)
    late.done(ended(5))
    other.end()
    page.seconds(5)

    assert len(page.sent) == sent
    assert page.nodes() == []


def test_a_cell_cannot_pass_its_own_output_off_as_a_bar(page: Page) -> None:
    """Who stores notebooks leaves bars out."""
    forged = {"rlm": {"progress": {}}, "isolated": True}
    page.view.output(Display({"text/plain": "mine"}, forged))
    page.view.output(Result(1, {"text/plain": "mine"}, forged))

    assert page.bars() == []
    assert [node["metadata"] for node in page.nodes()] == [{"isolated": True}] * 2


SHOWN = st.sampled_from(
    [
        Stream("stdout", "out\n"),
        Stream("stderr", "\rerr"),
        Stream("stderr", "err"),
        Display({"text/plain": "a display"}, {}, "theirs"),
        Display({"text/plain": "changed"}, {}, "theirs", update=True),
        Result(1, {"text/plain": "a result"}),
        Clear(),
        Clear(wait=True),
        ErrorOutput("E", "e", []),
    ]
)
STEPS = st.lists(
    SHOWN | st.floats(0.1, 4) | st.integers(1, 9) | st.sampled_from(["done", "end"]), max_size=40
)


@given(STEPS)
def test_a_cell_is_left_as_if_there_had_been_no_bar(steps: list[Output | float | str]) -> None:
    page, without = Page(), CellOutputs(Displays())
    batches: list[tuple[BatchProgress, int]] = []
    for step in steps:
        match step:
            case int():
                batches.append((page.begin(step), step))
            case float():
                page.seconds(step)
            case "done" | "end":
                for batch, calls in batches:
                    batch.done(ended(calls)) if step == "done" else batch.end()
                batches.clear()
            case output:
                assert not isinstance(output, str)
                page.view.output(output)
                without.message(*_as_message(output))
    page.progress.unwatch(CELL)

    assert all(tally is None for tally in page.bars())
    own = [node for node in page.nodes() if not is_bar(node.get("metadata", {}))]
    assert joined(own) == joined(without.nodes())


def joined(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """*nodes* with the texts of one stream in one output, as they are where nothing is between."""
    outputs = CellOutputs(Displays())
    for node in nodes:
        content = {"name": node.get("name"), "text": node.get("text"), **node}
        outputs.message(node["output_type"], content)
    return outputs.nodes()
