"""Turns specs into roots and endpoints, each endpoint once per process.

Keys stay where they belong. Code in the worker can ask for any endpoint, in a
sub-call or by pretending to be a front end. So a key goes only to servers
that the environment names (RLM_ROOT, RLM_SUB, OPENAI_BASE_URL) or a program;
one whose spec stands in a cell may be asked too, without a key; others not.
Servers that ``jupyter rlm serve`` started are on this machine and need none:
anybody may ask them, and they are found where no model was chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from rlm_kernel.subcalls.vllm.local import LocalServers

if TYPE_CHECKING:
    from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

__all__ = ["Models", "is_spec"]

_EMBEDDED_REPLY = 400
"""Tokens: a model this small rarely comes to an end by itself."""

_CONTEXT_PATIENCE_S = 5.0

MOST_OPEN = 64
"""Endpoints that are kept open: code in a cell may name any number of them."""

_SPEC = re.compile(r"(?:openai|vllm):[^\s'\"]+")

_SPEC_KINDS = ("openai:", "vllm:", "embedded:")


def is_spec(model: str | None) -> bool:
    """Whether a sub-call's *model* names an endpoint, not just another model of the same one."""
    return model is not None and (model in ("vllm", "embedded") or model.startswith(_SPEC_KINDS))


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
        """By spec, the one that was asked for last at the end."""
        self._retired: list[Endpoint] = []
        self._questioned: list[Endpoint] = []
        """Of which something other than a completion is being asked."""
        self._closing: set[asyncio.Task[None]] = set()
        self._local = LocalServers(environ)
        self._turns = itertools.count()
        self._trusted = set(parse_sub_spec("openai:any", environ).urls)
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
        servers: set[str] = set()
        for found in _SPEC.findall(text):
            with contextlib.suppress(UsageError):  # told where the spec is used
                servers.update(parse_sub_spec(found, self._environ).urls)
        return servers

    def _key(self, spec: EndpointSpec) -> str:
        """The key for the one server of *spec*."""
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
            from rlm_kernel.subcalls.embedded.endpoint import embedded_server

            server = await embedded_server()
            root = ChatRoot(
                spec.model,
                base_url=server.base_url,
                api_key=server.api_key,
                max_tokens=_EMBEDDED_REPLY,
            )
            root.name = str(spec)
            return root
        # A conversation stays with one server, whose prefix cache knows it; roots of child runs
        # are spread over all.
        urls = spec.urls or self._local.urls(spec)
        one = self._local.named(spec).at(urls[next(self._turns) % len(urls)])
        root = ChatRoot(
            one.model,
            base_url=one.base_url,
            api_key=self._key(one) if spec.urls else "none",
            prices=prices_from(self._environ),
        )
        root.name = str(one)
        return root

    def check_root(self, spec: str) -> None:
        """Raise `UsageError` where *spec* names no root, its key is missing or nobody serves it."""
        if not spec:
            raise UsageError("no root is chosen: give --root openai:MODEL@URL, or set RLM_ROOT")
        parsed = parse_root_spec(spec, self._environ)
        for url in parsed.urls:
            self._key(parsed.at(url))
        if parsed.kind == "vllm" and not parsed.urls:
            self._local.urls(parsed)
        if parsed.kind == "playbook" and not Path(parsed.path).is_file():
            raise UsageError(f"there is no playbook {parsed.path!r}: give the path of a file")

    def sub_spec(self, settings: Settings) -> EndpointSpec:
        """What sub-calls go to. Raises `UsageError` where nothing was chosen and nothing found."""
        if settings.sub:
            return self._located(parse_sub_spec(settings.sub, self._environ))
        if settings.root:
            root = parse_root_spec(settings.root, self._environ)
            if root.is_server or root.kind == "embedded":
                return self._located(root)
        return self._local.only()

    def _located(self, spec: EndpointSpec) -> EndpointSpec:
        """*spec* with its model, checked that it is served now or was before."""
        if spec.kind != "vllm" or spec.urls:
            return spec
        spec = self._local.named(spec)
        if str(spec) not in self._endpoints:
            self._local.urls(spec)
        return spec

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
            return self._endpoint(self._located(parse_sub_spec(spec, self._environ)))
        if self._given is not None:
            return self._given
        return self._endpoint(self.sub_spec(settings))

    async def sub_context(self, settings: Settings) -> int | None:
        """Tokens that the model of sub-calls takes; ``None`` where its server does not say."""
        try:
            endpoint = self.sub(settings, None)
            self._questioned.append(endpoint)
            try:
                async with asyncio.timeout(_CONTEXT_PATIENCE_S):
                    return await endpoint.context_limit()
            finally:
                self._questioned.remove(endpoint)
        except (RLMError, TimeoutError):
            # No reason to hold up a run: the first sub-call tells what is wrong.
            return None

    def child_settings(self, settings: Settings, model: str | None) -> Settings:
        """Settings of a child run: its root writes code, so it is a chat model in any case.

        The root of the parent serves where it is one, else the model of the sub-calls.
        """
        if is_spec(model):
            root = model or ""
        elif settings.root and parse_root_spec(settings.root, self._environ).is_server:
            parsed = parse_root_spec(settings.root, self._environ)
            root = str(msgspec.structs.replace(parsed, model=model or parsed.model))
        else:
            root = self.sub_name(settings)
        return msgspec.structs.replace(settings, root=root, policy="run")

    def _endpoint(self, spec: EndpointSpec) -> Endpoint:
        name = str(spec)
        endpoint = self._endpoints.pop(name, None)
        if endpoint is not None and self._has_more(spec, endpoint):
            self._retired.append(endpoint)  # calls that are under way end there
            endpoint = None
        if endpoint is None:
            endpoint = self._open(spec)
            self._close_idle()
        self._endpoints[name] = endpoint
        return endpoint

    def _close_idle(self) -> None:
        """Make room for one more endpoint: close those that nobody has asked for the longest."""
        for endpoint in [one for one in self._retired if self._is_idle(one)]:
            self._retired.remove(endpoint)
            self._close_soon(endpoint)
        idle = [name for name, one in self._endpoints.items() if self._is_idle(one)]
        for name in idle[: max(0, len(self._endpoints) + 1 - MOST_OPEN)]:
            self._close_soon(self._endpoints.pop(name))

    def _is_idle(self, endpoint: Endpoint) -> bool:
        return endpoint.on_room is None and endpoint not in self._questioned

    def _close_soon(self, endpoint: Endpoint) -> None:
        task = asyncio.get_running_loop().create_task(endpoint.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _has_more(self, spec: EndpointSpec, endpoint: Endpoint) -> bool:
        """Whether there are servers of *spec* by now that *endpoint* does not know."""
        if spec.kind != "vllm" or spec.urls:
            return False
        from rlm_kernel.subcalls.fleet.fleet import Fleet

        with contextlib.suppress(UsageError):  # none is there: it may be about to come back
            return isinstance(endpoint, Fleet) and not set(self._local.urls(spec)) <= set(
                endpoint.urls
            )
        return False

    def _open(self, spec: EndpointSpec) -> Endpoint:
        if spec.kind == "embedded":
            from rlm_kernel.subcalls.embedded.endpoint import EmbeddedEndpoint

            return EmbeddedEndpoint()
        from rlm_kernel.subcalls.fleet.fleet import Fleet

        name, model = str(spec), spec.model
        if not spec.urls:
            again = partial(self._find_again, spec)
            return Fleet(name, model, self._found(spec), rediscover=again)
        # One server too: its calls wait for it where it is started again.
        keys = [self._key(spec.at(url)) for url in spec.urls]
        members = [
            self._member(spec.at(url), key) for url, key in zip(spec.urls, keys, strict=True)
        ]
        return Fleet(name, model, members)

    def _found(self, spec: EndpointSpec) -> list[OpenAIEndpoint]:
        return [self._member(spec.at(url), "none") for url in self._local.urls(spec)]

    async def _find_again(self, spec: EndpointSpec) -> list[OpenAIEndpoint]:
        """The servers of *spec* by now: some may have been started again on other ports."""
        with contextlib.suppress(UsageError):  # none is there; more may come
            return self._found(spec)
        return []

    def _member(self, spec: EndpointSpec, key: str) -> OpenAIEndpoint:
        from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

        return OpenAIEndpoint(spec, key, prices=prices_from(self._environ))

    async def close(self) -> None:
        """Drop all connections."""
        await asyncio.gather(*self._closing)
        endpoints = [*self._endpoints.values(), *self._retired]
        self._endpoints, self._retired = {}, []
        for endpoint in endpoints:
            await endpoint.close()
