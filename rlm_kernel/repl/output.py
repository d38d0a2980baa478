"""Output of one cell on its way up: joined, bounded, in order.

The limit holds here, whatever the worker promises: text from file
descriptors never passes the worker's own count, and a hostile worker does
not count at all.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream

__all__ = [
    "MAX_OUTPUT",
    "Collector",
    "StreamName",
    "Unshowable",
    "bounded_error",
    "plain",
    "weight",
]

MAX_OUTPUT = 10_000_000
"""Characters of output of one cell that are shown and kept, unless asked otherwise."""

_MAX_ENTRIES = 20_000
"""Outputs of one cell that are kept, joined streams counting as one."""

_MAX_ERROR = 200_000
"""Characters of one error. An error is shown even where the limit is reached."""

_MAX_DEPTH = 100

_MAX_ID = 1000
"""Characters of a display's id."""

_CONTAINER, _ITEM = 64, 8
"""Characters that a list or a dict, and a place in one, count as."""

StreamName = Literal["stdout", "stderr"]


class Unshowable(ValueError):
    """Output, or a part of it, that no front end is given; its text says why."""


class Collector:
    """Passes the output of one cell on, and keeps it where asked to.

    Text is held back until `flush`, so that a burst of short lines goes on as one.

    Parameters
    ----------
    forward
        Gets every output within the limit.
    limit
        Characters. Text that a display replaced or a clear removed does not count any more.
    keep
        False where nobody asks for `outputs`, nor at an end for `dropped`: text after the end of
        its cell. A note then tells of the limit as soon as it is reached.
    """

    def __init__(
        self, forward: Callable[[Output], None], limit: int = MAX_OUTPUT, *, keep: bool = True
    ) -> None:
        self._forward = forward
        self._limit = limit
        self._keep = keep
        self._held: list[str] = []
        self._held_name: StreamName = "stdout"
        self._entries: list[_Entry] = []
        self._used = 0
        self._errors = 0
        self._clear_next = False
        self._refused: set[str] = set()
        self.dropped = 0
        """Characters beyond the limit."""

    def text(self, name: StreamName, text: str) -> None:
        """Text of a stream. What is beyond the limit is counted and gone."""
        kept = text[: max(0, self._limit - self._used)]
        if kept:
            if name != self._held_name:
                self.flush()
                self._held_name = name
            self._used += len(kept)
            self._held.append(kept)
        if len(kept) < len(text):
            self._drop(len(text) - len(kept))

    def add(self, output: Output) -> None:
        """Any output, in order."""
        if isinstance(output, Stream):
            self.text(output.name, output.text)
            return
        self.flush()
        if isinstance(output, Clear):
            self._clear(output)
        elif isinstance(output, ErrorOutput):
            self._add_error(bounded_error(output))
        else:
            self._add_rich(output)

    def flush(self) -> None:
        """Pass on the text that is held back."""
        if not self._held:
            return
        text = "".join(self._held)
        self._held.clear()
        self._append(Stream(self._held_name, text), len(text))

    def note(self, text: str) -> None:
        """A line of our own on stderr, limit or not."""
        self.flush()
        self._append(Stream("stderr", text), 0)

    def _drop(self, size: int) -> None:
        if not self.dropped and not self._keep:
            limit = f"{self._limit:,} characters"
            self.note(f"[{limit} came after the end of the cell; the rest is not shown]\n")
        self.dropped += size

    def refuse(self, what: str, why: Unshowable) -> None:
        """Tell that *what* is left out; once for each reason, or the notes would be a flood."""
        if str(why) not in self._refused:
            self._refused.add(str(why))
            self.note(f"[{what} is left out: {why}]\n")

    def outputs(self) -> list[Output]:
        """What a notebook would keep."""
        self.flush()
        return [entry.output() for entry in self._entries]

    def has_error(self) -> bool:
        """Whether an error was passed on."""
        return self._errors > 0

    def _add_error(self, error: ErrorOutput) -> None:
        size = len(error.evalue) + sum(map(len, error.traceback))
        if self._errors and self._used + size > self._limit:
            self._drop(size)
            return
        self._errors += 1
        self._used += size
        self._append(error, size)

    # --- rich output --------------------------------------------------------------------------

    def _add_rich(self, output: Display | Result) -> None:
        try:
            output = _with_plain_data(_with_short_id(output))
        except Unshowable as why:
            self.refuse("an output", why)
            return
        size = _size(output)
        old = self._find(output) if isinstance(output, Display) and output.update else None
        if self._used + size - (old.size if old is not None else 0) > self._limit:
            self._drop(size)
            return
        if isinstance(output, Display) and output.update:
            if old is not None:
                self._used += size - old.size
                old.size = size
                old.first = msgspec.structs.replace(output, update=False)
            self._forward(output)
            return
        self._used += size
        self._append(output, size)

    def _find(self, output: Display) -> _Entry | None:
        for entry in self._entries:
            if isinstance(entry.first, Display) and entry.first.display_id == output.display_id:
                return entry
        return None

    def _clear(self, output: Clear) -> None:
        if output.wait:
            self._clear_next = True
        else:
            self._forget()
        self._forward(output)

    def _forget(self) -> None:
        self._used -= sum(entry.size for entry in self._entries)
        self._entries.clear()
        self._clear_next = False

    def _append(self, output: Output, size: int) -> None:
        if self._clear_next:
            self._forget()
        if not self._keep or (self._entries and self._entries[-1].join(output, size)):
            self._forward(output)
        elif len(self._entries) < _MAX_ENTRIES or (
            isinstance(output, ErrorOutput) and self._errors == 1
        ):
            self._entries.append(_Entry(output, size))
            self._forward(output)
        else:
            self._used -= size
            self._drop(size)


