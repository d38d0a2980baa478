"""rlms' ``llm_query_batched`` from a cell of its local REPL: seconds for N calls, as JSON.

Run with the interpreter that has rlms: ``python peer_rlms.py URL CALLS``.
"""

from __future__ import annotations

import json
import sys
import time

from rlm.clients import get_client
from rlm.core.lm_handler import LMHandler
from rlm.environments.local_repl import LocalREPL


def main(url: str, calls: int) -> None:
    client = get_client("vllm", {"base_url": url, "api_key": "none", "model_name": "zero"})
    with LMHandler(client) as handler, LocalREPL(lm_handler_address=handler.address) as repl:
        # No warm-up: rlms 0.1.3 runs each batch in an event loop of its own and its client keeps
        # connections of the last one, so the first 16 calls of a second batch come back as errors.
        begin = time.perf_counter()
        result = repl.execute_code(
            f"r = llm_query_batched([f'item {{i}}: name it' for i in range({calls})])\n"
            "print(len(r), sum(x == 'ok' for x in r))"
        )
        seconds = time.perf_counter() - begin
    if result.stdout.split() != [str(calls), str(calls)]:
        raise SystemExit(f"rlms lost calls: {result.stdout!r} {result.stderr!r}")
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
