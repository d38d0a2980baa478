"""Replies that are recorded already, served again in place of a request.

The n-th time that a tree of runs asks the same, it is given the n-th reply
that was recorded before its first sub-call. So code that samples one question
five times gets five replies, a second run of the same code gets the same five
in the same order, and nothing that a tree asks is answered by what the tree
itself was told: temperature 0 is not taken for a promise.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Protocol

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Ledger
from rlm_kernel.engine.events import SubcallEnded
from rlm_kernel.errors import RecordError

__all__ = ["Cache", "Question", "Replies"]

_KEY_BYTES = 16


class Replies(Protocol):
    """Where replies are recorded."""

    def mark(self) -> int:
        """The number of the last event so far; 0 where no reply can be served."""

    def reply(self, key: str, after_seq: int, until_seq: int) -> tuple[int, SubcallEnded] | None:
        """The next reply to what has this key, of a call that started after event *after_seq*
        and ended up to event *until_seq*; before it the number of that start."""


class Question:
    """What the calls of a batch ask, but for their prompts.

    Parameters
    ----------
    endpoint
        Spec of what is asked.
    model
        Name that is sent.
    params
        As they are sent; what is not sent makes no difference.
    """

    def __init__(self, endpoint: str, model: str, params: SubcallParams) -> None:
        sent = msgspec.structs.replace(params, model=None, timeout=None, task=None, query=None)
        self._common = hashlib.sha256(msgspec.msgpack.encode((endpoint, model, sent)))

    def key(self, prompt: str) -> str:
        """Equal for calls that ask the same; 32 hex digits."""
        whole = self._common.copy()
        whole.update(prompt.encode("utf-8", "surrogatepass"))
        return whole.digest()[:_KEY_BYTES].hex()


class _Tree:
    """What one tree of runs may be served, and has been."""

    def __init__(self, until_seq: int) -> None:
        self.until_seq = until_seq
        self.served: dict[str, int] = {}
        """By key, up to which event replies were served; to the end where there is none left."""


class Cache:
    """Finds the recorded reply for a call, if there is one.

    What cannot be read is not served: the model is asked then.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._trees: weakref.WeakKeyDictionary[Ledger, _Tree] = weakref.WeakKeyDictionary()

    def take(self, ledger: Ledger, key: str) -> SubcallEnded | None:
        """The reply that a call of the run of *ledger* is given; it is not given again."""
        tree = self._tree(ledger.line()[-1])
        after = tree.served.get(key, 0)
        if after >= tree.until_seq:
            return None
        try:
            found = self._replies.reply(key, after, tree.until_seq)
        except RecordError:
            return None
        # Kept also where nothing was found: to look again, past all that failed, is not for free.
        tree.served[key], reply = found or (tree.until_seq, None)
        return reply

    def _tree(self, first: Ledger) -> _Tree:
        tree = self._trees.get(first)
        if tree is None:
            try:
                tree = _Tree(self._replies.mark())
            except RecordError:
                tree = _Tree(0)
            self._trees[first] = tree
        return tree
