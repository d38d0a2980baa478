"""Asking the kernel, and asking once more where a reply was no value of its sub-task.

What is asked is decided in generators, which do not wait: the same ones serve a cell that
blocks and one that awaits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from rlm_kernel.errors import RLMError, SubcallError
from rlm_kernel.repl.messages import (
    CancelSubcalls,
    JudgeSubcalls,
    SendSubcalls,
    SubcallResult,
    Verdict,
)
from rlm_kernel.repl.worker.link import FrameTooLarge, Interrupted, LinkLost
from rlm_kernel.repl.worker.requests import Requests
from rlm_kernel.repl.worker.subcalls.forms import Form
from rlm_kernel.repl.worker.subcalls.options import Order
from rlm_kernel.repl.worker.subcalls.outcomes import Outcomes, Part, outcome_of
from rlm_kernel.repl.worker.subcalls.prompts import in_parts
from rlm_kernel.repl.worker.subcalls.rejected import (
    Rejected,
    given_up,
    prompt_with_reason,
    query_with_reason,
)
from rlm_kernel.repl.worker.subcalls.replies import Unfit

__all__ = ["Calls"]

_VERDICTS = 1000
"""Verdicts in one message. The kernel records those of a message in one turn of its event loop,
some 10 ms for as many; with their reasons they fit into a frame."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """One message to the kernel, and who takes its results."""

    message: SendSubcalls
    part: Part


_Steps = Generator[_Ask, None, None]


class Calls:
    """Makes the calls of one REPL.

    Parameters
    ----------
    requests
        How the kernel is asked.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._last = Outcomes()

    @property
    def last(self) -> Outcomes:
        """Of the batch that was begun or ended last."""
        return self._last

    def ask(self, prompts: list[str], order: Order, keys: Sequence[Any] | None = None) -> Outcomes:
        """Ask *prompts*, which are checked, and wait for all outcomes.

        Parameters
        ----------
        keys
            What the outcomes are known by, if not by their places.

        Raises
        ------
        RLMError
            The kernel refused it before anything was sent.
        """
        self._last = outcomes = Outcomes(len(prompts), order.form, keys)
        try:
            self._run(self._steps(prompts, order, outcomes))
        finally:
            self._last = outcomes  # a check or a tool may have made calls meanwhile
        return outcomes

    async def ask_async(self, prompts: list[str], order: Order) -> Outcomes:
        """As `ask`, without blocking the event loop."""
        self._last = outcomes = Outcomes(len(prompts), order.form)
        try:
            await self._run_async(self._steps(prompts, order, outcomes))
        finally:
            self._last = outcomes
        return outcomes

    def _run(self, steps: _Steps) -> None:
        with suppress(StopIteration):
            ask = next(steps)
            while True:
                try:
                    self._wait(ask)
                except RLMError as error:
                    ask = steps.throw(error)
                else:
                    ask = next(steps)

    async def _run_async(self, steps: _Steps) -> None:
        with suppress(StopIteration):
            ask = next(steps)
            while True:
                try:
                    await self._wait_async(ask)
                except RLMError as error:
                    ask = steps.throw(error)
                else:
                    ask = next(steps)

    # --- waiting ------------------------------------------------------------------------------

    def _wait(self, ask: _Ask) -> None:
        with self._asking(ask):
            self._requests.link.ask(ask.message, ask.part.accept)

    async def _wait_async(self, ask: _Ask) -> None:
        with self._asking(ask):
            await self._requests.link.ask_async(ask.message, ask.part.accept)

    @contextmanager
    def _asking(self, ask: _Ask) -> Iterator[None]:
        self._requests.streams.flush()
        try:
            with self._requests.waiting():
                yield
        except FrameTooLarge as error:
            ask.part.fail(str(error))
        except LinkLost as error:
            raise SubcallError(str(error)) from None
        except Interrupted as error:
            self._cancel(ask.message)
            raise SubcallError(str(error)) from None
        except BaseException:
            self._cancel(ask.message)
            raise
        ask.part.finish()

    def _cancel(self, message: SendSubcalls) -> None:
        # A second interrupt here is the same wish as the first, which is already on its way up.
        with suppress(KeyboardInterrupt):
            self._requests.link.send(CancelSubcalls(id=message.id))

    # --- what is asked ------------------------------------------------------------------------

    def _steps(self, prompts: list[str], order: Order, outcomes: Outcomes) -> _Steps:
        places = range(len(prompts))
        results = yield from self._ask_all(places, prompts, order, outcomes)
        form = order.form
        if not form.typed:
            for place, result in enumerate(results):
                outcomes.settle(place, outcome_of(result, form))
            return
        rejected = self._judge(places, results, outcomes)
        if rejected:
            yield from self._ask_again(rejected, prompts, order, outcomes)

    def _ask_all(
        self,
        places: Sequence[int],
        prompts: list[str],
        order: Order,
        outcomes: Outcomes,
        retry_of: Sequence[str] = (),
    ) -> Generator[_Ask, None, list[SubcallResult]]:
        """The results of *prompts*, which stand at *places* of the batch."""
        results: list[SubcallResult] = []
        for some in in_parts(prompts):
            here = slice(len(results), len(results) + len(some))
            part = outcomes.begin(places[here])
            try:
                yield _Ask(self._message(some, order, list(retry_of[here])), part)
            except RLMError as error:
                if not results:
                    raise
                # What there is must not be lost; nor will the kernel take what is left.
                part.fail(str(error))
                rest = outcomes.begin(places[here.stop :])
                rest.fail(str(error))
                return results + _complete(part) + _complete(rest)
            results += _complete(part)
        return results

    def _message(self, prompts: list[str], order: Order, retry_of: list[str]) -> SendSubcalls:
        requests = self._requests
        return SendSubcalls(
            id=requests.link.next_id(),
            cell=requests.outlet.cell,
            kind=order.kind,
            prompts=prompts,
            params=order.params,
            retry_of=retry_of,
        )

    def _judge(
        self, places: Sequence[int], results: list[SubcallResult], outcomes: Outcomes
    ) -> list[Rejected]:
        """Settle the outcomes whose reply is a value, tell the kernel, and return the others."""
        form = outcomes.form
        with outcomes.judging():
            judged = [_judged(*one, form) for one in zip(places, results, strict=True)]
        for place, found in zip(places, judged, strict=True):
            if not isinstance(found, Rejected):
                outcomes.settle(place, found)
        self._tell([v for v in map(_verdict, results, judged) if v is not None])
        return [found for found in judged if isinstance(found, Rejected)]

    def _tell(self, verdicts: list[Verdict]) -> None:
        for start in range(0, len(verdicts), _VERDICTS):
            some = verdicts[start : start + _VERDICTS]
            self._requests.link.send(JudgeSubcalls(verdicts=some))

    def _ask_again(
        self, rejected: list[Rejected], prompts: list[str], order: Order, outcomes: Outcomes
    ) -> _Steps:
        """Once, all that were rejected together."""
        form = order.form
        places = [one.place for one in rejected]
        retry_of = [one.result.call_id for one in rejected]
        again = [prompt_with_reason(prompts[one.place], one, form) for one in rejected]
        if order.kind == "rlm":
            # The prompt of a child run is its P: the reason goes into what is asked about it.
            again = [prompts[one.place] for one in rejected]
            order = Order(order.kind, query_with_reason(order.params, rejected), form)
        try:
            results = yield from self._ask_all(places, again, order, outcomes, retry_of)
        except RLMError as error:
            for one in rejected:
                outcomes.settle(
                    one.place, given_up(one, form, f"and it was not asked again: {error}")
                )
            return
        still = {one.place: one for one in self._judge(places, results, outcomes)}
        for first, result in zip(rejected, results, strict=True):
            if result.error is not None:
                why = f"and the call failed when it was asked again: {result.error.reason}"
                outcomes.settle(first.place, given_up(first, form, why))
            elif first.place in still:
                last = still[first.place]
                outcomes.settle(first.place, given_up(last, form, "also when it was asked again"))


def _complete(part: Part) -> list[SubcallResult]:
    """The results of a part that has them all."""
    return cast("list[SubcallResult]", part.results)


def _judged(place: int, result: SubcallResult, form: Form) -> Any:
    if result.error is not None:
        return SubcallError(result.error.reason)
    try:
        return form.value(result.text)
    except Unfit as why:
        return Rejected(place, result, str(why))


def _verdict(result: SubcallResult, found: Any) -> Verdict | None:
    """For the kernel; ``None`` where there was no reply to judge."""
    if result.error is not None or not result.call_id:
        return None
    if isinstance(found, Rejected):
        return Verdict(call_id=result.call_id, ok=False, reason=found.reason)
    return Verdict(call_id=result.call_id, ok=True)
