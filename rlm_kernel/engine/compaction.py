"""Keeping a conversation within the context of its root.

Tokens are estimated from characters, at a rate that is learned from what the
server counts. When the messages fill most of the context, the middle of the
conversation gives way to a summary by the root itself. The REPL still holds
every message in ``history``.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlm_kernel.engine.observation import clip
from rlm_kernel.engine.root_protocol import Message
from rlm_kernel.text import CHARS_PER_TOKEN

__all__ = ["FULL", "NO_SUMMARY", "Meter", "compacted"]

FULL = 0.85
"""Part of the context at which a conversation is compacted."""

RECENT = 0.35
"""Part of the context that the latest turns may keep."""

PER_MESSAGE = 6
"""Tokens of a message beside its text: role and separators of the chat template."""

NO_SUMMARY = (
    "(Earlier turns were left out to make room. What they found is in the variables of the REPL, "
    "and their messages are in `history`.)"
)


class Meter:
    """Estimates tokens of messages."""

    def __init__(self) -> None:
        self._rate = CHARS_PER_TOKEN

    def tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of *messages*, estimated."""
        return int(_chars(messages) / self._rate) + PER_MESSAGE * len(messages)

    def learn(self, messages: Sequence[Message], tokens: int) -> None:
        """A server counted *tokens* for *messages*."""
        counted = tokens - PER_MESSAGE * len(messages)
        chars = _chars(messages)
        if counted > 0 and chars > 1000:
            # Bounded: a server that counts nonsense must not switch compaction off.
            self._rate = min(max(chars / counted, 1.0), 6.0)

    def is_full(self, messages: Sequence[Message], limit: int) -> bool:
        """Whether *messages* are to be compacted for a context of *limit* tokens."""
        return self.tokens(messages) > FULL * limit

    def chars(self, tokens: float) -> int:
        """Characters that *tokens* are."""
        return int(tokens * self._rate)


def compacted(
    messages: Sequence[Message], summary: str, go_on: str, *, limit: int, meter: Meter
) -> list[Message]:
    """*messages* with the middle replaced by *summary*.

    System prompt and first message stay, as do the latest turns as far as they
    fit; of the very last observation at least head and tail. Roles alternate
    and the last message is the user's.

    Parameters
    ----------
    summary
        What the root wrote, or `NO_SUMMARY`.
    go_on
        Told after the summary.
    limit
        Context of the root, in tokens.
    """
    head = [*messages[:2], Message("assistant", summary), Message("user", go_on)]
    room = meter.chars(RECENT * limit)
    recent: list[Message] = []
    for at in range(len(messages) - 2, 1, -2):
        pair = list(messages[at : at + 2])
        size = _chars(pair)
        if size > room:
            if not recent:
                recent = [_shortened(message, room // 2) for message in pair]
            break
        room -= size
        recent = pair + recent
    return head + recent


def _shortened(message: Message, chars: int) -> Message:
    return Message(message.role, clip(message.content, chars))


def _chars(messages: Sequence[Message]) -> int:
    return sum(len(message.content) for message in messages)
