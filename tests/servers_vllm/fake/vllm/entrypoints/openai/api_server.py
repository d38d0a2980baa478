"""Stands for vLLM's API server: its arguments, its log, its processes and its ends, but no model.

It binds its port late, starts an engine process in its own process group which outlives it, and
ends as vLLM does. What it does beside that is told by its model's name:

    missing/…    there is no such model: it ends with vLLM's error
    late/…       it binds its port only when the file FAKE_VLLM_GATE is there
    stubborn/…   SIGTERM ends its engine but not itself, as with requests under way
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys

from aiohttp import web

ENGINE = "import time; time.sleep(240)  # an engine"
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="%(model)s"} 3.0
vllm:num_requests_waiting{engine="0",model_name="%(model)s"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="%(model)s"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="%(model)s"} 2000.0
vllm:prefix_cache_hits_total{engine="0",model_name="%(model)s"} 1600.0
"""


def log(text: str) -> None:
    print(f"(APIServer pid={os.getpid()}) INFO 11-30 14:01:47 [core.py:1] {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="api_server.py")
    for name in ("--model", "--host", "--served-model-name", "--max-model-len"):
        parser.add_argument(name)
    for name in ("--port", "--data-parallel-size", "--tensor-parallel-size", "--block-size"):
        parser.add_argument(name, type=int)
    for name in ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name = args.served_model_name or args.model
        self.engine = subprocess.Popen([sys.executable, "-c", ENGINE])
        print(f"ENGINE {self.engine.pid}", flush=True)
        self.ended = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/environ", self.environ)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.name, "owned_by": "vllm", "max_model_len": 2048}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS % {"model": self.name})

    async def environ(self, request: web.Request) -> web.Response:
        return web.json_response(dict(os.environ))

    async def complete(self, request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": f"from {self.args.port}"}
        key = request.headers.get("Authorization")
        if key is not None:
            message["content"] += f" with {key}"
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"model": self.name, "choices": [choice], "usage": usage})

    def terminate(self) -> None:
        self.engine.kill()
        if not self.args.model.startswith("stubborn/"):
            self.ended.set()


async def serve(args: argparse.Namespace) -> None:
    server = Server(args)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.terminate)
    log("Starting to load model")
    gate = os.environ.get("FAKE_VLLM_GATE", "")
    is_late = args.model.startswith("late/")
    while is_late and not os.access(gate, os.F_OK) and not server.ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.ended.wait(), 0.05)
    log(f"Starting vLLM server on http://{args.host}:{args.port}")
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    await server.ended.wait()
    await runner.cleanup()


def main() -> None:
    args = arguments()
    log(f"non-default args: {vars(args)}")
    if args.model.startswith("missing/"):
        raise OSError(f"{args.model} is not a local folder and is not a valid model identifier")
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
