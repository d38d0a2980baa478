"""Sub-calls per second from one cell against a server without latency, recorded.

Peers in the same run: rlms' ``llm_query_batched``, and aiohttp with orjson with nothing around.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import report
from benchmarks.kernels import RunningKernel

CALLS = 4000
PEER_CALLS = 800
ROUNDS = 3
HERE = Path(__file__).parent


@contextmanager
def zero_latency_server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "zero_latency.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    finally:
        process.stdin.close()
        process.wait(10)


async def raw_aiohttp(url: str, calls: int, concurrency: int = 32) -> float:
    """Seconds for *calls* with a pool of *concurrency* coroutines."""
    import aiohttp
    import orjson

    numbers = iter(range(calls))

    async def work(session: aiohttp.ClientSession) -> None:
        for i in numbers:
            body = {
                "model": "zero",
                "messages": [{"role": "user", "content": f"item {i}: name it"}],
            }
            async with session.post(
                f"{url}/chat/completions",
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
            ) as reply:
                answer = orjson.loads(await reply.read())
                assert answer["choices"][0]["message"]["content"] == "ok"

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(work(session) for _ in range(concurrency)))
        return time.perf_counter() - begin


def rlms(url: str, calls: int) -> float:
    done = subprocess.run(
        [sys.executable, str(HERE / "peer_rlms.py"), url, str(calls)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    ours, theirs, raw = [], [], []
    with tempfile.TemporaryDirectory() as folder, zero_latency_server() as url:
        os.environ["RLM_SUB"] = f"openai:zero@{url}"
        os.environ["RLM_NOTEBOOK"] = str(Path(folder) / "bench.ipynb")
        with RunningKernel("rlm") as kernel:
            kernel.execute("llm_query_batched(['warm'] * 32);")
            for _ in range(ROUNDS):
                seconds = kernel.execute(
                    f"r = llm_query_batched([f'item {{i}}: name it' for i in range({CALLS})])\n"
                    f"assert r == ['ok'] * {CALLS}, r[:3]"
                )
                ours.append(CALLS / seconds)
                theirs.append(PEER_CALLS / rlms(url, PEER_CALLS))
                raw.append(CALLS / asyncio.run(raw_aiohttp(url, CALLS)))
    name = "sub-calls from one cell, zero-latency server, recorded"
    report(name, "calls/s", ours, peer="rlms", theirs=theirs, reach=8.0, better="higher")
    report(name, "calls/s", ours, peer="aiohttp+orjson", theirs=raw, reach=0.6, better="higher")


if __name__ == "__main__":
    main()
