"""Replies that were no value of their sub-task, and how they are asked for once more."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.errors import SubcallError
from rlm_kernel.repl.messages import SubcallResult
from rlm_kernel.repl.worker.subcalls.forms import Form
from rlm_kernel.repl.worker.subcalls.outcomes import unfit

__all__ = ["Rejected", "given_up", "prompt_with_reason", "query_with_reason"]

_HEAD = 500
"""Characters of an unfit reply that the model is shown again."""

# The form itself stands in what the kernel adds to every prompt of the sub-task.
_WISH = "Reply once more, in the form that is asked for."
_OTHER_WISH = "Reply once more, so that this does not hold."


@dataclass(frozen=True, slots=True)
class Rejected:
    """A reply that is no value."""

    place: int
    """Of its prompt in the batch."""

    result: SubcallResult
    reason: str
    """Goes on after "the reply"."""


def given_up(rejected: Rejected, form: Form, why: str) -> SubcallError:
    """The error of an item that was asked for twice; *why* goes on after the reason."""
    return unfit(form, rejected.reason, rejected.result.text, again=f", {why}")


def prompt_with_reason(prompt: str, rejected: Rejected, form: Form) -> str:
    """*prompt* once more; what is new stands at its end, so that the beginning stays cached."""
    text = rejected.result.text
    head = text[:_HEAD] + " …" * (len(text) > _HEAD)
    return (
        f"{prompt}\n\nA reply to this was not accepted: it {rejected.reason}. The reply was:\n"
        f"{head}\n\n{_WISH if form.told else _OTHER_WISH}"
    )


def query_with_reason(params: SubcallParams, rejected: list[Rejected]) -> SubcallParams:
    """*params* of child runs whose query tells why they are started once more."""
    reasons = "; or ".join(dict.fromkeys(f"it {one.reason}" for one in rejected[:3]))
    query = f"{params.query or ''}\n\nAn earlier answer was not accepted: {reasons}."
    return msgspec.structs.replace(params, query=query.strip())
