"""Fenced code is found by the rules of CommonMark, while it streams in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlm_kernel.engine.fences import Fence, FenceReader, fence_for, read_fence


def source(text: str) -> str | None:
    fence = read_fence(text)
    return None if fence is None else fence.source


@pytest.mark.parametrize(
    "info",
    ["repl", "python", "Python", "PY", "python3", "ipython", "{python}", "{.python #a}", "py x=1"],
)
def test_info_words_of_code_are_accepted_in_any_case(info: str) -> None:
    assert source(f"Look:\n\n```{info}\nx = 1\n```\n") == "x = 1"


@pytest.mark.parametrize("info", ["json", "text", "bash", "pycon", "repl2", "output"])
def test_other_info_words_are_prose(info: str) -> None:
    assert source(f"```{info}\nx = f(1)\n```\n") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~~~repl\nx = 1\n~~~", "x = 1"),
        ("````repl\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
        ("```repl\nx = 1\n`````", "x = 1"),
        ("```repl\nx = 1\n~~~\ny = 2\n```", "x = 1\n~~~\ny = 2"),
        ("```repl\nx = 1\n```   \nmore", "x = 1"),
        ("```repl\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2"),
        ("~~~repl `a`\nx = 1\n~~~", "x = 1"),
    ],
    ids=["tildes", "longer", "longer close", "other char", "trailing space", "crlf", "tick info"],
)
def test_fences_open_and_close_as_in_commonmark(text: str, expected: str) -> None:
    assert source(text) == expected


@pytest.mark.parametrize("spaces", [0, 1, 2, 3])
def test_up_to_three_spaces_of_indentation_belong_to_the_fence(spaces: int) -> None:
    pad = " " * spaces
    text = f"{pad}```repl\n{pad}if x:\n{pad}    y()\n{pad}```"
    assert source(text) == "if x:\n    y()"


def test_four_spaces_are_no_fence_outside_of_a_list() -> None:
    assert source("    ```repl\n    x = f()\n    ```") is None


@pytest.mark.parametrize(
    "text",
    [
        "1. First\n\n   ```python\n   x = f()\n   ```\n",
        "10. First\n\n    ```python\n    x = f()\n    ```\n",
        "- ```python\n  x = f()\n  ```\n",
        "- First\n  ```python\n  x = f()\n```\n",
    ],
    ids=["item", "wide item", "in the item's line", "closed at the margin"],
)
def test_fences_in_list_items_are_found(text: str) -> None:
    assert source(text) == "x = f()"


def test_a_block_that_is_never_closed_runs_to_the_end() -> None:
    fence = read_fence("Now:\n```repl\nx = 1\ny = 2")

    assert fence is not None
    assert (fence.source, fence.closed) == ("x = 1\ny = 2", False)


def test_a_fence_inside_a_string_does_not_end_the_cell() -> None:
    code = 'note = """\n```json\n{}\n```\n"""\nprint(note)'
    assert source(f"```repl\n{code}\n```\nDone.") == code


def test_a_fence_inside_an_f_string_with_quotes_does_not_end_the_cell() -> None:
    code = "p = f'''Quote \"it\" \\''' and\n```\n{x['a']}\n```\n'''\nsub_RLM(p)"
    assert source(f"```repl\n{code}\n```") == code


def test_a_quote_in_a_comment_or_a_magic_opens_no_string() -> None:
    for line in ['# it\'s """ here', '!echo don\'t """', "%timeit '''", 's = \'don"""t\'']:
        assert source(f'```repl\n{line}\n```\nprose ```\n"""\n```') == line


def test_a_lone_closing_fence_at_the_end_closes_a_string_that_never_ends() -> None:
    fence = read_fence('```repl\nx = """never\n```\n')

    assert fence is not None
    assert (fence.source, fence.closed) == ('x = """never', True)


def test_the_prose_after_a_string_that_never_ends_is_not_code() -> None:
    assert source("```repl\nx = '''never\n```\nThe output is:\n```\n5\n```\n") == "x = '''never"


@pytest.mark.parametrize("tag", ["think", "thinking", "THINK"])
def test_code_that_was_only_thought_is_no_cell(tag: str) -> None:
    text = f"<{tag}>\nMaybe\n```repl\nbad()\n```\n</{tag}>\n```repl\ngood()\n```"
    assert source(text) == "good()"
    assert source(f"<{tag}>\n```repl\nbad()\n```\n") is None
    assert source(f"<{tag}>a</{tag}>```repl\ngood()\n```") == "good()"


def test_thoughts_without_their_opening_tag_are_no_prose() -> None:
    reader = FenceReader()
    reader.feed("I wonder.\n</think>\n\nLook:\n```repl\nx()\n```\n")
    assert reader.prose == "Look:"


