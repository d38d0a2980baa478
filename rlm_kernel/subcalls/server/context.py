"""Whether a prompt fits into the context of a model, before it is sent.

A token has at least one byte, so that short prompts are let through by their length alone. Of
those that may be too long by an estimate the server is asked for the exact number.
"""

from __future__ import annotations

import asyncio
import math
from enum import Enum, auto
from typing import TypeVar

import msgspec

from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.connection import Connection
from rlm_kernel.subcalls.server.refusals import over_context
from rlm_kernel.subcalls.server.structured import ServerKind
from rlm_kernel.subcalls.server.tool_wire import Message, ToolOffer
from rlm_kernel.subcalls.server.wire import RequestForm
from rlm_kernel.text import LEAST_CHARS_PER_TOKEN

__all__ = ["TEMPLATE", "ContextCheck", "Verdict", "judge"]

TEMPLATE = 128
"""Tokens that a chat template puts around the messages, generously."""

CLEAR = 0.6
"""Of the context: an estimate below it is not far enough off to be checked."""

COUNT_S = 20.0
_HOPELESS = 32
"""Times the context: by no tokens whatever does a prompt that long fit."""


class Verdict(Enum):
    """What an estimate of a request's tokens says."""

    FITS = auto()
    CLAMP = auto()
    """It is short, but the reply that it may have is longer than the rest of the context."""

    CLOSE = auto()
    """The exact number is needed."""

    HOPELESS = auto()


def judge(size: int, context: int, max_tokens: int | None) -> Verdict:
    """The verdict on *size* bytes of text for a *context* in tokens."""
    most, estimated, reply = size + TEMPLATE, size / LEAST_CHARS_PER_TOKEN, max_tokens or 0
    if most + reply <= context:
        return Verdict.FITS
    if most <= context / 8:
        return Verdict.CLAMP
    if estimated <= CLEAR * context and estimated / CLEAR + reply <= context:
        return Verdict.FITS
    return Verdict.HOPELESS if estimated > _HOPELESS * context else Verdict.CLOSE


class ContextCheck:
    """Asks one server for exact numbers of tokens.

    Parameters
    ----------
    connection, kind
        The server. Only vLLM and llama.cpp can be asked.
    """

    def __init__(self, connection: Connection, kind: ServerKind) -> None:
        self._connection = connection
        self._kind = kind
        self._cannot_count = kind not in ("vllm", "llamacpp")

    async def fitting(
        self, prompt: str, form: RequestForm, *, model: str, context: int
    ) -> RequestForm:
        """*form*, with a bound on the reply that leaves room for *prompt*.

        Where the server does not tell, it is sent as it is, for the server to judge.

        Raises
        ------
        EndpointError
            The prompt leaves no room for a reply. It says by how many tokens it is too long.
        """
        size = form.size + (len(prompt) if prompt.isascii() else len(_utf8(prompt)))
        verdict = judge(size, context, form.max_tokens)
        if verdict is Verdict.FITS:
            return form
        if verdict is Verdict.CLAMP:
            return form.limited(min(form.max_tokens or context, context - size - TEMPLATE))
        if verdict is Verdict.HOPELESS:
            used = math.ceil(size / LEAST_CHARS_PER_TOKEN)
            raise EndpointError(_too_long(prompt, form, model, context, used, about="about "))
        used_exactly = await self._count(prompt, form, model)
        if used_exactly is None:
            return form
        if used_exactly >= context:
            raise EndpointError(_too_long(prompt, form, model, context, used_exactly, about=""))
        left = context - used_exactly
        return form.limited(left) if form.max_tokens and form.max_tokens > left else form

    async def _count(self, prompt: str, form: RequestForm, model: str) -> int | None:
        """Tokens of the whole conversation; ``None`` where that cannot be had."""
        if self._cannot_count:
            return None
        if self._kind == "vllm":
            return await self._count_vllm(prompt, form, model)
        return await self._count_llama(prompt, form)

    async def _count_vllm(self, prompt: str, form: RequestForm, model: str) -> int | None:
        request = _VLLMCount(
            model=model, messages=form.conversation(prompt), tools=form.offered or None
        )
        body = await self._ask("/tokenize", request)
        return _decoded(body, _VLLMCounted).count

    async def _count_llama(self, prompt: str, form: RequestForm) -> int | None:
        conversation = _Conversation(form.conversation(prompt), form.offered or None)
        text = _decoded(await self._ask("/apply-template", conversation), _Templated).prompt
        counted = await self._ask("/tokenize", _LlamaCount(text)) if text else b""
        return len(_decoded(counted, _LlamaCounted).tokens) or None

    async def _ask(self, path: str, request: msgspec.Struct) -> bytes:
        """The body of the answer; empty where there is none that counts."""
        connection = self._connection
        try:
            async with asyncio.timeout(COUNT_S):
                body = msgspec.json.encode(request)
                answer = await connection.post(connection.root + path, body)
        except (EndpointError, TimeoutError, UnicodeEncodeError):
            return b""
        if answer.status in (401, 403, 404, 405, 501):
            self._cannot_count = True
        return answer.body if answer.status == 200 else b""


def _too_long(
    prompt: str, form: RequestForm, model: str, context: int, used: int, *, about: str
) -> str:
    return over_context(
        model,
        used=used,
        limit=context,
        reply=form.max_tokens or 0,
        chars=len(prompt),
        about=about,
    )


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- the two protocols ------------------------------------------------------------------------


class _Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    messages: list[Message]
    tools: list[ToolOffer] | None = None


class _VLLMCount(_Conversation, frozen=True, kw_only=True, omit_defaults=True):
    model: str


class _VLLMCounted(msgspec.Struct, frozen=True):
    count: int | None = None


class _Templated(msgspec.Struct, frozen=True):
    prompt: str = ""


class _LlamaCount(msgspec.Struct, frozen=True):
    content: str
    add_special: bool = True
    parse_special: bool = True


class _LlamaCounted(msgspec.Struct, frozen=True):
    tokens: list[int] = []


_Shape = TypeVar("_Shape", _VLLMCounted, _Templated, _LlamaCounted)


def _decoded(body: bytes, shape: type[_Shape]) -> _Shape:
    """*body*, or the defaults where it is something else."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shape()
