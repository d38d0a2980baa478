"""What a worker may say of replies: it is hostile until shown otherwise, and records are facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlm_kernel import RLM
from rlm_kernel.engine.events import SubcallJudged, SubcallStarted
from tests.session.conftest import Serve

Make = Callable[..., RLM]

CRAFT = """
from rlm_kernel.cells import SubcallParams
from rlm_kernel.repl import messages
from rlm_kernel.repl.messages import Verdict
link = get_ipython().worker.link
def judge(*verdicts): link.send(messages.JudgeSubcalls(verdicts=list(verdicts)))
def ask(prompts, retry_of=(), task=None):
    got = []
    def accept(reply):
        got.append(reply)
        failed = isinstance(reply, messages.Failed)
        return failed or sum(len(it.results) for it in got) == len(prompts)
    params = SubcallParams(task=task)
    link.ask(messages.SendSubcalls(id=link.next_id(), cell=get_ipython().worker.outlet.cell,
        kind='llm', prompts=prompts, params=params, retry_of=list(retry_of)), accept)
    if isinstance(got[-1], messages.Failed):
        return got[-1].reason
    return [one.call_id for it in got for one in sorted(it.results, key=lambda it: it.index)]
"""


def events(done: Any, kind: type) -> list[Any]:
    return [s.event for s in done.run.events() if isinstance(s.event, kind)]


def test_only_calls_with_a_task_are_judged_and_each_once(rlm: Make) -> None:
    """By the name that they were asked under; calls of others, made up or not, are left alone."""
    done = rlm(
        CRAFT + "(typed,), (plain,) = ask(['p'], task='year'), ask(['q'])\n"
        "judge(Verdict(call_id=typed, ok=True), Verdict(call_id=typed, ok=False, reason='no'),\n"
        "      Verdict(call_id=plain, ok=False), Verdict(call_id='made up', ok=False))\n"
        "judge(Verdict(call_id=typed, ok=False))\n"
        "Final = typed"
    ).completion("text", "q")
    (judged,) = events(done, SubcallJudged)
    assert (judged.call_id, judged.task, judged.ok) == (done.answer, "year", True)


def test_a_reason_is_recorded_in_bounded_length(rlm: Make) -> None:
    """A worker of ours gives a sentence; another could fill the record."""
    done = rlm(
        CRAFT + "(typed,) = ask(['p'], task='year')\n"
        "judge(Verdict(call_id=typed, ok=False, reason='r' * 1_000_000))\n"
        "Final = 1"
    ).completion("text", "q")
    (judged,) = events(done, SubcallJudged)
    assert judged.reason.startswith("rrr")
    assert len(judged.reason) <= 1000


def test_only_what_was_rejected_can_be_asked_again_and_only_once(rlm: Make) -> None:
    done = rlm(
        CRAFT + "good, bad = ask(['p', 'q'], task='year')\n"
        "judge(Verdict(call_id=good, ok=True), Verdict(call_id=bad, ok=False))\n"
        "ask(['p', 'q', 'r'], [good, bad, 'made up'])\n"
        "ask(['q'], [bad])\n"
        "Final = bad"
    ).completion("text", "q")
    again = [started.retry_of for started in events(done, SubcallStarted)]
    assert again == ["", "", "", done.answer, "", ""]


def test_a_batch_that_asks_another_number_again_is_refused(rlm: Make, serve: Serve) -> None:
    """Nothing of it is sent."""
    sub = serve(reply=lambda prompt: "yes")
    done = rlm(CRAFT + "Final = ask(['p', 'q'], ['one'])", sub=sub).completion("text", "q")
    assert "retry_of" in done.answer
    assert not sub.requests
