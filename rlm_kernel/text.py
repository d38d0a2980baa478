"""What several rooms do with text."""

from __future__ import annotations

import re

__all__ = [
    "CHARS_PER_TOKEN",
    "LEAST_CHARS_PER_TOKEN",
    "cut_middle",
    "escape_surrogates",
    "estimated_tokens",
    "replace_surrogates",
    "without_ansi",
]

CHARS_PER_TOKEN = 3.5
"""Of English prose and code mixed, where nothing better is known."""

LEAST_CHARS_PER_TOKEN = 3
"""What is cut by this does fit."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def without_ansi(text: str) -> str:
    """*text* without the control sequences of terminals (ECMA-48): colours, links, titles."""
    return _ANSI.sub("", text)


def escape_surrogates(text: str) -> str:
    """*text* as UTF-8 can carry it: a lone surrogate, which has none, becomes ``\\udXXX``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def replace_surrogates(text: str) -> str:
    """*text* as Unicode: halves of a pair in sequence are joined, others become U+FFFD.

    For what goes to a model or comes from one, where an escape would be read as text. JSON may
    hold halves (RFC 8259, section 8.2).
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cut_middle(text: str, most: int) -> str:
    """*text*, or its head and tail in *most* characters with the length of what was cut."""
    if len(text) <= most:
        return text
    # The mark has at most 41 characters beside the number's own.
    kept = max(most - 41 - len(f"{len(text):,}"), 0)
    head = kept - kept // 3
    cut = f"\n[… {len(text) - kept:,} characters are left out here …]\n"
    return text[:head] + cut + text[len(text) - (kept - head) :]


def estimated_tokens(text: str) -> int:
    """About how many tokens *text* has, rather too many: one for 3 bytes of its UTF-8.

    English has some 4 bytes a token, code 3, Chinese 3.
    """
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size // LEAST_CHARS_PER_TOKEN + 1
