"""Asking a fleet, and telling which of its servers was asked."""

from __future__ import annotations

import asyncio

from rlm_kernel.cells import SubcallParams
from rlm_kernel.subcalls.endpoint import Reply
from rlm_kernel.subcalls.fleet.fleet import Fleet
from tests.servers.scripted import ScriptedServer

PLAIN = SubcallParams()


async def ask(fleet: Fleet, prompt: str = "x") -> Reply:
    return await fleet.complete(prompt, PLAIN)


async def ask_all(fleet: Fleet, prompts: list[str]) -> list[Reply | BaseException]:
    calls = (fleet.complete(prompt, PLAIN) for prompt in prompts)
    return await asyncio.gather(*calls, return_exceptions=True)


def counts(servers: list[ScriptedServer]) -> list[int]:
    return [len(server.requests) for server in servers]


def of(servers: list[ScriptedServer], url: str) -> ScriptedServer:
    return next(server for server in servers if server.base_url == url)


async def favourite(fleet: Fleet, servers: list[ScriptedServer], prompt: str) -> ScriptedServer:
    """The server that an idle fleet sends *prompt* to."""
    return of(servers, (await ask(fleet, prompt)).server)
