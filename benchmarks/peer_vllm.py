"""``vllm bench serve`` with prompts of ours: calls per second, as JSON in the last line.

Run with the interpreter that has vLLM: ``python peer_vllm.py URL MODEL FOLDER OUTPUT_TOKENS``,
with the prompts, a JSON list, as standard input. FOLDER has the model's tokenizer.

The ``vllm`` command asks for the metadata of a package of that name, which the build for CPUs has
not; and its data set of prompts from a file needs pandas, which vLLM does not install. So the
module is called with the prompts in place. What is measured, and how, is its own.
"""

from __future__ import annotations

import argparse
import json
import sys

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest


def main(url: str, model: str, folder: str, output_tokens: int) -> None:
    prompts = json.load(sys.stdin)

    def samples(args: argparse.Namespace, tokenizer: object) -> list[SampleRequest]:
        return [
            SampleRequest(prompt=prompt, prompt_len=1, expected_output_len=output_tokens)
            for prompt in prompts
        ]

    serve.get_samples = samples
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    options = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    options += ["--base-url", url.removesuffix("/v1"), "--model", model, "--tokenizer", folder]
    # Of the default, random, it cuts the prompts to length and lets no reply end by itself.
    options += ["--dataset-name", "custom", "--dataset-path", "-"]
    options += ["--num-prompts", str(len(prompts)), "--temperature", "0", "--disable-tqdm"]
    result = serve.main(parser.parse_args(options))
    if result["completed"] != len(prompts):
        raise SystemExit(f"vllm bench serve lost calls: {result['completed']} of {len(prompts)}")
    print(json.dumps({"calls_per_s": result["request_throughput"]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
