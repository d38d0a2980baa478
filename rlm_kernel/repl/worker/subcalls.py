"""``sub_RLM`` and its kin: calls of a model from code in a cell.

The worker only asks: models are called by the kernel, which holds the keys,
the budget and the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.errors import SubcallError
from rlm_kernel.repl import messages
from rlm_kernel.repl.worker.link import FrameTooLarge, Interrupted, LinkLost, Reply
from rlm_kernel.repl.worker.plain import encode_hook, plain
from rlm_kernel.repl.worker.requests import Requests, raise_failure

__all__ = ["SubRLM", "make_aliases"]

Kind = Literal["llm", "rlm"]
Outcome = str | SubcallError

_FRAME = 32 << 20
"""Bytes of prompts per message, half of what a frame may have."""


class _Batch:
    """The outcomes of one message of prompts, as they come."""

    def __init__(self, size: int) -> None:
        self.outcomes: list[Outcome | None] = [None] * size
        self._missing = size
        self.failed: messages.Failed | None = None

    def accept(self, reply: Reply) -> bool:
        if isinstance(reply, messages.Failed):
            self.failed = reply
            return True
        if not isinstance(reply, messages.SubcallResults):
            return False
        for result in reply.results:
            if 0 <= result.index < len(self.outcomes) and self.outcomes[result.index] is None:
                error = result.error
                self.outcomes[result.index] = (
                    result.text if error is None else SubcallError(error.reason)
                )
                self._missing -= 1
        return self._missing <= 0

    def finished(self) -> list[Outcome]:
        if self.failed is not None:
            raise_failure(self.failed)
        missing = SubcallError("the sub-call was never answered")
        return [missing if outcome is None else outcome for outcome in self.outcomes]


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

    Returns
    -------
    str or list
        For a list: one item per prompt, a str or, where that call failed, a `SubcallError`.

    Raises
    ------
    ValueError
        A list has more than 100,000 prompts.
    SubcallError
        The call of a single prompt failed.
    BudgetExceeded
        The budget does not cover it; nothing was sent.

    Examples
    --------
    >>> sub_RLM("Which year? " + P[:2000])  # doctest: +SKIP
    >>> parts = sub_RLM(["Summarize: " + c for c in chunks])  # doctest: +SKIP
    >>> one = await sub_RLM.aio("Which year? " + P[:2000])  # doctest: +SKIP
    """

    __name__ = "sub_RLM"

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def __repr__(self) -> str:
        return "<sub_RLM(prompt or list of prompts, *, model=…, max_tokens=…): ask a smaller model>"

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
    ) -> Any:
        params = _params(
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            stop=stop,
            seed=seed,
            system=system,
            timeout=timeout,
            query=query,
        )
        prompts = _checked(prompt, depth)
        outcomes: list[Outcome] = []
        for part in _parts(prompts):
            outcomes += self._call(part, depth, params)
        return outcomes if not isinstance(prompt, str) else _single(outcomes)

    async def aio(self, prompt: str | Sequence[str], *, depth: Kind = "llm", **options: Any) -> Any:
        """As calling it, in a coroutine: other tasks go on meanwhile. Cancelling cancels."""
        params = _params(**options)
        prompts = _checked(prompt, depth)
        outcomes: list[Outcome] = []
        for part in _parts(prompts):
            outcomes += await self._call_async(part, depth, params)
        return outcomes if not isinstance(prompt, str) else _single(outcomes)

    def _call(self, prompts: list[str], kind: Kind, params: SubcallParams) -> list[Outcome]:
        requests, batch = self._requests, _Batch(len(prompts))
        message = self._message(prompts, kind, params)
        requests.streams.flush()
        try:
            with requests.waiting():
                requests.link.ask(message, batch.accept)
        except FrameTooLarge as error:
            return [SubcallError(str(error))]
        except (LinkLost, Interrupted) as error:
            self._cancel(message)
            raise SubcallError(str(error)) from None
        except BaseException:
            self._cancel(message)
            raise
        return batch.finished()

    async def _call_async(
        self, prompts: list[str], kind: Kind, params: SubcallParams
    ) -> list[Outcome]:
        requests, batch = self._requests, _Batch(len(prompts))
        message = self._message(prompts, kind, params)
        requests.streams.flush()
        try:
            with requests.waiting():
                await requests.link.ask_async(message, batch.accept)
        except FrameTooLarge as error:
            return [SubcallError(str(error))]
        except LinkLost as error:
            raise SubcallError(str(error)) from None
        except BaseException:
            self._cancel(message)
            raise
        return batch.finished()

    def _message(
        self, prompts: list[str], kind: Kind, params: SubcallParams
    ) -> messages.SendSubcalls:
        requests = self._requests
        return messages.SendSubcalls(
            id=requests.link.next_id(),
            cell=requests.outlet.cell,
            kind=kind,
            prompts=prompts,
            params=params,
        )

    def _cancel(self, message: messages.SendSubcalls) -> None:
        # A second interrupt here is the same wish as the first, which is already on its way up.
        with suppress(KeyboardInterrupt):
            self._requests.link.send(messages.CancelSubcalls(id=message.id))


