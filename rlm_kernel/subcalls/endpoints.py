"""From a spec to an endpoint, and which models code in a cell may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlm_kernel.config import EndpointSpec, api_key_for
from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.embedded import EmbeddedEndpoint
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.openai_http import OpenAIEndpoint

__all__ = ["Endpoints", "open_endpoint"]


def open_endpoint(spec: EndpointSpec, environ: Mapping[str, str] | None = None) -> Endpoint:
    """The endpoint that *spec* names. Nothing is connected or loaded before the first call.

    Raises
    ------
    UsageError
        A person or a playbook is no model, or the key that it needs is not set.
    """
    if spec.kind == "openai":
        return OpenAIEndpoint(spec, api_key_for(spec, environ))
    if spec.kind == "embedded":
        return EmbeddedEndpoint()
    raise UsageError(f"{spec} cannot answer sub-calls: give openai:MODEL@URL or embedded")


class Endpoints:
    """The endpoints of a session, by the model that a call names.

    Names come from code in cells, which nobody vouches for. They choose among the models of
    servers that a person named; a URL in one would have the key sent wherever it says.

    Parameters
    ----------
    default
        Asked where a call names no model, or one that no other spec has.
    others
        Further models.
    environ
        Where keys are read from; the process's environment where ``None``.
    """

    def __init__(
        self,
        default: EndpointSpec,
        others: Iterable[EndpointSpec] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._default = open_endpoint(default, environ)
        self._kind = default.kind
        self._others = {spec.model: open_endpoint(spec, environ) for spec in others}

    @property
    def default(self) -> Endpoint:
        return self._default

    def resolve(self, model: str | None) -> Endpoint:
        """Where *model* is asked for. A server with several models gets the name as it is.

        Raises
        ------
        UsageError
            There is no such model.
        """
        if model is None or model == self._default.model:
            return self._default
        if model in self._others:
            return self._others[model]
        if self._kind == "openai":
            return self._default
        known = ", ".join([self._default.model, *self._others])
        raise UsageError(f"there is no model {model[:80]!r} for sub-calls: use one of {known}")

    async def close(self) -> None:
        """Close them all."""
        for endpoint in (self._default, *self._others.values()):
            await endpoint.close()
