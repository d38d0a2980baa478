"""A real vLLM server, asked from one cell: is it kept as busy as by vLLM's own benchmark?

``python -m benchmarks.bench_vllm``, with RLM_VLLM_PYTHON or after ``make test-vllm``. The peer is
``vllm bench serve`` with the same prompts, in turn; before each turn the server's prefix cache is
emptied, so that both find the same. The peer of an interrupt is a client that just closes as many
connections: an engine looks up from its work only between two steps, however it is told.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import report
from tests.kernel.client import Kernel
from tests.vllm.install import installed_python
from tests.vllm.model import converted_model
from tests.vllm.prompts import INSTRUCTION
from tests.vllm.servers import MODEL, Machine, Server, until

CALLS = 256
OUTPUT_TOKENS = 16
ROUNDS = 3
INTERRUPTS = 5
PATIENCE_S = 600.0
HERE = Path(__file__).parent
STORIES = [f"Tell a story about {n} ships." for n in range(200)]


def prompts_of(turn: int) -> list[str]:
    """An instruction of 300 tokens and a short line each."""
    numbers = range(turn * CALLS, (turn + 1) * CALLS)
    return [f"{INSTRUCTION}\n\nimport {n}: {n * 7919 % 1000} rows" for n in numbers]


def ours(kernel: Kernel, prompts: list[str]) -> float:
    """Calls per second of one cell."""
    prepared = kernel.run(f"import json\nprompts = json.loads({json.dumps(prompts)!r})")
    assert prepared.status == "ok", prepared.evalue
    begin = time.perf_counter()
    cell = kernel.run(
        f"r = sub_RLM(prompts, max_tokens={OUTPUT_TOKENS}, temperature=0)", timeout=PATIENCE_S
    )
    seconds = time.perf_counter() - begin
    assert cell.status == "ok", cell.evalue
    answered = kernel.run("print(sum(isinstance(x, str) for x in r))").text().strip()
    assert answered == str(len(prompts)), f"{answered} of {len(prompts)} were answered"
    return len(prompts) / seconds


def theirs(machine: Machine, server: Server, prompts: list[str]) -> float:
    """Calls per second of ``vllm bench serve``."""
    # -P: this folder has modules of names that others use too.
    command = [str(machine.python), "-P", str(HERE / "peer_vllm.py"), server.url, MODEL]
    done = subprocess.run(
        [*command, str(machine.model), str(OUTPUT_TOKENS)],
        input=json.dumps(prompts),
        check=False,
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["calls_per_s"])


class Side:
    """One of the two that are compared: what it reached, and what the server counted then."""

    def __init__(self, server: Server, run: Callable[[list[str]], float]) -> None:
        self._server, self._run = server, run
        self.rates: list[float] = []
        self.prompt_tokens: list[int] = []
        self.reply_tokens: list[int] = []
        self.hit_rates: list[float] = []

    def take_turn(self, prompts: list[str]) -> None:
        self._server.post("/reset_prefix_cache")
        before = self._server.metrics()
        self.rates.append(self._run(prompts))
        after = self._server.metrics()
        grown = {name: after[name] - before[name] for name in before}
        self.prompt_tokens.append(int(grown["prompt_tokens_total"]))
        self.reply_tokens.append(int(grown["generation_tokens_total"]))
        hits, queries = grown["prefix_cache_hits_total"], grown["prefix_cache_queries_total"]
        self.hit_rates.append(hits / queries)


def bench_throughput(machine: Machine, server: Server, kernel: Kernel) -> None:
    """In turn, and who begins changes too."""
    mine = Side(server, lambda prompts: ours(kernel, prompts))
    peer = Side(server, lambda prompts: theirs(machine, server, prompts))
    for turn in range(ROUNDS):
        for side in (mine, peer) if turn % 2 == 0 else (peer, mine):
            side.take_turn(prompts_of(turn))
    assert mine.prompt_tokens == peer.prompt_tokens, "the two did not ask the same"
    report(
        "sub-calls from one cell, vLLM, recorded",
        "calls/s",
        mine.rates,
        peer="vllm bench serve",
        theirs=peer.rates,
        reach=0.95,
        better="higher",
        calls=CALLS,
        samples=[[round(rate, 2) for rate in side.rates] for side in (mine, peer)],
        reply_tokens=[mine.reply_tokens, peer.reply_tokens],
    )
    report(
        f"prefix cache, {CALLS} items, instruction of 300 tokens",
        "of the tokens",
        mine.hit_rates,
        reach=0.8,
        better="higher",
    )


def is_generating(server: Server) -> Callable[[], bool]:
    """A condition: from now on the server has written some tokens and is busy."""
    before = server.metric("generation_tokens_total")

    def met() -> bool:
        metrics = server.metrics()
        written = metrics["generation_tokens_total"] - before
        return written > 2 * metrics["num_requests_running"] > 0

    return met


def interrupted(server: Server, kernel: Kernel) -> tuple[float, int]:
    """Seconds from the interrupt of a cell to a server without a request, and how many it had."""
    condition = is_generating(server)
    request = kernel.send(f"sub_RLM({STORIES!r}, max_tokens=200)")
    until(condition, "the server writes nothing")
    metrics = server.metrics()
    under_way = int(metrics["num_requests_running"] + metrics["num_requests_waiting"])
    begin = time.perf_counter()
    kernel.interrupt()
    until(lambda: server.is_idle, "the server works on")
    seconds = time.perf_counter() - begin
    kernel.collect(request, PATIENCE_S)
    return seconds, under_way


async def disconnected(server: Server, calls: int) -> float:
    """The same where a client closes its connections."""
    import aiohttp

    async def ask(session: aiohttp.ClientSession, prompt: str) -> None:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 200}
        async with session.post(f"{server.url}/chat/completions", json=body) as response:
            await response.read()

    condition = is_generating(server)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [asyncio.create_task(ask(session, prompt)) for prompt in STORIES[:calls]]
        await asyncio.to_thread(until, condition, "the server writes nothing")
        begin = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(until, lambda: server.is_idle, "the server works on")
        return time.perf_counter() - begin


def bench_interrupt(server: Server, kernel: Kernel) -> None:
    """In turn."""
    mine, peer, counts = [], [], []
    for _ in range(INTERRUPTS):
        seconds, under_way = interrupted(server, kernel)
        mine.append(seconds)
        counts.append(under_way)
        peer.append(asyncio.run(disconnected(server, under_way)))
    report(
        "interrupt of a cell to an idle server, vLLM",
        "s",
        mine,
        reach=1.0,
        slowest=round(max(mine), 3),
        calls_under_way=counts,
        connections_closed=round(statistics.median(peer), 3),
    )


def main() -> None:
    python = installed_python()
    if python is None:
        print("# vLLM is not here: set RLM_VLLM_PYTHON, or run make test-vllm", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = Machine(folder / "servers", python, converted_model(python))
        machine.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
        try:
            server = machine.serve("bench")
            notebook = {"RLM_NOTEBOOK": str(folder / "bench.ipynb"), "RLM_SUB": server.spec}
            with Kernel({**machine.environ, **notebook}, cwd=name) as kernel:
                kernel.run("sub_RLM(['Say a word.'] * 4, max_tokens=2)", timeout=PATIENCE_S)
                bench_throughput(machine, server, kernel)
                bench_interrupt(server, kernel)
        finally:
            machine.close()


if __name__ == "__main__":
    main()
