"""Finds the servers that ``jupyter rlm serve`` started, for specs that name none.

A look reads a small folder, so it is done whenever the answer is needed and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from rlm_kernel.config import EndpointSpec
from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.vllm.registry import Registry

__all__ = ["LocalServers"]


class LocalServers:
    """The servers of this user that have answered and still live.

    Parameters
    ----------
    environ
        Where the registry is looked up.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    @cached_property
    def _registry(self) -> Registry:
        return Registry.of(self._environ)

    def urls(self, spec: EndpointSpec) -> list[str]:
        """The servers of *spec*, of kind ``vllm``. Raises `UsageError` where there is none."""
        spec = self.named(spec)
        urls = [entry.url for entry in self._registry.serving(spec.model)]
        if urls:
            return urls
        served = _listed(self._registry.models()) or "nothing is served"
        raise UsageError(
            f"no server of {spec.model} is running here ({served}): start one with "
            f"jupyter rlm serve {spec.model}, or name its URL as in {spec}@http://HOST:PORT"
        )

    def named(self, spec: EndpointSpec) -> EndpointSpec:
        """*spec*, with the only model that is served where it names none.

        Raises
        ------
        UsageError
            It names none, and none or several are served.
        """
        if spec.model:
            return spec
        models = self._registry.models()
        if len(models) == 1:
            return EndpointSpec(kind="vllm", model=models[0])
        if models:
            raise UsageError(f"several models are served: choose one of {_listed(models)}")
        raise UsageError("no server is running here: start one with jupyter rlm serve MODEL")

    def only(self) -> EndpointSpec:
        """The only model that is served, for sub-calls that no model was chosen for.

        Raises
        ------
        UsageError
            None or several are served.
        """
        models = self._registry.models()
        if len(models) == 1:
            return EndpointSpec(kind="vllm", model=models[0])
        running = f" (running here: {_listed(models)})" if models else ""
        raise UsageError(
            f"no model for sub-calls is chosen{running}: give --sub openai:MODEL@URL, "
            "--sub vllm:MODEL or --sub embedded, or set RLM_SUB"
        )


def _listed(models: Sequence[str]) -> str:
    return ", ".join(f"vllm:{model}" for model in models)
