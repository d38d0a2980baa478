"""Turns specs into roots and endpoints, each endpoint once per process.

Keys stay where they belong. Code in the worker can ask for any endpoint, in a
sub-call or by pretending to be a front end. So a key goes only to servers
that the environment names (RLM_ROOT, RLM_SUB, OPENAI_BASE_URL) or a program;
one whose spec stands in a cell may be asked too, without a key; others not.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlm_kernel.config import (
    EndpointSpec,
    api_key_for,
    is_private,
    parse_root_spec,
    parse_sub_spec,
)
from rlm_kernel.engine.roots import HumanRoot, PlaybookRoot, Root
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.prices import prices_from
from rlm_kernel.session.settings import Settings
from rlm_kernel.subcalls.endpoint import Endpoint

__all__ = ["Models", "is_spec"]

_EMBEDDED_REPLY = 400
"""Tokens: a model this small rarely comes to an end by itself."""

_CONTEXT_PATIENCE_S = 5.0

_SPEC = re.compile(r"openai:[^\s'\"]+")

_SPEC_KINDS = ("openai:", "embedded")


def is_spec(model: str | None) -> bool:
    """Whether a sub-call's *model* names an endpoint, not just another model of the same one."""
    return model is not None and model.startswith(_SPEC_KINDS)


class Models:
    """The models that a tree of runs asks.

    Parameters
    ----------
    environ
        Where keys and base URLs are looked up.
    sub
        An endpoint to use in place of what settings name (a program's own).
    """

    def __init__(self, environ: Mapping[str, str], *, sub: Endpoint | None = None) -> None:
        self._environ = environ
        self._given = sub
        self._endpoints: dict[str, Endpoint] = {}
        self._trusted = {parse_sub_spec("openai:any", environ).base_url}
        self._named: set[str] = set()
        for variable in ("RLM_ROOT", "RLM_SUB"):
            self.trust(environ.get(variable, ""))

    def trust(self, text: str) -> None:
        """Servers whose specs stand in *text*, of a program or the environment, get the key."""
        self._trusted |= self._servers(text)

    def name(self, text: str) -> None:
        """Servers whose specs stand in *text*, of a cell, may be asked without a key."""
        self._named |= self._servers(text)

    def _servers(self, text: str) -> set[str]:
        servers = set()
        for found in _SPEC.findall(text):
            with contextlib.suppress(UsageError):  # told where the spec is used
                servers.add(parse_sub_spec(found, self._environ).base_url)
        return servers

    def _key(self, spec: EndpointSpec) -> str:
        if spec.base_url in self._trusted:
            return api_key_for(spec, self._environ)
        if spec.base_url not in self._named:
            raise UsageError(
                f"{spec.base_url} was named by code alone, so it is not asked: write the whole "
                "spec in a cell of yours, or set RLM_ROOT or RLM_SUB"
            )
        if is_private(spec.base_url):
            return "none"
        raise UsageError(
            f"no key is sent to {spec.base_url}, which only a cell names: start the kernel with "
            "OPENAI_BASE_URL, RLM_ROOT or RLM_SUB set to that server"
        )

    async def root(self, spec: str, query: str) -> Root:
        """A new root for one run. Raises `UsageError` for a spec that names none."""
        if not spec:
            raise UsageError("no root is chosen: give --root openai:MODEL@URL, or set RLM_ROOT")
        parsed = parse_root_spec(spec, self._environ)
        if parsed.kind == "human":
            return HumanRoot()
        if parsed.kind == "playbook":
            return PlaybookRoot.from_file(Path(parsed.path), query=query)
        return await self._chat_root(parsed)

    async def _chat_root(self, spec: EndpointSpec) -> Root:
        from rlm_kernel.engine.chat_root import ChatRoot

        if spec.kind == "embedded":
            from rlm_kernel.subcalls.embedded import embedded_server

            server = await embedded_server()
            root = ChatRoot(
                spec.model,
                base_url=server.base_url,
                api_key=server.api_key,
                max_tokens=_EMBEDDED_REPLY,
            )
            root.name = str(spec)
            return root
        key = self._key(spec)
        return ChatRoot(
            spec.model,
            base_url=spec.base_url,
            api_key=key,
            prices=prices_from(self._environ),
        )

    def check_root(self, spec: str) -> None:
        """Raise `UsageError` where *spec* names no root or its key is missing."""
        if not spec:
            raise UsageError("no root is chosen: give --root openai:MODEL@URL, or set RLM_ROOT")
        parsed = parse_root_spec(spec, self._environ)
        if parsed.kind == "openai":
            self._key(parsed)
        if parsed.kind == "playbook" and not Path(parsed.path).is_file():
            raise UsageError(f"there is no playbook {parsed.path!r}: give the path of a file")

    def sub_spec(self, settings: Settings) -> EndpointSpec:
        """What sub-calls go to. Raises `UsageError` where nothing was chosen."""
        if settings.sub:
            return parse_sub_spec(settings.sub, self._environ)
        if settings.root:
            root = parse_root_spec(settings.root, self._environ)
            if root.kind in ("openai", "embedded"):
                return root
        raise UsageError(
            "no model for sub-calls is chosen: give --sub openai:MODEL@URL or --sub embedded, "
            "or set RLM_SUB"
        )

    def sub_name(self, settings: Settings) -> str:
        """The spec of the model of sub-calls; empty where nothing was chosen."""
        if self._given is not None:
            return self._given.spec
        try:
            return str(self.sub_spec(settings))
        except UsageError:
            return ""

    def sub(self, settings: Settings, spec: str | None) -> Endpoint:
        """The endpoint of *spec*, or the one that *settings* name."""
        if spec is not None:
            return self._endpoint(parse_sub_spec(spec, self._environ))
        if self._given is not None:
            return self._given
        return self._endpoint(self.sub_spec(settings))

    async def sub_context(self, settings: Settings) -> int | None:
        """Tokens that the model of sub-calls takes; ``None`` where its server does not say."""
        try:
            async with asyncio.timeout(_CONTEXT_PATIENCE_S):
                return await self.sub(settings, None).context_limit()
        except (RLMError, TimeoutError):
            # No reason to hold up a run: the first sub-call tells what is wrong.
            return None

    def child_settings(self, settings: Settings, model: str | None) -> Settings:
        """Settings of a child run: its root writes code, so it is a chat model in any case.

        The root of the parent serves where it is one, else the model of the sub-calls.
        """
        if is_spec(model):
            root = model or ""
        elif settings.root and parse_root_spec(settings.root, self._environ).kind == "openai":
            parsed = parse_root_spec(settings.root, self._environ)
            root = str(msgspec.structs.replace(parsed, model=model or parsed.model))
        else:
            root = self.sub_name(settings)
        return msgspec.structs.replace(settings, root=root, policy="run")

    def _endpoint(self, spec: EndpointSpec) -> Endpoint:
        name = str(spec)
        if name not in self._endpoints:
            self._endpoints[name] = self._open(spec)
        return self._endpoints[name]

    def _open(self, spec: EndpointSpec) -> Endpoint:
        if spec.kind == "embedded":
            from rlm_kernel.subcalls.embedded import EmbeddedEndpoint

            return EmbeddedEndpoint()
        from rlm_kernel.subcalls.openai_http import OpenAIEndpoint

        return OpenAIEndpoint(spec, self._key(spec), prices=prices_from(self._environ))

    async def close(self) -> None:
        """Drop all connections."""
        endpoints, self._endpoints = list(self._endpoints.values()), {}
        for endpoint in endpoints:
            await endpoint.close()
