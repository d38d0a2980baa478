"""The names under which other systems' prompts know `sub_RLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlm_kernel.repl.worker.subcalls.sub_rlm import SubRLM

__all__ = ["make_aliases"]


def make_aliases(sub: SubRLM) -> dict[str, Any]:
    """Functions of other systems, by name, that make the same calls as *sub*."""

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


def _listed(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise TypeError("a batch is a list of prompts, not one str; put it into [ ]")
    return list(prompts)
