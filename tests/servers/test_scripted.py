"""What tests rely on in the server that they talk to."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from tests.servers.scripted import ScriptedServer


@pytest.mark.parametrize("turns", range(10))
async def test_a_client_that_connects_while_the_server_closes_leaves_no_socket(turns: int) -> None:
    """However many turns of the loop it is ahead; an open one is a warning, thus an error."""
    server = ScriptedServer()
    await server.start()
    client = asyncio.create_task(asyncio.open_connection("127.0.0.1", server.port))
    for _ in range(turns):
        await asyncio.sleep(0)
    await server.close()
    with contextlib.suppress(OSError):
        reader, writer = await client
        with contextlib.suppress(OSError):
            async with asyncio.timeout(20):
                await reader.read()  # until the server has dropped it
        writer.close()
    gc.collect()
