"""A model behind the link: what answers the sub-calls of a worker in tests."""

from __future__ import annotations

from collections.abc import Callable

from rlm_kernel.repl import messages
from rlm_kernel.repl.messages import FromWorker, ToWorker

FAIL = "FAIL"
"""A reply that stands for a call that failed."""


class Model:
    """Answers each prompt with what *reply* makes of it, under call ids ``1-0``, ``1-1`` …

    Parameters
    ----------
    reply
        Text of the reply; `FAIL` for a call that fails.
    """

    def __init__(self, reply: Callable[[str], str]) -> None:
        self._reply = reply
        self.asked: list[messages.SendSubcalls] = []
        self.judged: list[messages.JudgeSubcalls] = []

    def __call__(self, message: FromWorker) -> ToWorker | None:
        if isinstance(message, messages.JudgeSubcalls):
            self.judged.append(message)
        if not isinstance(message, messages.SendSubcalls):
            return None
        self.asked.append(message)
        results = [self._result(index, prompt) for index, prompt in enumerate(message.prompts)]
        return messages.SubcallResults(id=message.id, results=results)

    def _result(self, index: int, prompt: str) -> messages.SubcallResult:
        text = self._reply(prompt)
        call_id = f"{len(self.asked)}-{index}"
        if text == FAIL:
            error = messages.SubcallFailure(reason="the server is gone")
            return messages.SubcallResult(index=index, error=error, call_id=call_id)
        return messages.SubcallResult(index=index, text=text, call_id=call_id)

    @property
    def prompts(self) -> list[str]:
        """All that were asked, in order."""
        return [prompt for request in self.asked for prompt in request.prompts]

    @property
    def verdicts(self) -> list[tuple[str, bool]]:
        """Ids of the calls that were judged, and whether their reply was a value."""
        return [(v.call_id, v.ok) for message in self.judged for v in message.verdicts]


def once(first: str, then: str) -> Callable[[str], str]:
    """Replies *first* to a prompt as it is, and *then* where it says that this was no value."""
    return lambda prompt: then if "was not accepted" in prompt else first
