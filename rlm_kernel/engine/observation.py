"""What the root is shown of a cell: its result as text of a bounded length.

Pure functions. The record and the notebook keep the whole output; this is the
only place where something is left out for the root, and it always says how
much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from rlm_kernel.text import without_ansi

__all__ = ["MIN_CHARS", "clip", "observe", "plain"]

MIN_CHARS = 400
"""The smallest bound that leaves room for every part."""

ERROR_LINES = 14


def observe(result: CellResult, limit: int, notes: Iterable[str] = ()) -> str:
    """*result* as text for the root, of at most *limit* characters.

    Output and displays come first, in order, as head and tail with the length
    of what is left out; then the value of a trailing expression, the error,
    the variables that changed and what happened to the REPL. *notes* are
    further paragraphs for the root.

    Raises
    ------
    ValueError
        *limit* is below `MIN_CHARS`.
    """
    if limit < MIN_CHARS:
        raise ValueError(f"an observation needs at least {MIN_CHARS} characters, not {limit}")
    parts = [clip(note, limit // 8) for note in notes if note]
    parts = [*_about_repl(result, limit), *parts]
    shown = _shown(result, limit)
    room = limit - sum(len(part) + 1 for part in (*shown, *parts))
    output = clip(_output(result.outputs), max(room, 0), result.dropped_chars)
    if not output and not shown:
        output = "(The cell showed nothing.)"
    return clip("\n".join(part for part in (output, *shown, *parts) if part), limit)


def clip(text: str, limit: int, dropped: int = 0) -> str:
    """Head and tail of *text*, and between them how much is left out: *limit* characters in all.

    *dropped* is the length of what was lost before, after the end of *text*.
    """
    if len(text) <= limit and not dropped:
        return text
    longest = _gap(len(text) + dropped)
    room = limit - len(longest)
    if room < 0:
        return text[:limit]
    if dropped and len(text) <= room:
        return text + _gap(dropped)
    # What was dropped stood at the end: a tail of the rest would look like the end and is not.
    tail = 0 if dropped else room // 3
    head = min(room - tail, len(text))
    return text[:head] + _gap(len(text) - head - tail + dropped) + text[len(text) - tail :]


def plain(text: str) -> str:
    """*text* as a terminal would leave it: no ANSI sequences, lines rewritten by ``\\r`` once."""
    text = without_ansi(text).replace("\r\n", "\n")
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))


def _gap(length: int) -> str:
    return f"\n… {length:,} characters left out …\n"


def _output(outputs: Sequence[Output]) -> str:
    """Streams and displays in order. A display is its text, or the names of its types."""
    texts: list[str] = []
    places: dict[str, int] = {}
    clear = False
    for output in outputs:
        if isinstance(output, Clear):
            clear = True
            if not output.wait:
                texts, places = [], {}
        elif isinstance(output, Stream | Display):
            if clear:
                texts, places, clear = [], {}, False
            _place(output, texts, places)
    return plain("".join(texts)).rstrip("\n")


def _place(output: Stream | Display, texts: list[str], places: dict[str, int]) -> None:
    if isinstance(output, Stream):
        texts.append(output.text)
        return
    text = _bundle(output.data) + "\n"
    if output.update and output.display_id in places:
        texts[places[output.display_id]] = text
        return
    if output.display_id is not None:
        places[output.display_id] = len(texts)
    texts.append(text)


def _bundle(data: dict[str, object]) -> str:
    text = data.get("text/plain")
    others = [kind for kind in data if kind != "text/plain"]
    if isinstance(text, str) and text:
        return text
    return f"[shown as {', '.join(others)}]" if others else ""


def _shown(result: CellResult, limit: int) -> list[str]:
    """Value and error."""
    parts = [
        clip(f"Out[{output.execution_count}]: {plain(_bundle(output.data))}", limit // 4)
        for output in result.outputs
        if isinstance(output, Result)
    ][-1:]
    if result.error is not None:
        parts.append(_error(result.error, limit // 4))
    return parts


def _error(error: ErrorOutput, limit: int) -> str:
    """The last lines of a traceback. The line that names the error is always among them."""
    name = plain(f"{error.ename}: {error.evalue}".rstrip(": "))
    lines = plain("\n".join(error.traceback)).rstrip().split("\n")
    text = "\n".join(lines[-ERROR_LINES:])
    if name.split("\n")[-1] not in text:
        text = f"{text}\n{name}".lstrip("\n")
    if len(text) <= limit:
        return text
    name = clip(name, limit // 2)
    room = limit - len(name) - 3
    return f"…{text[len(text) - room :]}\n{name}" if room > 80 else name


def _about_repl(result: CellResult, limit: int) -> list[str]:
    parts: list[str] = []
    if result.variables:
        parts.append(_variables(result.variables, limit // 6))
    if result.restored:
        names = clip(", ".join(result.restored), limit // 16)
        parts.append(f"Put back, because they belong to the REPL: {names}")
    if result.worker_lost:
        why = clip(result.worker_lost, limit // 8)
        parts.append(
            f"The REPL's process ended ({why}). "
            "A new one has the prompt, but none of your variables."
        )
    parts.append(_time(result))
    return parts


def _variables(variables: Sequence[Variable], limit: int) -> str:
    line = "Variables:"
    for count, variable in enumerate(variables):
        part = f" {clip(_variable(variable), 80)};"
        if len(line) + len(part) > limit - 20:
            return f"{line} and {len(variables) - count} more"
        line += part
    return line.rstrip(";")


def _variable(variable: Variable) -> str:
    if variable.change == "deleted":
        return f"{variable.name} deleted"
    size = "" if variable.size is None else f"[{variable.size:,}]"
    new = " (new)" if variable.change == "new" else ""
    return f"{variable.name}: {variable.type}{size}{new}"


def _time(result: CellResult) -> str:
    waited = f", {result.waited_s:.1f} s of it waiting" if result.waited_s >= 0.05 else ""
    return f"({result.seconds:.1f} s{waited})"