def test_a_think_tag_inside_the_cell_is_code() -> None:
    assert source("```repl\nx = '<think>'\n```") == "x = '<think>'"


def test_an_empty_block_is_no_code_and_the_next_one_counts() -> None:
    assert source("```repl\n\n```\n") is None
    assert source("```repl\n```\nThen\n```repl\nx()\n```") == "x()"


@pytest.mark.parametrize(
    "sample", ["The answer is 5", "42", "[1, 'a']", "total: 42", "Mon -3", "2026-01-31", "# a", ""]
)
def test_sample_output_in_a_bare_fence_is_no_code(sample: str) -> None:
    assert source(f"It shows:\n```\n{sample}\n```\n") is None


@pytest.mark.parametrize(
    "code", ["print(P[:9])", "x = 1", "%time f()", "!ls", "await f()", "Final = 3"]
)
def test_python_in_a_bare_fence_is_code(code: str) -> None:
    assert source(f"Look:\n```\n{code}\n```\n") == code


def test_the_first_of_several_blocks_counts_and_the_prose_is_what_stands_before() -> None:
    reader = FenceReader()
    text = "Compare\n```json\n{}\n```\nthen:\n\n```repl\na()\n```\nand\n```repl\nb()\n```"
    fence = reader.feed(text)

    assert fence is not None
    assert fence.source == "a()"
    assert reader.prose == "Compare\n```json\n{}\n```\nthen:\n"[:-1]
    assert text[: fence.end].endswith("a()\n```")


def test_a_stream_can_be_cut_as_soon_as_the_fence_is_closed() -> None:
    reader = FenceReader()
    assert reader.feed("Look\n```repl\nx()\n``") is None
    assert reader.feed("`") is None  # it may become ````, or ```x
    fence = reader.feed("\n[output: 5]\n")

    assert fence == Fence(start=5, end=20, info="repl", source="x()", closed=True)


def test_a_cell_is_not_closed_by_a_fence_that_only_begins() -> None:
    reader = FenceReader()
    reader.feed("```repl\nx = '''\n```")
    reader.feed("python\n'''\n```\n")
    assert reader.found is not None
    assert reader.found.source == "x = '''\n```python\n'''"


def test_a_reply_of_fences_in_a_string_takes_no_quadratic_time() -> None:
    """A root that rambles inside a string is looked at a bounded number of times."""
    text = "```repl\nx = '''\n" + "```\n" * 50_000
    fence = read_fence(text)

    assert fence is not None
    assert len(fence.source) < 2_000


FENCES = ["```", "```", "````", "~~~", "repl", "python", "json", "- ", "1. ", "<think>", "</think>"]
CODE = ["'''", '"""', "'", "\\", "#", "x = 1", "print(2)", "a"]
SPACE = ["\n", "\n", "\n", "\n", "\r", "\t", " ", "   "]
PIECES = st.lists(st.sampled_from(FENCES + CODE + SPACE), max_size=30)


def read(text: str, cuts: list[int]) -> tuple[Fence | None, str]:
    reader = FenceReader()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        reader.feed(text[start:end])
    reader.finish()
    return reader.found, reader.prose


@given(PIECES.map("".join), st.data())
def test_how_a_text_is_cut_into_deltas_changes_nothing(text: str, data: st.DataObject) -> None:
    points = st.lists(st.integers(0, len(text)), max_size=8)
    cuts = sorted(data.draw(points))

    assert read(text, cuts) == read(text, [])


@given(PIECES.map("".join))
def test_offsets_lie_in_the_text_and_no_source_is_empty(text: str) -> None:
    fence = read_fence(text)
    if fence is not None:
        assert 0 <= fence.start < fence.end <= len(text)
        assert fence.source.strip()
        assert len(fence.source) <= fence.end - fence.start


@given(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=200))
@example("```\n```")
@example("x = '''")
@example("    indented")
def test_any_source_comes_back_from_a_fence_that_is_longer_than_its_own(code: str) -> None:
    code = code.strip("\n")
    mark = fence_for(code)
    expected = code if code.strip() else None

    assert source(f"Prose.\n\n{mark}repl\n{code}\n{mark}\n") == expected


@given(PIECES.map("".join))
def test_what_is_shown_live_only_grows(text: str) -> None:
    """Source and prose that were shown are never taken back but for thoughts and lost strings."""
    if "</think>" in text:
        return
    reader = FenceReader()
    sources, proses = [""], [""]
    for char in text:
        reader.feed(char)
        if reader.source:
            sources.append(reader.source)
        proses.append(reader.prose)
    for before, after in itertools.pairwise(proses):
        assert after.startswith(before)
    if reader.found is not None:
        assert reader.found.source.startswith(sources[-1])
