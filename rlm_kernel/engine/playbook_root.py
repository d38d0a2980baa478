"""A root that proposes cells from a list, a generator or a file: for teaching, demos and tests.

Nothing of a playbook file is executed here. It is split into cells, which are
proposed like those of any root and run in the REPL.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from rlm_kernel.engine.fences import fence_for
from rlm_kernel.engine.root_protocol import Message, RootStream, TextStream
from rlm_kernel.errors import NoAnswer, RootError, UsageError
from rlm_kernel.prices import Price

__all__ = ["PlaybookCell", "PlaybookRoot", "read_playbook"]

PIECE_CHARS = 48
"""Of a delta, where nothing is paced."""

PIECES_PER_SECOND = 30

_MARKER = re.compile(r"#\s*%%(?P<rest>.*)")
_MARKDOWN = re.compile(r"\s*\[(?:markdown|md)\]", re.IGNORECASE)


class PlaybookCell(msgspec.Struct, frozen=True):
    """A cell that a playbook proposes."""

    source: str
    prose: str = ""
    """Markdown that stands before it."""


Proposed = PlaybookCell | tuple[str, str] | str
"""A cell, a pair of prose and source, or a source alone."""

Generated = Generator[Proposed, str, None]


class PlaybookRoot:
    """Proposes cells that were written before.

    Parameters
    ----------
    cells
        The cells, or a generator function that yields them. It is sent the last
        observation at each ``yield``, and starts anew with every run.
    pace
        Characters per second; 0 is as fast as it goes.
    name
        Its spec.
    """

    sampled = False
    context_limit: int | None = None
    max_tokens: int | None = None
    price: Price | None = None

    def __init__(
        self,
        cells: Iterable[Proposed] | Callable[[], Generated],
        *,
        pace: float = 0,
        name: str = "playbook",
    ) -> None:
        if pace < 0:
            raise UsageError(f"a pace of {pace:g} characters per second is not possible; use 0 up")
        self._begin = _beginner(cells)
        self._running: Generated | None = None
        self._cell: PlaybookCell | None = None
        self._pace = pace
        self.name = name

    @classmethod
    def from_file(cls, path: str | Path, *, query: str = "", pace: float = 0) -> Self:
        """The cells of a ``.py`` file in percent format or of a notebook; see `read_playbook`."""
        return cls(read_playbook(Path(path), query), pace=pace, name=f"playbook:{path}")

    def propose(
        self, messages: Sequence[Message], *, attempt: int = 1, max_tokens: int | None = None
    ) -> RootStream:
        return TextStream(self._reply(messages, attempt))

    async def close(self) -> None:
        """End the generator, if one is at work."""
        if self._running is not None:
            self._running.close()
        self._running = self._cell = None

    async def _reply(self, messages: Sequence[Message], attempt: int) -> AsyncGenerator[str, None]:
        # Asked again for the same turn, it has the same to say.
        if attempt == 1 or self._cell is None:
            self._cell = self._next(messages)
        text = _as_reply(self._cell)
        size = max(1, int(self._pace / PIECES_PER_SECOND)) if self._pace else PIECE_CHARS
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            await asyncio.sleep(len(piece) / self._pace if self._pace else 0)
            yield piece

    def _next(self, messages: Sequence[Message]) -> PlaybookCell:
        try:
            if self._running is None or len(messages) <= 2:
                self._running = self._begin()
                return _cell(next(self._running))
            return _cell(self._running.send(messages[-1].content))
        except StopIteration:
            raise NoAnswer("the playbook ended without setting an answer") from None
        except Exception as error:
            raise RootError(
                f"the playbook raised {type(error).__name__}: {error}; correct its generator"
            ) from error


def _beginner(cells: Iterable[Proposed] | Callable[[], Generated]) -> Callable[[], Generated]:
    if inspect.isgenerator(cells):
        raise UsageError("give the generator function itself, not what it returns")
    if callable(cells):
        return cells
    kept = [_cell(cell) for cell in cells]

    def replay() -> Generated:
        # Not `yield from`, because a list's iterator cannot be sent observations.
        for cell in kept:  # noqa: UP028
            yield cell

    return replay


def _cell(proposed: Proposed) -> PlaybookCell:
    if isinstance(proposed, PlaybookCell):
        return proposed
    if isinstance(proposed, str):
        return PlaybookCell(proposed)
    prose, source = proposed
    return PlaybookCell(source, prose)


def _as_reply(cell: PlaybookCell) -> str:
    mark = fence_for(cell.source)
    return f"{cell.prose}\n\n{mark}repl\n{cell.source}\n{mark}\n".lstrip("\n")


# --- files ------------------------------------------------------------------------------------


def read_playbook(path: Path, query: str = "") -> list[PlaybookCell]:
    """The code cells of a playbook file, each with the Markdown before it as its prose.

    ``{{query}}`` in Markdown becomes the query; in code, the query as contents
    of a Python string, to be put between quotes there.

    Raises
    ------
    UsageError
        The file cannot be read, is neither ``.py`` nor ``.ipynb``, or has no code cell.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"the playbook {path} cannot be read ({reason}): name a .py or .ipynb file"
        ) from None
    if path.suffix == ".ipynb":
        parts = _notebook_parts(text, path)
    elif path.suffix == ".py":
        parts = _percent_parts(text)
    else:
        raise UsageError(f"the playbook {path} is neither a .py file nor a notebook (.ipynb)")
    cells = list(_join(parts, query))
    if not cells:
        raise UsageError(f"the playbook {path} has no code cell: begin each with a line '# %%'")
    return cells


Part = tuple[bool, str]
"""Whether it is code, and the text."""


def _join(parts: Iterable[Part], query: str) -> Iterator[PlaybookCell]:
    prose: list[str] = []
    for is_code, part in parts:
        text = part.strip("\n")
        if not text.strip():
            continue
        if not is_code:
            prose.append(text.replace("{{query}}", query))
            continue
        yield PlaybookCell(text.replace("{{query}}", _in_quotes(query)), "\n\n".join(prose))
        prose = []


def _in_quotes(text: str) -> str:
    """*text* as it has to stand in a Python string, whatever the quotes around it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in escaped
    )


def _percent_parts(text: str) -> Iterator[Part]:
    """Cells of a percent-format script. What stands before the first marker is its header."""
    kind: bool | None = None
    lines: list[str] = []
    for line in text.splitlines():
        marker = _MARKER.fullmatch(line)
        if marker is None:
            lines.append(line)
            continue
        if kind is not None:
            yield kind, _part(kind, lines)
        kind, lines = _MARKDOWN.search(marker["rest"]) is None, []
    if kind is not None:
        yield kind, _part(kind, lines)


def _part(is_code: bool, lines: list[str]) -> str:
    if is_code:
        return "\n".join(lines)
    text = "\n".join(lines).strip()
    for quotes in ('"""', "'''"):
        if len(text) >= 6 and text.startswith(quotes) and text.endswith(quotes):
            return text[3:-3]
    return "\n".join(re.sub(r"^# ?", "", line) for line in lines)


def _notebook_parts(text: str, path: Path) -> Iterator[Part]:
    try:
        cells: list[dict[str, Any]] = json.loads(text)["cells"]
        parts = [(str(cell["cell_type"]), _source(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"the playbook {path} is no notebook of format 4: open and save it in Jupyter"
        ) from None
    return ((kind == "code", source) for kind, source in parts if kind in ("code", "markdown"))


def _source(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
