"""What several rooms do with text."""

from __future__ import annotations

import re

__all__ = ["CHARS_PER_TOKEN", "LEAST_CHARS_PER_TOKEN", "estimated_tokens", "without_ansi"]

CHARS_PER_TOKEN = 3.5
"""Of English prose and code mixed, where nothing better is known."""

LEAST_CHARS_PER_TOKEN = 3
"""What is cut by this does fit."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def without_ansi(text: str) -> str:
    """*text* without the control sequences of terminals (ECMA-48): colours, links, titles."""
    return _ANSI.sub("", text)


def estimated_tokens(text: str) -> int:
    """About how many tokens *text* has, rather too many: one for 3 bytes of its UTF-8.

    English has some 4 bytes a token, code 3, Chinese 3.
    """
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size // LEAST_CHARS_PER_TOKEN + 1
