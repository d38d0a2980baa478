"""What a vLLM server tells of itself on ``/health``, ``/v1/models`` and ``/metrics``.

For commands, which have no event loop; what the kernel asks of servers goes through
`rlm_kernel.subcalls.server.connection`.
"""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import msgspec

from rlm_kernel.subcalls.server.prometheus import samples

__all__ = ["Figures", "fetch", "figures_of", "is_ready", "served_models"]

PATIENCE_S = 3.0
_MAX_BODY = 8 << 20

_USAGES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The second is the name that vLLM had for it before."""

_COUNTS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a server is, over all its engines; ``None`` is what it does not tell."""

    running: int | None = None
    """Requests that it works on."""

    waiting: int | None = None
    cache_used: float | None = None
    """Share of the KV cache, 0 to 1; of several engines the mean."""

    hit_tokens: int | None = None
    """Tokens of prompts that the prefix cache had, since the server's start."""

    query_tokens: int | None = None
    """Tokens of prompts that it was asked for."""

    @property
    def hit_rate(self) -> float | None:
        """Share of tokens that the prefix cache had; ``None`` before the first prompt."""
        if not self.query_tokens or self.hit_tokens is None:
            return None
        return self.hit_tokens / self.query_tokens


class _Card(msgspec.Struct):
    id: str = ""


class _Cards(msgspec.Struct):
    data: list[_Card] = []


def fetch(url: str, path: str, patience: float = PATIENCE_S) -> tuple[int, bytes]:
    """Status and body of a GET of *path* at the host of *url*, through no proxy.

    Raises
    ------
    OSError
        The server cannot be reached, or sends no HTTP.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BODY)
    except http.client.HTTPException as error:
        raise ConnectionError(f"what answers at {url} sends no HTTP") from error
    finally:
        connection.close()


def is_ready(url: str) -> bool:
    """Whether the server at *url* says that it is well."""
    try:
        return fetch(url, "/health")[0] == http.client.OK
    except OSError:
        return False


def served_models(url: str) -> list[str]:
    """Names of the models that the server at *url* has; none where it does not tell."""
    try:
        status, body = fetch(url, "/v1/models")
        cards = msgspec.json.decode(body, type=_Cards) if status == http.client.OK else _Cards()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [card.id for card in cards.data if card.id]


def figures_of(text: str) -> Figures:
    """The figures in *text*, which has Prometheus' format. Lines of other shapes are skipped."""
    found: dict[str, list[float]] = {}
    for sample in samples(text, *_USAGES, *_COUNTS):
        found.setdefault(sample.name, []).append(sample.value)
    usage = found.get(_USAGES[0]) or found.get(_USAGES[1])
    running, waiting, hits, queries = (_total(found.get(name)) for name in _COUNTS)
    return Figures(
        running=running,
        waiting=waiting,
        cache_used=sum(usage) / len(usage) if usage else None,
        hit_tokens=hits,
        query_tokens=queries,
    )


def _total(values: list[float] | None) -> int | None:
    return round(sum(values)) if values else None
