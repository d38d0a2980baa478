"""What is read from vLLM's own output: its metrics, and its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlm_kernel.subcalls.vllm.log import LogReader, failure_in
from rlm_kernel.subcalls.vllm.metrics import figures_of

METRICS = r"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}\"b,{ x"} 2.0
vllm:num_requests_running{engine="1",model_name="a"} 3.0 1700000000000
vllm:num_requests_running_total{engine="1"} 99
vllm:num_requests_waiting_by_reason{reason="x"} 99
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:prefix_cache_queries_total 1.024e+03
vllm:prefix_cache_hits_total NaN
process_resident_memory_bytes 5
garbage here and there
"""


def test_figures_are_those_of_all_engines() -> None:
    """Counts add up, the cache's use is the mean; what is not told stays unknown."""
    figures = figures_of(METRICS)

    assert figures.running == 5
    assert figures.waiting is None
    assert figures.cache_used == 0.5
    assert figures.query_tokens == 1024
    assert figures.hit_tokens is None
    assert figures.hit_rate is None


def test_no_prompts_yet_is_no_hit_rate() -> None:
    """And no division by nothing."""
    zero = "vllm:prefix_cache_queries_total 0.0\nvllm:prefix_cache_hits_total 0.0\n"

    assert figures_of(zero).hit_rate is None
    assert figures_of("") == figures_of("\x00\n{}\n")


PREFIX = "(EngineCore pid=12) ERROR 11-30 14:02:11 [core.py:845] "
MEMORY = "ValueError: Free memory on device (1/80 GiB) is less than desired"
PYDANTIC = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, the model is too long [type=value_error, input_value=1]
    For further information visit https://example.org
"""
POINTER = "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            f"{PREFIX}{MEMORY}\n(APIServer pid=1) Traceback:\n(APIServer pid=1) {POINTER}\n",
            MEMORY,
        ),
        (
            PYDANTIC,
            "Value error, the model is too long",
        ),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --x\n",
            "api_server.py: error: unrecognized arguments: --x",
        ),
        (
            "ModuleNotFoundError: No module named 'uvloop'\n",
            "ModuleNotFoundError: No module named 'uvloop'",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.\n" + POINTER, "torch.OutOfMemoryError: CUDA"),
        ("(APIServer pid=1) INFO 11-30 14:02:11 [a.py:1] all is well\n", ""),
        (f"{POINTER}\n", ""),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_the_line_that_names_it(
    tmp_path: Path, log: str, reason: str
) -> None:
    """Not the lines after it that only point to it."""
    path = tmp_path / "log"
    path.write_text(log)

    found = failure_in(path)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_missing_log_has_no_reason_and_no_phase(tmp_path: Path) -> None:
    assert failure_in(tmp_path / "none") == ""
    assert LogReader(tmp_path / "none").read() == "starting"


def test_the_phase_follows_the_log(tmp_path: Path) -> None:
    """Lines are taken when they are whole; what says nothing changes nothing."""
    path = tmp_path / "log"
    reader = LogReader(path)
    seen = []
    for piece in (
        "INFO [core.py:133] Initializing a V1 LLM engine with config: {'dynamo': 1}\n",
        "Loading safetensors checkpoint shards:  50% Comp",
        "leted | 1/2\nsomething else\n",
        "INFO [decorators.py:743] saved AOT compiled function\n",
        "INFO [core.py:402] init engine (profile, create kv cache) took 1 s\n",
        "INFO [entry.py:140] Starting vLLM server on http://127.0.0.1:1\n",
    ):
        with path.open("a") as file:
            file.write(piece)
        seen.append(reader.read())

    assert seen == [
        "starting its engine",
        "starting its engine",
        "loading weights (50 %)",
        "compiling",
        "setting up its cache",
        "opening its port",
    ]
