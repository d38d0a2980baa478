"""What is to be started: how many servers, on which GPUs and ports, with which arguments.

One server for each GPU, and not one with as many engines: a failure takes one GPU, and each server
keeps its own prefix cache, which the fleet of the kernel knows how to hit. A model that is spread
over several GPUs gets as many for each server as vLLM's own arguments say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import msgspec

from rlm_kernel.environ import scrub
from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.vllm.interpreter import Interpreter
from rlm_kernel.subcalls.vllm.ports import HOST, PortKeeper
from rlm_kernel.subcalls.vllm.registry import ServerEntry

__all__ = ["Planned", "environment_for", "model_argument", "plan_servers"]

_OURS = {
    "--model": "give MODEL first",
    "--host": f"servers listen on {HOST} alone",
    "--port": "give --port before the --",
    "--uds": f"servers listen on {HOST} alone",
    "--api-key": "servers on this machine need none, and it would show in the list of processes",
    "--data-parallel-size": "give --data-parallel before the --",
    "-dp": "give --data-parallel before the --",
    "--device-ids": "give --gpus before the --",
    "--headless": "it has no API",
    "--grpc": "it has no API that is spoken here",
    "--ssl-keyfile": f"servers listen on {HOST} alone",
    "--root-path": "the API is at /v1",
}
"""vLLM's options that cannot be given, and why."""

_SPREAD = {
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--pipeline-parallel-size": "pp",
    "-pp": "pp",
}
_CPU_BLOCK = 32
"""Tokens. The prefix cache keeps whole blocks: with the 128 of vLLM's CPU build an instruction of
300 tokens is kept to 85 % only, with 32 to 96 %, and calls are half as fast again."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One server that is to be started."""

    name: str
    group: str
    model: str
    gpus: tuple[str, ...]
    port: int
    args: tuple[str, ...]
    """Of vLLM, without its module."""

    @property
    def url(self) -> str:
        """Base of its API."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def place(self) -> str:
        """Where it works, for people."""
        if not self.gpus:
            return "CPU"
        return f"GPU {','.join(self.gpus)}"


def model_argument(given: str) -> str:
    """The model as vLLM is told it: a folder by its whole path, so that it has one name."""
    path = Path(given).expanduser()
    if not given.strip() or given.startswith("-"):
        raise UsageError(f"{given!r} is no model: give its name, such as Qwen/Qwen3-8B, or a path")
    if given.startswith(("/", "./", "../", "~")) and not path.exists():
        raise UsageError(f"there is no model {given}: give the path of its folder, or its name")
    return os.path.abspath(path) if path.is_dir() else given


def plan_servers(
    model: str,
    gpus: Sequence[str],
    extra: Sequence[str],
    *,
    interpreter: Interpreter,
    data_parallel: bool = False,
    ports: PortKeeper,
    port: int | None = None,
    name: str = "",
    others: Sequence[ServerEntry] = (),
) -> list[Planned]:
    """The servers for *model* on *gpus*, or one on the CPU where those are none.

    Their ports, from *port* on where that is given, are kept by *ports*. *others* are the servers
    that are there.

    Raises
    ------
    UsageError
        *extra* has an option that is ours, the GPUs cannot be shared out, or a port is taken.
    """
    spread = _check_extra(extra)
    if gpus and len(gpus) % spread:
        raise UsageError(
            f"{len(gpus)} GPUs cannot be shared out among servers of {spread} each: "
            f"give --gpus a multiple of {spread}"
        )
    groups = _groups(gpus, len(gpus) if data_parallel else spread)
    engines = len(gpus) // spread if data_parallel else 1
    base = name or _free_name(model, len(groups), {entry.name for entry in others})
    numbers = ports.keep(len(groups), port, {entry.port for entry in others})
    return [
        Planned(
            name=base if len(groups) == 1 else f"{base}-{index}",
            group=base,
            model=_served_name(model, extra),
            gpus=tuple(group),
            port=numbers[index],
            args=_arguments(model, numbers[index], engines, extra, interpreter),
        )
        for index, group in enumerate(groups)
    ]


def environment_for(planned: Planned, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: without keys, since code in cells can read it."""
    made = scrub(environ)
    made["PYTHONSAFEPATH"] = "1"  # the folder that the command is given in holds no modules for it
    made.setdefault("VLLM_HOST_IP", HOST)  # its processes talk to each other there
    if planned.gpus:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(planned.gpus)
        made.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML counts
    return made


def _arguments(
    model: str, port: int, engines: int, extra: Sequence[str], interpreter: Interpreter
) -> tuple[str, ...]:
    args = ["--model", model] if "serve" not in interpreter.module else [model]
    args += ["--host", HOST, "--port", str(port)]
    args += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if engines > 1:
        args += ["--data-parallel-size", str(engines)]
    if interpreter.is_cpu and not _has(extra, "--block-size"):
        args += ["--block-size", str(_CPU_BLOCK)]
    return (*args, *extra)


def _check_extra(extra: Sequence[str]) -> int:
    """GPUs that one engine needs. Raises `UsageError` for an option that is not the person's."""
    sizes = {"tp": 1, "pp": 1}
    for at, word in enumerate(extra):
        option, is_joined, joined = word.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        if option in _OURS:
            raise UsageError(f"{option} cannot be given to vLLM here: {_OURS[option]}")
        if option in _SPREAD:
            value = joined if is_joined else "".join(extra[at + 1 : at + 2])
            if not re.fullmatch(r"[1-9]\d{0,3}", value):
                raise UsageError(f"{option} needs a number of GPUs, not {value[:20]!r}")
            sizes[_SPREAD[option]] = int(value)
    return sizes["tp"] * sizes["pp"]


def _has(extra: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == option for word in extra)


def _served_name(model: str, extra: Sequence[str]) -> str:
    """The name that clients use: the first that ``--served-model-name`` gives."""
    for at, word in enumerate(extra):
        option, is_joined, joined = word.partition("=")
        if option.replace("_", "-") == "--served-model-name":
            given = joined if is_joined else "".join(extra[at + 1 : at + 2])
            return given or model
    return model


def _groups(gpus: Sequence[str], size: int) -> list[list[str]]:
    if not gpus:
        return [[]]
    return [list(gpus[at : at + size]) for at in range(0, len(gpus), size)]


def _free_name(model: str, count: int, taken: Container[str]) -> str:
    """A name that no server has, made from the last part of the model's."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    stem = re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:60] or "server"
    number = 1
    while True:
        base = stem if number == 1 else f"{stem}-{number}"
        names = [base, *(f"{base}-{index}" for index in range(count))]
        if not any(name in taken for name in names):
            return base
        number += 1
