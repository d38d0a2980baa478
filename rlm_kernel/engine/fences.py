"""Fenced code in the text of a model, read while it streams in.

The rules are those of CommonMark 0.31 (§4.5 fenced code blocks): three or
more backticks or tildes, at most three spaces of indentation, a closing fence
at least as long as the opening one, a block that is never closed runs to the
end. Fences inside list items are found too, at the item's indentation.

Three things go beyond CommonMark, because a cell is code and not prose:

- What stands between ``<think>`` and ``</think>`` is not looked at.
- A closing fence inside an open triple-quoted string does not close. Models
  write Markdown into strings, and a cut there would run half a cell.
- A fence without an info word counts only where its content is Python and
  does something: models show sample output in such fences as well.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from rlm_kernel.engine.pytext import in_triple_quotes, parses

__all__ = ["CODE_WORDS", "Fence", "FenceReader", "fence_for", "read_fence"]

CODE_WORDS = frozenset({"", "repl", "python", "py", "python3", "ipython", "ipython3"})
"""First words of an info string that mean code, in lower case. ``pycon`` is not one of them:
a transcript with prompts holds output that the model made up."""

_OPENING = re.compile(r"(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<info>.*)", re.DOTALL)
_ITEM = re.compile(r" *(?:[-+*]|\d{1,9}[.)]) +(?=\S)")
_THINK = re.compile(r"\s*<(?P<tag>think|thinking)>", re.IGNORECASE)
_THOUGHT = re.compile(r"</(?:think|thinking)>", re.IGNORECASE)
_MAY_OPEN = re.compile(r"\s*(?:(?:[-+*]|\d{1,9}[.)]?)\s*)?(?:[`~<].*)?", re.DOTALL)
_MAX_INNER = 200
"""Closing fences that may stand in one string. The next one closes, so that a root that
rambles inside a string cannot make us look at its text again and again."""


@dataclass(frozen=True, slots=True)
class Fence:
    """One fenced block that holds code."""

    start: int
    """Offset in the text of the opening fence's line."""

    end: int
    """Offset after the closing fence, or of the end of the text."""

    info: str
    source: str
    """Without the fences, their indentation and the last newline."""

    closed: bool


@dataclass(slots=True)
class _Block:
    """A block whose closing fence was not seen yet."""

    start: int
    char: str
    length: int
    indent: int
    info: str
    code: bool
    labelled: bool
    lines: list[str] = field(default_factory=list)
    inner: list[tuple[int, int]] = field(default_factory=list)
    """Lines before and end of each closing fence that stood inside a string."""

    @property
    def source(self) -> str:
        return "\n".join(self.lines)


