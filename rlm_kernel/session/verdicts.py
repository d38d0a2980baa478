"""What the worker says of replies to its typed sub-tasks, as far as it is the one to say it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rlm_kernel.engine.events import SubcallJudged
from rlm_kernel.repl.messages import MAX_PROMPTS, Verdict
from rlm_kernel.text import cut_middle

__all__ = ["Verdicts"]

_KEPT = 2 * MAX_PROMPTS
"""Calls that are remembered; of a worker that never judges, the oldest are forgotten."""

_MAX_REASON = 1000
"""Characters of a reason that are recorded; a worker of ours gives fewer."""


class _Asked(msgspec.Struct, frozen=True):
    """What the calls of a batch were asked for."""

    run_id: str
    task: str


class Verdicts:
    """The typed calls of one REPL, from their replies to what is found of these.

    Each can be judged once, by the REPL that was given its reply, and asked again once, where
    the reply was rejected. Whatever else a worker says is left out: records and views take
    these events for facts, of the calls of all runs.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Asked] = OrderedDict()
        self._rejected: OrderedDict[str, None] = OrderedDict()

    def expect(self, call_ids: Iterable[str], *, run_id: str, task: str) -> None:
        """These calls of sub-task *task* are about to be handed out with their replies."""
        asked = _Asked(run_id, task)
        for call_id in call_ids:
            self._open[call_id] = asked
        _shorten(self._open)

    def events(self, verdicts: Sequence[Verdict]) -> Iterator[tuple[str, SubcallJudged]]:
        """What *verdicts* found, each with the id of its run."""
        for verdict in verdicts:
            asked = self._open.pop(verdict.call_id, None)
            if asked is None:
                continue
            if not verdict.ok:
                self._rejected[verdict.call_id] = None
            reason = cut_middle(verdict.reason, _MAX_REASON)
            yield (
                asked.run_id,
                SubcallJudged(
                    call_id=verdict.call_id, task=asked.task, ok=verdict.ok, reason=reason
                ),
            )
        _shorten(self._rejected)

    def asked_again(self, call_ids: Sequence[str]) -> list[str]:
        """*call_ids*, with an empty text for what was not rejected, or is asked again already."""
        return [self._asked_again(call_id) for call_id in call_ids]

    def _asked_again(self, call_id: str) -> str:
        if call_id not in self._rejected:
            return ""
        del self._rejected[call_id]
        return call_id


def _shorten(calls: OrderedDict[str, _Asked] | OrderedDict[str, None]) -> None:
    while len(calls) > _KEPT:
        calls.popitem(last=False)
