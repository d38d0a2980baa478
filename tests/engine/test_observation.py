"""An observation is bounded, whatever the cell did, and says what it leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.cells import (
    CellResult,
    Clear,
    Display,
    ErrorOutput,
    Output,
    Result,
    Stream,
    Variable,
)
from rlm_kernel.engine.observation import MIN_CHARS, clip, observe, plain


def cell(*outputs: Output, **more: object) -> CellResult:
    return CellResult(ok=True, execution_count=3, outputs=list(outputs), **more)  # type: ignore[arg-type]


def value(text: str) -> Result:
    return Result(3, {"text/plain": text})


def test_output_value_variables_and_time_are_shown() -> None:
    result = cell(
        Stream("stdout", "hello\n"),
        value("'x'"),
        variables=[Variable("hits", "list", 580, "new"), Variable("n", "int", None, "changed")],
        seconds=2.31,
        waited_s=2.0,
    )
    assert observe(result, 1000) == (
        "hello\nOut[3]: 'x'\nVariables: hits: list[580] (new); n: int\n(2.3 s, 2.0 s of it waiting)"
    )


@pytest.mark.parametrize("text", ["0", "[]", "False", "''", "{}"])
def test_falsy_values_are_shown(text: str) -> None:
    assert f"Out[3]: {text}" in observe(cell(value(text)), 1000)


def test_a_trailing_value_does_not_hide_what_was_printed() -> None:
    shown = observe(cell(Stream("stdout", "printed\n"), value("5")), 1000)
    assert shown.startswith("printed\nOut[3]: 5")


def test_output_that_looks_like_an_error_is_just_output() -> None:
    shown = observe(cell(Stream("stdout", "[Error] disk\nError: none\n")), 1000)
    assert shown == "[Error] disk\nError: none\n(0.0 s)"


def test_a_cell_that_shows_nothing_says_so() -> None:
    assert observe(cell(), 1000).startswith("(The cell showed nothing.)")


def test_head_and_tail_of_long_output_stay_with_the_length_of_the_rest() -> None:
    text = "".join(f"line {n}\n" for n in range(10_000))
    shown = observe(cell(Stream("stdout", text)), 1000)

    assert len(shown) <= 1000
    assert shown.startswith("line 0\n")
    assert "line 9999" in shown
    head, _, rest = shown.partition("\n… ")
    left_out, _, tail = rest.partition(" characters left out …\n")
    kept = len(head) + len(tail.removesuffix("\n(0.0 s)"))
    assert int(left_out.replace(",", "")) == len(text.rstrip("\n")) - kept


def test_output_that_the_repl_dropped_counts_as_left_out() -> None:
    shown = observe(cell(Stream("stdout", "abc"), dropped_chars=1_000_000_000), 1000)
    assert "abc\n… 1,000,000,000 characters left out …" in shown


def test_an_error_is_its_last_lines_without_colours() -> None:
    lines = [f"\x1b[31mframe {n}\x1b[0m" for n in range(100)]
    error = ErrorOutput("KeyError", "'x'", [*lines, "\x1b[1mKeyError\x1b[0m: 'x'"])
    result = CellResult(ok=False, execution_count=1, outputs=[error], error=error)
    shown = observe(result, 2000)

    assert "frame 99\nKeyError: 'x'" in shown
    assert "frame 2\n" not in shown
    assert "\x1b" not in shown
    assert shown.count("KeyError") == 1


def test_an_error_is_named_however_long_its_traceback_is() -> None:
    error = ErrorOutput("ValueError", "bad", ["x" * 50_000])
    result = CellResult(ok=False, execution_count=1, error=error)
    assert "ValueError: bad" in observe(result, MIN_CHARS)


def test_an_error_with_a_whole_prompt_in_its_message_stays_bounded() -> None:
    error = ErrorOutput("KeyError", "P" * 1_000_000, ["KeyError: " + "P" * 1_000_000])
    result = CellResult(ok=False, execution_count=1, error=error)
    shown = observe(result, 1000)

    assert len(shown) <= 1000
    assert "KeyError" in shown


def test_displays_are_shown_as_text_and_updates_in_their_place() -> None:
    shown = observe(
        cell(
            Display({"text/plain": "1/3"}, display_id="bar"),
            Stream("stdout", "after\n"),
            Display({"text/plain": "3/3"}, display_id="bar", update=True),
            Display({"image/png": "iVBOR"}),
        ),
        1000,
    )
    assert shown.startswith("3/3\nafter\n[shown as image/png]\n")


def test_cleared_output_is_not_shown() -> None:
    assert observe(cell(Stream("stdout", "old\n"), Clear()), 1000).startswith("(The cell showed")
    shown = observe(
        cell(Stream("stdout", "old\n"), Clear(wait=True), Stream("stdout", "new")), 1000
    )
    assert shown.startswith("new\n")


def test_a_line_that_is_rewritten_counts_once() -> None:
    assert plain("1%\r50%\r100%\ndone\r\n") == "100%\ndone\n"


def test_what_happened_to_the_repl_is_told() -> None:
    shown = observe(
        cell(restored=["P", "sub_RLM"], worker_lost="killed by SIGSEGV"), 1000, ["Note well."]
    )
    assert "Put back, because they belong to the REPL: P, sub_RLM" in shown
    assert "The REPL's process ended (killed by SIGSEGV)" in shown
    assert "Note well." in shown


def test_more_variables_than_fit_are_counted() -> None:
    many = [Variable(f"name_{n}", "int") for n in range(1000)]
    shown = observe(cell(variables=many), 600)
    names, _, more = shown.partition(" and ")

    assert int(more.split(" ")[0]) + names.count("name_") == 1000


def test_a_bound_that_cannot_hold_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 400"):
        observe(cell(), 10)


TEXTS = st.text(max_size=50).flatmap(
    lambda text: st.integers(0, 4000).map(lambda n: text * n if len(text) * n < 30_000 else text)
)
BUNDLES = st.dictionaries(st.sampled_from(["text/plain", "image/png", "text/html"]), TEXTS)
OUTPUTS = st.one_of(
    st.builds(Stream, st.sampled_from(["stdout", "stderr"]), TEXTS),
    st.builds(Display, BUNDLES, st.just({}), st.none() | st.just("d"), st.booleans()),
    st.builds(Result, st.integers(1, 10**9), BUNDLES),
    st.builds(Clear, st.booleans()),
)
ERRORS = st.builds(ErrorOutput, TEXTS, TEXTS, st.lists(TEXTS, max_size=3))
RESULTS = st.builds(
    CellResult,
    ok=st.booleans(),
    execution_count=st.integers(1, 10**9),
    outputs=st.lists(OUTPUTS, max_size=5),
    dropped_chars=st.integers(0, 10**12),
    error=st.none() | ERRORS,
    variables=st.lists(st.builds(Variable, TEXTS, TEXTS, st.none() | st.integers(0)), max_size=20),
    restored=st.lists(TEXTS, max_size=5),
    seconds=st.floats(0, 1e9),
    waited_s=st.floats(0, 1e9),
    worker_lost=TEXTS,
)


@given(RESULTS, st.integers(MIN_CHARS, 9000), st.lists(TEXTS, max_size=4))
def test_no_observation_is_longer_than_its_bound(
    result: CellResult, limit: int, notes: list[str]
) -> None:
    assert len(observe(result, limit, notes)) <= limit


@given(TEXTS, st.integers(0, 3000), st.integers(0, 10**9))
def test_a_clipped_text_fits_and_keeps_its_ends(text: str, limit: int, dropped: int) -> None:
    shown = clip(text, limit, dropped)
    head, _, rest = shown.partition("\n… ")

    assert len(shown) <= limit
    assert text.startswith(head)
    if not dropped and rest:
        assert text.endswith(rest.partition(" characters left out …\n")[2])