class FenceReader:
    """Finds the first code fence in a text that comes in pieces.

    `feed` returns it as soon as its closing fence is complete, so that the
    stream can be cut there; `finish` returns it where the text ended before.

    Parameters
    ----------
    words
        Info words that mean code, in lower case; see `CODE_WORDS`.
    """

    def __init__(self, words: frozenset[str] = CODE_WORDS) -> None:
        self._words = words
        self._rest = ""
        """The last line, as far as it came."""
        self._offset = 0
        """Of ``_rest`` in the text."""
        self._prose: list[str] = []
        self._block: _Block | None = None
        self._thinking = False
        self._item = 0
        """Column of the text of the list item that we are in; 0 outside of lists."""
        self.found: Fence | None = None

    def feed(self, text: str) -> Fence | None:
        """Take the next piece. After the fence was found, more text changes nothing."""
        if self.found is not None:
            return self.found
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(line, self._offset + len(line))
            if self.found is not None:
                return self.found
            self._offset += len(line) + 1
        return None

    def finish(self, *, closed: bool = False) -> Fence | None:
        """The text is over. With *closed*, a block without its closing fence does not count."""
        if self.found is None and self._rest:
            end = self._offset + len(self._rest)
            self._line(self._rest, end)
            if self.found is None:
                self._offset, self._rest = end, ""
        if self.found is None and self._block is not None:
            self._give_up(self._block, closed)
        return self.found

    @property
    def prose(self) -> str:
        """Text before the code fence so far, without what the model thought. What came of a
        line that may yet turn out to be a fence or a tag is held back."""
        lines = self._prose
        if self._block is None and not self._thinking and self.found is None:
            held = _MAY_OPEN.fullmatch(self._rest)
            lines = lines if held else [*lines, self._rest.rstrip("\r")]
        return "\n".join(lines).strip("\n")

    @property
    def source(self) -> str:
        """Source so far of the block that is open, where it is one that runs if it ends well.
        Empty for a block without an info word: whether that is code shows at its end."""
        if self.found is not None:
            return self.found.source
        block = self._block
        if block is None or not (block.code and block.labelled):
            return ""
        rest = self._rest.strip()
        if not rest or rest[0] == block.char:
            return block.source
        return "\n".join([*block.lines, _dedent(self._rest.rstrip("\r"), block.indent)])

    # --- lines --------------------------------------------------------------------------------

    def _line(self, line: str, end: int) -> None:
        """Take a whole line; *end* is the offset after it."""
        line = line.removesuffix("\r")
        if self._thinking:
            self._think(line, end)
        elif self._block is not None:
            self._inside(self._block, line, end)
        else:
            self._outside(line, end)

    def _think(self, line: str, end: int) -> None:
        closing = _THOUGHT.search(line)
        if closing:
            self._thinking = False
            self._outside(line[closing.end() :], end)

    def _outside(self, line: str, end: int) -> None:
        thought = _THINK.match(line)
        if thought:
            self._thinking = True
            self._think(line[thought.end() :], end)
            return
        closing = _THOUGHT.search(line)
        if closing:
            # Some servers send the thoughts without the tag that opens them.
            self._prose.clear()
            line = line[closing.end() :]
        opened = self._opening(line)
        if opened is None:
            self._prose.append(line)
            return
        opened.start = self._offset
        self._block = opened

    def _opening(self, line: str) -> _Block | None:
        text = line.expandtabs(4)
        item = _ITEM.match(text)
        indent = len(text) - len(text.lstrip(" "))
        if item:
            self._item = item.end()
            text = " " * item.end() + text[item.end() :]
        elif text.strip() and indent < self._item:
            self._item = 0
        match = _OPENING.fullmatch(text)
        if match is None:
            return None
        indent, mark, info = len(match["indent"]), match["mark"], match["info"].strip()
        if indent > 3 and not self._item <= indent <= self._item + 3:
            return None
        if mark[0] == "`" and "`" in info:
            return None
        word = _word(info)
        return _Block(0, mark[0], len(mark), indent, info, word in self._words, bool(word))

    def _inside(self, block: _Block, line: str, end: int) -> None:
        if not _closes(block, line):
            block.lines.append(_dedent(line, block.indent))
            return
        source = block.source
        if (
            not block.code
            or len(block.inner) >= _MAX_INNER
            or not in_triple_quotes(source)
            or parses(source)
        ):
            self._close(block, source, end, closed=True)
            return
        block.inner.append((len(block.lines), end))
        block.lines.append(_dedent(line, block.indent))

    def _give_up(self, block: _Block, closed: bool) -> None:
        """The text ended inside *block*. A closing fence that seemed to stand in a string was
        one then: the string is what was never closed."""
        if block.inner:
            lines, end = block.inner[0]
            self._close(block, "\n".join(block.lines[:lines]), end, closed=True)
        elif not closed:
            self._close(block, block.source, self._offset, closed=False)

    def _close(self, block: _Block, source: str, end: int, *, closed: bool) -> None:
        self._block = None
        if block.code and source.strip() and (block.labelled or _does_something(source)):
            self.found = Fence(block.start, end, block.info, source, closed)
            return
        mark = block.char * block.length
        self._prose += [mark + block.info, *block.lines, mark]


def read_fence(text: str, words: frozenset[str] = CODE_WORDS) -> Fence | None:
    """The first code fence of the whole *text*."""
    reader = FenceReader(words)
    return reader.feed(text) or reader.finish()


def fence_for(source: str) -> str:
    """A run of backticks that is longer than any in *source*, and at least three."""
    return "`" * max(3, *(len(run) + 1 for run in re.findall("`+", source)), 3)


def _word(info: str) -> str:
    """``{Python} title=x`` gives ``python``."""
    words = re.split(r"[\s,{}]+", info.strip().lstrip("{").lower(), maxsplit=1)
    return words[0].removeprefix(".")


def _closes(block: _Block, line: str) -> bool:
    # Less indented than the opening fence is all right: models close a fence inside a list
    # item at the margin.
    text = line.expandtabs(4)
    mark = text.strip()
    indent = len(text) - len(text.lstrip(" "))
    return (
        len(mark) >= block.length and mark == block.char * len(mark) and indent <= block.indent + 3
    )


def _dedent(line: str, columns: int) -> str:
    spaces = len(line) - len(line.lstrip(" "))
    return line[min(spaces, columns) :]


def _does_something(source: str) -> bool:
    """Whether *source* is Python beyond names and literals, which would be sample output."""
    if not parses(source):
        return False
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return True  # it parses without its magics: they are what it does
    return not all(_is_idle(node) for node in body)


_LITERAL = (
    ast.Constant,
    ast.Name,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.UnaryOp,
    ast.unaryop,
    ast.BinOp,
    ast.operator,
    ast.expr_context,
)


def _is_idle(node: ast.stmt) -> bool:
    """``[1, 2]``, ``2026-01-31`` and ``total: 7`` are Python, but nobody's cell."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr):
        return False
    return all(isinstance(part, _LITERAL) for part in ast.walk(node.value))
