"""How the output of a cell is joined, bounded and kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.repl.output import Collector, Unshowable, plain


def collect(*outputs: Output, limit: int = 1000) -> tuple[Collector, list[Output]]:
    """Give *outputs* to a collector; return it and what it passed on."""
    passed: list[Output] = []
    collector = Collector(passed.append, limit)
    for output in outputs:
        collector.add(output)
    collector.flush()
    return collector, passed


def out(text: str) -> Stream:
    return Stream("stdout", text)


def err(text: str) -> Stream:
    return Stream("stderr", text)


def shown(text: str, display_id: str | None = None, *, update: bool = False) -> Display:
    return Display({"text/plain": text}, {}, display_id, update)


def test_adjacent_texts_of_a_stream_are_one_output() -> None:
    collector, passed = collect(out("a"), out("b"), err("c"), out("d"))

    assert collector.outputs() == passed == [out("ab"), err("c"), out("d")]


def test_texts_passed_on_apart_are_kept_as_one() -> None:
    collector, passed = collect(out("a"))
    collector.add(out("b"))
    collector.flush()

    assert passed == [out("a"), out("b")]
    assert collector.outputs() == [out("ab")]


def test_update_takes_the_place_of_its_display_and_is_passed_on() -> None:
    update = shown("new", "id", update=True)
    collector, passed = collect(shown("old", "id"), out("x"), update)

    assert collector.outputs() == [shown("new", "id"), out("x")]
    assert passed[-1] == update


def test_update_of_a_display_of_another_cell_is_passed_on_and_not_kept() -> None:
    update = shown("new", "elsewhere", update=True)
    collector, passed = collect(update)

    assert passed == [update]
    assert collector.outputs() == []


def test_clear_forgets_at_once_or_with_the_next_output() -> None:
    assert collect(out("a"), Clear())[0].outputs() == []
    assert collect(out("a"), Clear(wait=True))[0].outputs() == [out("a")]
    assert collect(out("a"), Clear(wait=True), out("b"))[0].outputs() == [out("b")]


def test_text_beyond_the_limit_is_cut_and_counted() -> None:
    collector, passed = collect(out("abc"), out("def"), err("ghi"), limit=4)

    assert collector.outputs() == passed == [out("abcd")]
    assert collector.dropped == 5


@pytest.mark.parametrize("more", [out("ef"), shown("x" * 10), out("f")])
def test_limit_is_told_as_soon_as_it_is_reached_where_there_is_no_end_to_tell_it_at(
    more: Output,
) -> None:
    passed: list[Output] = []
    collector = Collector(passed.append, 5, keep=False)
    for output in (out("abcde"), more, more, out("g")):
        collector.add(output)
        collector.flush()

    first, note = passed
    assert first == out("abcde")
    assert isinstance(note, Stream)
    assert "5 characters came after the end of the cell" in note.text


def test_display_beyond_the_limit_is_left_out_whole() -> None:
    collector, passed = collect(shown("x" * 2000), out("y"))

    assert passed == [out("y")]
    assert collector.dropped >= 2000


def test_display_updated_in_place_for_ever_never_reaches_the_limit() -> None:
    updates = [shown("x" * 100, "bar", update=True) for _ in range(100)]
    collector, passed = collect(shown("", "bar"), *updates, out("done"))

    assert len(passed) == 102
    assert collector.dropped == 0


def test_error_is_shown_where_the_limit_is_reached_and_is_bounded_itself() -> None:
    error = ErrorOutput("E", "v" * 10**6, ["t" * 10**6, "u"])
    collector, _ = collect(out("x" * 1000), error)

    last = collector.outputs()[-1]

    assert isinstance(last, ErrorOutput)
    assert len(last.evalue) == len("".join(last.traceback)) == 200_000
    assert collector.has_error()


def test_result_comes_in_its_place() -> None:
    result = Result(1, {"text/plain": "2"})

    assert collect(out("a"), result, out("b"))[0].outputs() == [out("a"), result, out("b")]


def test_display_with_an_id_without_end_is_left_out_and_that_is_said_once() -> None:
    """What a front end and the record keep for a display is its id, too."""
    displays = [shown("x", "i" * size) for size in (1000, 1001, 10**6)]
    _, passed = collect(*displays, *displays)

    assert [output for output in passed if isinstance(output, Display)] == [displays[0]] * 2
    (note,) = [output for output in passed if isinstance(output, Stream)]
    assert "display_id has more than 1,000 characters" in note.text


def test_containers_count_though_they_hold_no_text() -> None:
    empty = [Display({"application/json": [{} for _ in range(100)]}) for _ in range(10)]
    collector, passed = collect(*empty, limit=20_000)

    assert len(passed) == 2
    assert collector.dropped > 50_000


outputs = st.one_of(
    st.builds(Stream, st.sampled_from(["stdout", "stderr"]), st.text(max_size=30)),
    st.builds(shown, st.text(max_size=30), st.none() | st.just("a"), update=st.booleans()),
    st.builds(Clear, st.booleans()),
)


@given(st.lists(outputs, max_size=30), st.integers(0, 100))
def test_what_is_kept_never_exceeds_the_limit(given_outputs: list[Output], limit: int) -> None:
    collector, _ = collect(*given_outputs, limit=limit)

    size = 0
    for output in collector.outputs():
        size += len(output.text) if isinstance(output, Stream) else 0
        size += len(output.data["text/plain"]) if isinstance(output, Display) else 0
    assert size <= limit
    kinds = [o.name if isinstance(o, Stream) else None for o in collector.outputs()]
    assert all(a is None or a != b for a, b in pairwise(kinds))


@given(st.lists(st.text(max_size=20), max_size=20), st.integers(0, 100))
def test_text_within_the_limit_is_whole_and_the_rest_is_counted(
    texts: list[str], limit: int
) -> None:
    collector, passed = collect(*map(out, texts), limit=limit)
    text = "".join(texts)

    assert "".join(o.text for o in passed if isinstance(o, Stream)) == text[:limit]
    assert collector.dropped == max(0, len(text) - limit)


def test_plain_data_is_passed_as_it_is_and_other_data_made_plain() -> None:
    data = {"a": [1, 2.5, None, True, {"b": "c"}]}
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]

    assert plain(data) is data
    assert plain({1: b"\x00", "x": {"y": b""}}) == {"1": "AA==", "x": {"y": ""}}
    with pytest.raises(Unshowable):
        plain(deep)
