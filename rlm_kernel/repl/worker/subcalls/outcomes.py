"""What has come of the calls of a batch, while it is under way and ever after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlm_kernel.errors import SubcallError
from rlm_kernel.repl import messages
from rlm_kernel.repl.messages import SubcallFailure, SubcallResult
from rlm_kernel.repl.worker.link import Reply
from rlm_kernel.repl.worker.requests import raise_failure
from rlm_kernel.repl.worker.subcalls.forms import Form
from rlm_kernel.repl.worker.subcalls.replies import Unfit

__all__ = ["Outcomes", "Part", "outcome_of", "unfit"]

_HEAD = 200
"""Characters of an unfit reply that its error shows."""


class Part:
    """The results of one message of prompts, as they come.

    It goes on taking them where the wait for it was interrupted: what the kernel had delivered
    by then may not have been read yet.
    """

    def __init__(self, places: Sequence[int], came: dict[int, SubcallResult]) -> None:
        self.results: list[SubcallResult | None] = [None] * len(places)
        self._places, self._came = places, came
        self._missing = len(places)
        self._failed: messages.Failed | None = None

    def accept(self, reply: Reply) -> bool:
        """Take a reply of the kernel's; says whether it was the last."""
        if isinstance(reply, messages.Failed):
            self._failed = reply
            return True
        if not isinstance(reply, messages.SubcallResults):
            return False
        for result in reply.results:
            if 0 <= result.index < len(self.results) and self.results[result.index] is None:
                self._take(result)
        return self._missing <= 0

    def _take(self, result: SubcallResult) -> None:
        self.results[result.index] = self._came[self._places[result.index]] = result
        self._missing -= 1

    def fail(self, reason: str) -> None:
        """Nothing more comes, for this reason."""
        failure = SubcallFailure(reason=reason)
        for index, result in enumerate(self.results):
            if result is None:
                self._take(SubcallResult(index=index, error=failure))

    def finish(self) -> None:
        """Raise what the kernel refused the whole part with, if it did."""
        if self._failed is not None:
            raise_failure(self._failed)


class Outcomes(Sequence[Any]):
    """The outcomes of a batch of sub-calls, in the order of its prompts.

    Each is a str, the value of a typed sub-task, or a `SubcallError`. Of a batch that was
    interrupted the finished ones are there; the others are a `SubcallError` that says so.

    Examples
    --------
    >>> done = sub_RLM.last.done  # doctest: +SKIP
    >>> rest = [p for i, p in enumerate(prompts) if i not in done]  # doctest: +SKIP
    """

    def __init__(
        self, size: int = 0, form: Form | None = None, keys: Sequence[Any] | None = None
    ) -> None:
        self.form = form or Form()
        self._keys = range(size) if keys is None else keys
        self._size = size
        self._settled: dict[int, Any] = {}
        self._came: dict[int, SubcallResult] = {}

    def begin(self, places: Sequence[int]) -> Part:
        """The prompts at *places* are being asked, perhaps for the second time."""
        return Part(places, self._came)

    def settle(self, place: int, outcome: Any) -> None:
        """This is the outcome, whatever results there are."""
        self._settled[place] = outcome
        self._came.pop(place, None)

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Where a check ends in a defect, or in an interrupt, replies stay as they came.

        Else who looks at what is kept would call the same check again, and meet its defect, or
        wait for it, each time.
        """
        try:
            yield
        except BaseException:
            self.form = Form(task=self.form.task)
            raise

    @property
    def done(self) -> dict[Any, Any]:
        """The outcomes that have come, by place; by key for a dict that was mapped."""
        return {self._keys[place]: self[place] for place in sorted(self._places())}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(self._size))]
        place = range(self._size)[place]
        result = self._came.get(place)
        if result is not None:
            with self.judging():
                outcome = outcome_of(result, self.form)
            self.settle(place, outcome)
        elif place not in self._settled:
            return SubcallError("the sub-call was not finished: its batch was interrupted")
        return self._settled[place]

    def __repr__(self) -> str:
        return f"<outcomes of {self._size:,} sub-calls, {len(self._places()):,} of them done>"

    def _places(self) -> set[int]:
        return self._settled.keys() | self._came.keys()


def outcome_of(result: SubcallResult, form: Form) -> Any:
    """*result* as a cell sees it."""
    if result.error is not None:
        return SubcallError(result.error.reason)
    if not form.typed:
        return result.text
    try:
        return form.value(result.text)
    except Unfit as why:
        return unfit(form, str(why), result.text)


def unfit(form: Form, reason: str, text: str, *, again: str = "") -> SubcallError:
    """The error for a reply that is no value; *again* tells of the second try."""
    head = text[:_HEAD] + "…" * (len(text) > _HEAD)
    return SubcallError(f"{form.task}: the reply {reason}{again}; it was {head!r}")