def _checked(prompt: object, depth: object) -> list[str]:
    if depth not in ("llm", "rlm"):
        raise ValueError(f"depth must be 'llm' or 'rlm', not {depth!r}")
    if isinstance(prompt, str):
        return [_exact(prompt)]
    if isinstance(prompt, dict) or not isinstance(prompt, Sequence):
        raise TypeError(
            f"a prompt must be a str or a list of str, not {type(prompt).__name__}; "
            "use str() or json.dumps() on it"
        )
    if len(prompt) > messages.MAX_PROMPTS:
        raise ValueError(
            f"a list of {len(prompt):,} prompts is too long for one call, which takes "
            f"{messages.MAX_PROMPTS:,}; put more text into each prompt, or pass slices of the list"
        )
    for place, item in enumerate(prompt):
        if not isinstance(item, str):
            raise TypeError(
                f"prompt {place} of the list is of type {type(item).__name__}; all must be str"
            )
    return [_exact(item) for item in prompt]


def _exact(text: str) -> str:
    """*text* as a str proper: parsers of HTML and others give subclasses, which nothing encodes."""
    return text if type(text) is str else str.__str__(text)


def _listed(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise TypeError("a batch is a list of prompts, not one str; put it into [ ]")
    return list(prompts)


def _params(**options: Any) -> SubcallParams:
    """Options of the call, checked: the link ends a worker that sends another type."""
    options["stop"] = _stops(options.get("stop"))
    given = SubcallParams(**options)
    try:
        # As the link would send them: a number of numpy's is one, a subclass of str is a str.
        sent = msgspec.to_builtins(plain(msgspec.structs.asdict(given)), enc_hook=encode_hook)
        return msgspec.convert(sent, SubcallParams)
    except NotImplementedError:
        raise TypeError("an option of a sub-call is neither a str nor a number") from None
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`") or "an option"
        raise TypeError(f"{name} of a sub-call: {problem[:1].lower()}{problem[1:]}") from None


def _stops(stop: str | Sequence[str] | None) -> list[str] | None:
    if stop is None:
        return None
    return [stop] if isinstance(stop, str) else list(stop)


def _parts(prompts: list[str]) -> Iterator[list[str]]:
    """*prompts* in runs that fit into a frame each."""
    part: list[str] = []
    size = 0
    for prompt in prompts:
        length = len(prompt) if prompt.isascii() else 4 * len(prompt)
        if part and size + length > _FRAME:
            yield part
            part, size = [], 0
        part.append(prompt)
        size += length + 8
    if part:
        yield part


def _single(outcomes: list[Outcome]) -> str:
    outcome = outcomes[0]
    if isinstance(outcome, SubcallError):
        raise outcome
    return outcome


def make_aliases(sub: SubRLM) -> dict[str, Any]:
    """The names under which other systems' prompts know `sub_RLM`."""

    def llm_query(prompt: str, model: str | None = None) -> Any:
        """Ask a smaller model; the text of its reply. See `sub_RLM`."""
        return sub(prompt, model=model)

    def llm_query_batched(prompts: Sequence[str], model: str | None = None) -> Any:
        """Ask a smaller model many things at once. See `sub_RLM`."""
        return sub(_listed(prompts), model=model)

    def llm_batch(prompts: Sequence[str]) -> Any:
        """Ask a smaller model many things at once. See `sub_RLM`."""
        return sub(_listed(prompts))

    def rlm_query(prompt: str, model: str | None = None, query: str | None = None) -> Any:
        """A child run with its own REPL, in which *prompt* is ``P``. See `sub_RLM`."""
        return sub(prompt, model=model, query=query, depth="rlm")

    def rlm_query_batched(prompts: Sequence[str], model: str | None = None) -> Any:
        """One child run for each prompt. See `sub_RLM`."""
        return sub(_listed(prompts), model=model, depth="rlm")

    made = (llm_query, llm_query_batched, llm_batch, rlm_query, rlm_query_batched)
    return {function.__name__: function for function in made}
