"""What is started for which arguments, without starting it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.vllm.gpus import choose_gpus
from rlm_kernel.subcalls.vllm.interpreter import Interpreter
from rlm_kernel.subcalls.vllm.plan import Planned, environment_for, plan_servers
from rlm_kernel.subcalls.vllm.ports import PortKeeper
from rlm_kernel.subcalls.vllm.registry import Registry

SCRIPT = Interpreter(
    path="/p", version="0.32.0", module=("-m", "vllm.entrypoints.openai.api_server")
)
COMMAND = Interpreter(path="/p", version="1.0", module=("-m", "vllm.entrypoints.cli.main", "serve"))
FOUR = ["0", "1", "2", "3"]


@pytest.fixture
def ports() -> Iterator[PortKeeper]:
    with PortKeeper() as keeper:
        yield keeper


def gpus_of(planned: list[Planned]) -> list[tuple[str, ...]]:
    return [one.gpus for one in planned]


def test_each_gpu_gets_a_server_with_a_name_and_a_port_of_its_own(ports: PortKeeper) -> None:
    planned = plan_servers("Qwen/Qwen3-8B", FOUR, [], interpreter=SCRIPT, ports=ports)

    assert gpus_of(planned) == [("0",), ("1",), ("2",), ("3",)]
    assert [one.name for one in planned] == [f"qwen3-8b-{n}" for n in range(4)]
    assert {one.group for one in planned} == {"qwen3-8b"}
    assert len({one.port for one in planned}) == 4
    assert all("--data-parallel-size" not in one.args for one in planned)


def test_data_parallel_is_one_server_with_an_engine_for_each_gpu(ports: PortKeeper) -> None:
    (one,) = plan_servers("m", FOUR, [], interpreter=SCRIPT, ports=ports, data_parallel=True)

    assert one.gpus == ("0", "1", "2", "3")
    assert one.args[one.args.index("--data-parallel-size") + 1] == "4"


@pytest.mark.parametrize("extra", [["-tp", "2"], ["--tensor_parallel_size=2"], ["-pp=2"]])
def test_a_model_that_is_spread_gets_as_many_gpus(ports: PortKeeper, extra: list[str]) -> None:
    """And the engines of a data-parallel server are fewer."""
    planned = plan_servers("m", FOUR, extra, interpreter=SCRIPT, ports=ports)
    (one,) = plan_servers("m", FOUR, extra, interpreter=SCRIPT, ports=ports, data_parallel=True)

    assert gpus_of(planned) == [("0", "1"), ("2", "3")]
    assert one.args[one.args.index("--data-parallel-size") + 1] == "2"
    with pytest.raises(UsageError, match="3 GPUs cannot be shared out among servers of 2"):
        plan_servers("m", FOUR[:3], extra, interpreter=SCRIPT, ports=ports)


def test_later_vllm_without_the_old_module_gets_the_model_as_its_command_takes_it(
    ports: PortKeeper,
) -> None:
    (one,) = plan_servers("org/m", [], [], interpreter=COMMAND, ports=ports)

    assert one.args[0] == "org/m"
    assert "--model" not in one.args


def test_a_server_sees_its_gpus_and_no_key(ports: PortKeeper) -> None:
    """In the order in which they were counted."""
    first, _ = plan_servers("m", ["4", "2"], [], interpreter=SCRIPT, ports=ports)
    environ = environment_for(first, {"OPENAI_API_KEY": "k", "HF_HOME": "/h"})

    assert environ["CUDA_VISIBLE_DEVICES"] == "4"
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environ["HF_HOME"] == "/h"
    assert "OPENAI_API_KEY" not in environ


def test_given_ports_follow_each_other(ports: PortKeeper) -> None:
    """Where one of them is taken nothing is planned."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        first = other.getsockname()[1] - 1
        with pytest.raises(UsageError, match=f"port {first + 1} is taken"):
            plan_servers("m", FOUR[:2], [], interpreter=SCRIPT, ports=ports, port=first)


def test_a_port_is_kept_until_it_is_let_go(ports: PortKeeper) -> None:
    """From other keepers, not from a server that reuses addresses, as vLLM does."""
    (port,) = ports.keep(1, None)
    with PortKeeper() as other:
        assert other.keep(1, None) != [port]
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        server.bind(("127.0.0.1", port))
        server.listen()
    ports.let_go()
    with PortKeeper() as other:
        assert other.keep(1, port) == [port]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("all", ["a", "b", "c", "d"]),
        ("0-3", ["a", "b", "c", "d"]),
        ("2", ["c"]),
        ("3,0-1,0", ["d", "a", "b"]),
        (" 1 , 2 ", ["b", "c"]),
    ],
)
def test_gpus_are_chosen_by_their_place(given: str, chosen: list[str]) -> None:
    """Among those that a CUDA program would see, each once."""
    assert choose_gpus(given, ["a", "b", "c", "d"]) == chosen


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("4", "there is no GPU 4: this machine has 0-3"),
        ("0-7", "there is no GPU 4"),
        ("3-1", "a range that ends before it begins"),
        ("-1", "--gpus takes numbers"),
        ("", "--gpus takes numbers"),
        ("cuda:0", "--gpus takes numbers"),
        ("0-99999999999", "--gpus takes numbers"),
    ],
)
def test_gpus_that_are_not_there_are_refused(given: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        choose_gpus(given, FOUR)


def test_servers_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    """A GPU is held by one command at a time, all of its GPUs or none; it ends with it."""
    first, second = Registry(tmp_path), Registry(tmp_path)
    held = first.try_lock(["gpu-0", "gpu-1"])
    assert held is not None
    assert second.try_lock(["gpu-1", "gpu-2"]) is None
    other = second.try_lock(["gpu-2"])
    assert other is not None
    for descriptor in held:
        os.close(descriptor)
    again = second.try_lock(["gpu-0", "gpu-1"])
    assert again is not None
    for descriptor in (*other, *again):
        os.close(descriptor)
