"""Outputs are stored as a front end stores them."""

from __future__ import annotations

import nbformat
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook

from rlm_kernel.driver.outputs import CellOutputs, Displays, StreamText


def screen(text: str) -> str:
    """What a terminal of endless width would show of *text*, character by character."""
    lines: list[list[str]] = [[]]
    cursor = 0
    for char in text:
        if char == "\n":
            lines.append([])
            cursor = 0
        elif char == "\r":
            cursor = 0
        elif char == "\b":
            cursor = max(cursor - 1, 0)
        else:
            lines[-1][cursor : cursor + 1] = [char]
            cursor += 1
    return "\n".join("".join(line) for line in lines)


@given(st.lists(st.text(alphabet="ab\n\r\b", max_size=6)))
def test_a_stream_shows_what_a_terminal_would(pieces: list[str]) -> None:
    stream = StreamText()
    for piece in pieces:
        stream.write(piece)

    assert stream.text() == screen("".join(pieces))


@given(st.text(alphabet="ab\n\r\b"), st.integers(1, 5))
def test_a_stream_cut_into_pieces_is_the_same(text: str, size: int) -> None:
    whole, pieces = StreamText(), StreamText()
    whole.write(text)
    for at in range(0, len(text), size):
        pieces.write(text[at : at + size])

    assert pieces.text() == whole.text()


def collected(*messages: tuple[str, dict]) -> list[dict]:
    """The outputs that come of *messages*, as valid notebook nodes."""
    outputs = CellOutputs(Displays())
    for kind, content in messages:
        outputs.message(kind, content)
    nodes = outputs.nodes()
    nbformat.validate(new_notebook(cells=[new_code_cell("", outputs=nodes)]))
    return nodes


def stream(text: str, name: str = "stdout") -> tuple[str, dict]:
    return "stream", {"name": name, "text": text}


def shown(text: str, display_id: str = "") -> tuple[str, dict]:
    transient = {"display_id": display_id} if display_id else {}
    return "display_data", {
        "data": {"text/plain": text},
        "metadata": {},
        "transient": transient,
    }


def test_adjacent_texts_of_one_stream_are_one_output() -> None:
    nodes = collected(stream("a"), stream("b"), stream("c", "stderr"), stream("d"))

    assert [(n["name"], n["text"]) for n in nodes] == [
        ("stdout", "ab"),
        ("stderr", "c"),
        ("stdout", "d"),
    ]


def test_a_display_between_two_texts_keeps_them_apart() -> None:
    nodes = collected(stream("a"), shown("x"), stream("b"))

    assert [n["output_type"] for n in nodes] == ["stream", "display_data", "stream"]
    assert [nodes[0]["text"], nodes[2]["text"]] == ["a", "b"]


def test_an_update_changes_the_display_wherever_it_is_shown() -> None:
    displays = Displays()
    first, second = CellOutputs(displays), CellOutputs(displays)
    for outputs in (first, second):
        outputs.message(*shown("old", "the-id"))
    second.message("update_display_data", shown("new", "the-id")[1])

    assert [o.nodes()[0]["data"]["text/plain"] for o in (first, second)] == ["new", "new"]


def test_an_update_of_an_unknown_display_shows_nothing() -> None:
    assert collected(("update_display_data", shown("new", "nowhere")[1])) == []


def test_clear_output_empties_the_cell_at_once() -> None:
    nodes = collected(stream("old"), ("clear_output", {"wait": False}), stream("new"))

    assert [n["text"] for n in nodes] == ["new"]


def test_clear_output_that_waits_keeps_the_old_until_there_is_new() -> None:
    waiting = collected(stream("old"), ("clear_output", {"wait": True}))
    cleared = collected(stream("old"), ("clear_output", {"wait": True}), stream("new"))

    assert [n["text"] for n in waiting] == ["old"]
    assert [n["text"] for n in cleared] == ["new"]


def test_results_and_errors_are_kept_whole() -> None:
    result = {"data": {"text/plain": "1"}, "metadata": {}, "execution_count": 3}
    error = {"ename": "ValueError", "evalue": "no", "traceback": ["a", "b"]}
    nodes = collected(("execute_result", result), ("error", error))

    assert nodes[0]["execution_count"] == 3
    assert (nodes[1]["ename"], nodes[1]["traceback"]) == ("ValueError", ["a", "b"])
