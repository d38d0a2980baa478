"""``sub_RLM``: ask a smaller model from code in a cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlm_kernel.errors import SubcallError
from rlm_kernel.repl.worker.subcalls.calls import Calls
from rlm_kernel.repl.worker.subcalls.forms import Check
from rlm_kernel.repl.worker.subcalls.options import Kind, make_order
from rlm_kernel.repl.worker.subcalls.outcomes import Outcomes
from rlm_kernel.repl.worker.subcalls.prompts import checked_prompts
from rlm_kernel.repl.worker.subcalls.templates import collected, map_prompts

__all__ = ["SubRLM"]


class SubRLM:
    """Ask a smaller model about one prompt, or about many at once.

    Parameters
    ----------
    prompt
        A str, or a list of str for a batch that runs in parallel.
    model, temperature, max_tokens, stop, seed, system
        How to sample; what is not given is left to the kernel and the server.
    timeout
        Seconds for each reply.
    depth
        ``"llm"``: one completion. ``"rlm"``: a child run with a REPL of its own, in which
        *prompt* is ``P``.
    query
        What a child run is asked about its prompt.
    choices
        The reply is one of these; the one that it is, is returned.
    schema
        The reply is JSON of this type (``int``, ``list[str]``, a dataclass, a pydantic model …),
        which is returned; or JSON that fits this JSON Schema, a dict.
    check
        Called with each value. It returns False or the reason, or raises AssertionError or
        ValueError, where the value will not do; ``None`` and True let it pass.
    task
        Name of the sub-task, under which its calls are grouped.

    Returns
    -------
    str, value or list
        For a list: one item per prompt; where a call failed, a `SubcallError`. A reply that is no
        value, or fails the check, is asked for once more with the reason; then it has failed.

    Raises
    ------
    ValueError
        A list has more than 100,000 prompts.
    SubcallError
        The call of a single prompt failed, or the budget does not cover it.
    UsageError
        There is no such model, or no model at all; nothing was sent.

    Examples
    --------
    >>> sub_RLM("Which year? " + P[:2000])  # doctest: +SKIP
    >>> parts = sub_RLM(["Summarize: " + c for c in chunks])  # doctest: +SKIP
    >>> labels = sub_RLM.map("Spam?", mails, choices=["yes", "no"])  # doctest: +SKIP
    >>> one = await sub_RLM.aio("Which year? " + P[:2000])  # doctest: +SKIP
    """

    __name__ = "sub_RLM"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __repr__(self) -> str:
        return "<sub_RLM(prompt or list of prompts, *, model=…, max_tokens=…): ask a smaller model>"

    @property
    def last(self) -> Outcomes:
        """The outcomes of the batch that was begun or ended last, also where it was interrupted.

        Its ``done`` has only those that are there, by place.
        """
        return self._calls.last

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        model: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        system: str | None = None,
        timeout: float | None = None,
        depth: Kind = "llm",
        query: str | None = None,
        choices: Iterable[Any] | None = None,
        schema: Any = None,
        check: Check | None = None,
        task: str | None = None,
    ) -> Any:
        options = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
        order, prompts = make_order(options), checked_prompts(prompt)
        outcomes = self._calls.ask(prompts, order)
        return list(outcomes) if not isinstance(prompt, str) else _single(outcomes)

    async def aio(self, prompt: str | Sequence[str], **options: Any) -> Any:
        """As calling it, in a coroutine: other tasks go on meanwhile. Cancelling cancels."""
        order, prompts = make_order(options, "sub_RLM.aio"), checked_prompts(prompt)
        outcomes = await self._calls.ask_async(prompts, order)
        return list(outcomes) if not isinstance(prompt, str) else _single(outcomes)

    def map(self, make: str | Callable[[Any], str], items: Iterable[Any], **options: Any) -> Any:
        """Ask about each item, all at once.

        Parameters
        ----------
        make
            A template, as in ``"Which year?\\n\\n{text}"``: ``{}`` and ``{item}`` stand for the
            item, other names for what it holds; without any the item goes to the end. Instruction
            first: what all prompts begin with is read once by the server. Or a function that
            makes an item's prompt.
        items
            Any iterable of at most 100,000; or a dict, of which the values are asked about.
        options
            Those of `sub_RLM`.

        Returns
        -------
        list or dict
            Outcomes in the order of the items; for a dict under its keys. A failed one is a
            `SubcallError`.
        """
        order, found = make_order(options, "sub_RLM.map"), collected(items)
        keys = list(items) if isinstance(items, Mapping) else None
        outcomes = self._calls.ask(map_prompts(make, found), order, keys)
        return list(outcomes) if keys is None else outcomes.done


_NO_OPTIONS = ("self", "prompt")


def _single(outcomes: Outcomes) -> Any:
    outcome = outcomes[0]
    if isinstance(outcome, SubcallError):
        raise outcome
    return outcome
