"""How many sub-calls were others than were asked for, by the kind of reason."""

from __future__ import annotations

import re

__all__ = ["count_note"]

_HOW_MANY = re.compile(r"\b\d[\d,]* (?=more\b)")


def count_note(notes: dict[str, int], note: str) -> None:
    """Another call has *note* (``SubcallStarted.note``).

    Without the number that such a note may have, since that is another for each batch: code that
    makes a thousand of them is not to make a thousand lines.
    """
    kind = _HOW_MANY.sub("", note)
    notes[kind] = notes.get(kind, 0) + 1
