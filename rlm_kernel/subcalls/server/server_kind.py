"""What a server is, as far as it says so, and how much it can do at once."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.connection import Connection, UnreachableError
from rlm_kernel.subcalls.server.prometheus import samples
from rlm_kernel.subcalls.server.structured import ServerKind

__all__ = ["Capacity", "ServerFacts", "capacity_of", "probe"]

PROBE_S = 5.0
CAPACITY_S = 2.0

_KINDS: dict[str, ServerKind] = {"vllm": "vllm", "llamacpp": "llamacpp"}
"""By ``owned_by`` in the list of models."""

Count = Annotated[int, Meta(ge=0)]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the list of models says of a server."""

    kind: ServerKind = "other"
    contexts: dict[str, int] = {}
    """Tokens of prompt and reply together, by model."""

    any_model: bool = False
    """The one model that it has answers to every name, perhaps."""

    def context(self, model: str) -> int | None:
        """Tokens that *model* takes; ``None`` where the server does not say."""
        if self.any_model:
            return next(iter(self.contexts.values()), None)
        return self.contexts.get(model)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How much a server can do at once and does; ``None`` where it does not say."""

    slots: int | None = None
    """Requests at once: of llama.cpp all that it takes; of vLLM those that its KV cache holds
    when each fills the context, so that it may take more."""

    kv_tokens: int | None = None
    """Tokens that its KV cache holds."""

    running: int | None = None
    waiting: int | None = None


# --- the list of models -----------------------------------------------------------------------


class _Meta(msgspec.Struct, frozen=True):
    n_ctx: Count | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str = ""
    owned_by: str | None = None
    parent: str | None = None
    """Of a LoRA adapter its base, which has the context."""

    max_model_len: Count | None = None
    context_length: Count | None = None
    context_window: Count | None = None
    meta: _Meta | None = None

    @property
    def context(self) -> int | None:
        """Context in tokens, under the name that vLLM, llama.cpp or a hosted API gives it."""
        in_meta = self.meta.n_ctx if self.meta else None
        return self.max_model_len or in_meta or self.context_length or self.context_window


class _Cards(msgspec.Struct, frozen=True):
    data: list[_Card] = []


_decode_cards = msgspec.json.Decoder(_Cards).decode


async def probe(connection: Connection) -> ServerFacts | None:
    """Read ``/v1/models``. A server that answers anything else is an ordinary one.

    ``None`` where it may answer better the next time: it is not ready, or did not answer in time.

    Raises
    ------
    UnreachableError
        There is no server.
    """
    try:
        answer = await connection.get(f"{connection.url}/models", seconds=PROBE_S)
        if answer.status in (408, 429) or answer.status >= 500:
            return None
        cards = _decode_cards(answer.body).data
    except UnreachableError:
        raise
    except TimeoutError:
        return None
    except (EndpointError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ServerFacts()
    return _facts(cards)


def _facts(cards: list[_Card]) -> ServerFacts:
    own = {card.id: card.context for card in cards if card.context}
    for card in cards:
        if card.parent in own:
            own.setdefault(card.id, own[card.parent])
    kinds = {_KINDS.get(card.owned_by or "", "other") for card in cards} - {"other"}
    kind: ServerKind = kinds.pop() if len(kinds) == 1 else "other"
    return ServerFacts(kind=kind, contexts=own, any_model=len(cards) == 1)


# --- capacity ---------------------------------------------------------------------------------


async def capacity_of(connection: Connection, kind: ServerKind) -> Capacity | None:
    """What the server says now, in one request (llama.cpp: two). ``None`` where it says nothing."""
    if kind == "vllm":
        text = await _text(connection, "/metrics")
        return _vllm_capacity(text) if text else None
    if kind == "llamacpp":
        return _llama_capacity(
            await _text(connection, "/props"), await _text(connection, "/metrics")
        )
    return None


async def _text(connection: Connection, path: str) -> str:
    try:
        answer = await connection.get(connection.root + path, seconds=CAPACITY_S)
    except (EndpointError, TimeoutError):
        return ""
    return answer.body.decode(errors="replace") if answer.status == 200 else ""


_VLLM = ("num_requests_running", "num_requests_waiting", "cache_config_info")
_LLAMA = ("llamacpp:requests_processing", "llamacpp:requests_deferred")


def _vllm_capacity(text: str) -> Capacity | None:
    """Over all engines of the server."""
    sums: dict[str, float] = {}
    for sample in samples(text, *(f"vllm:{name}" for name in _VLLM)):
        name = sample.name.removeprefix("vllm:")
        is_cache = name == "cache_config_info"
        found = _cache_of(sample.labels) if is_cache else {name: _number(sample.value)}
        for key, amount in found.items():
            if amount is not None:
                sums[key] = sums.get(key, 0) + amount
    if not sums:
        return None
    slots = sums.get("slots")
    return Capacity(
        slots=None if slots is None else max(int(slots), 1),
        kv_tokens=_whole(sums.get("tokens")),
        running=_whole(sums.get("num_requests_running")),
        waiting=_whole(sums.get("num_requests_waiting")),
    )


def _cache_of(labels: dict[str, str]) -> dict[str, float | None]:
    tokens = _number(labels.get("kv_cache_size_tokens"))
    blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
    if tokens is None and blocks is not None and size is not None:
        tokens = blocks * size  # before vLLM named it
    return {"tokens": tokens, "slots": _number(labels.get("kv_cache_max_concurrency"))}


class _Props(msgspec.Struct, frozen=True):
    total_slots: Count | None = None


def _llama_capacity(props: str, metrics: str) -> Capacity | None:
    try:
        slots = msgspec.json.decode(props, type=_Props).total_slots if props else None
    except (msgspec.DecodeError, RecursionError):
        slots = None
    values = {sample.name: _number(sample.value) for sample in samples(metrics, *_LLAMA)}
    running, waiting = (values.get(name) for name in _LLAMA)
    if slots is None and running is None:
        return None
    return Capacity(slots=slots, running=_whole(running), waiting=_whole(waiting))


def _number(given: str | float | None) -> float | None:
    """A number from 0 to what a count can be; ``None`` for others, such as ``NaN``."""
    try:
        value = float("nan" if given is None else given)
    except ValueError:
        return None
    return value if 0 <= value < 1e15 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