class _Entry:
    """One kept output; for a stream, its first piece and the rest of its text."""

    __slots__ = ("first", "rest", "size")

    def __init__(self, first: Output, size: int) -> None:
        self.first = first
        self.rest: list[str] = []
        self.size = size

    def join(self, output: Output, size: int) -> bool:
        """Take *output* up where it goes on the same stream."""
        first = self.first
        if isinstance(first, Stream) and isinstance(output, Stream) and first.name == output.name:
            self.rest.append(output.text)
            self.size += size
            return True
        return False

    def output(self) -> Output:
        if isinstance(self.first, Stream) and self.rest:
            return Stream(self.first.name, self.first.text + "".join(self.rest))
        return self.first


def bounded_error(error: ErrorOutput) -> ErrorOutput:
    """Return *error* with at most `_MAX_ERROR` characters in each of its parts."""
    traceback, room = [], _MAX_ERROR
    for line in error.traceback:
        if room <= 0:
            break
        traceback.append(line[:room])
        room -= len(line) + 1
    return ErrorOutput(error.ename[:1000], error.evalue[:_MAX_ERROR], traceback)


def _with_short_id(output: Display | Result) -> Display | Result:
    if isinstance(output, Display) and output.display_id and len(output.display_id) > _MAX_ID:
        raise Unshowable(f"its display_id has more than {_MAX_ID:,} characters")
    return output


def _with_plain_data(output: Display | Result) -> Display | Result:
    data, metadata = plain(output.data), plain(output.metadata)
    if data is output.data and metadata is output.metadata:
        return output
    return msgspec.structs.replace(output, data=data, metadata=metadata)


def plain(value: Any) -> Any:
    """Return *value* if it is of JSON types throughout, else the nearest that is.

    Raises
    ------
    Unshowable
        It is nested too deeply.
    """
    return value if _is_plain(value) else _as_plain(value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if value is None or isinstance(value, (str, bool, int, float)):
        return True
    if depth > _MAX_DEPTH:
        raise Unshowable(f"its data is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        return all(type(k) is str and _is_plain(v, depth + 1) for k, v in value.items())
    return isinstance(value, list) and all(_is_plain(item, depth + 1) for item in value)


def _as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def _size(output: Display | Result) -> int:
    """Characters of it, about: as many as its texts have where it holds nothing else."""
    parts = (output.data, output.metadata)
    return sum(len(key) + weight(item) for part in parts for key, item in part.items())


def weight(value: Any) -> int:
    """What a value of JSON types counts as, in characters.

    Containers count for the memory that they take, or empty ones would be free.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return _CONTAINER + sum(_ITEM + len(key) + weight(item) for key, item in value.items())
    if isinstance(value, list):
        return _CONTAINER + sum(_ITEM + weight(item) for item in value)
    return _ITEM
