"""What can be told of Python text that is not finished, or that IPython has to transform first.

`tokenize` is of no use here: what it does with an open string, a lone quote or
a magic differs between the versions of Python that we run on.
"""

from __future__ import annotations

import ast
import re
import warnings

__all__ = ["in_triple_quotes", "parses"]

_STRING = re.compile(r"'''|\"\"\"|['\"]")
_STRING_END = {
    "'": re.compile(r"(?:[^\\'\n]|\\.)*(?:'|(?=\n))", re.DOTALL),
    '"': re.compile(r'(?:[^\\"\n]|\\.)*(?:"|(?=\n))', re.DOTALL),
    "'''": re.compile(r"(?:[^\\']|\\.|'(?!''))*'''", re.DOTALL),
    '"""': re.compile(r'(?:[^\\"]|\\.|"(?!""))*"""', re.DOTALL),
}
"""What follows an opening quote, to the end of its string. One in single quotes ends with its
line at the latest."""
_SKIP = re.compile(r"[^'\"#\n\\]+|\\.", re.DOTALL)
_MAGIC = re.compile(r"(?P<indent>[ \t]*)(?:[%!]|(?P<target>[\w ,.\[\]]+=[ \t]*)[%!])")
_FOREIGN = re.compile(r"\s*%%(?!time|timeit|capture|prun)\w+")


def in_triple_quotes(source: str) -> bool:
    """Whether *source* ends inside a triple-quoted string.

    Lines with a magic (``%x``, ``!x``) are passed over, and a cell magic whose
    body is not Python has no strings of ours.
    """
    if _FOREIGN.match(source):
        return False
    at, end, fresh = 0, len(source), True
    while at < end:
        if fresh and _MAGIC.match(source, at):
            at = _line_end(source, at)
            continue
        char = source[at]
        if char == "#":
            at, fresh = _line_end(source, at), False
        elif char in "'\"":
            quote = _STRING.match(source, at)
            assert quote is not None
            rest = _STRING_END[quote[0]].match(source, quote.end())
            if rest is None:
                return len(quote[0]) == 3
            at, fresh = rest.end(), False
        elif char == "\n":
            at, fresh = at + 1, True
        else:
            skipped = _SKIP.match(source, at)
            at, fresh = skipped.end() if skipped else at + 1, False
    return False


def _line_end(source: str, at: int) -> int:
    """Offset of the newline that ends the line, which makes the next character a fresh start."""
    newline = source.find("\n", at)
    return len(source) if newline < 0 else newline


def parses(source: str) -> bool:
    """Whether *source* is Python once its magics are taken out. It is not run."""
    if _FOREIGN.match(source):
        return True
    if _is_python(source):
        return True
    return _is_python("\n".join(_without_magic(line) for line in source.split("\n")))


def _is_python(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the root's business
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_magic(line: str) -> str:
    match = _MAGIC.match(line)
    if match is None:
        return line.removesuffix("?")
    return f"{match['indent']}{match['target'] or ''}{'None' if match['target'] else 'pass'}"
