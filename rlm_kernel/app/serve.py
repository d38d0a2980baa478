"""``jupyter rlm serve``: starts local vLLM servers, and stops them."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence

from rlm_kernel.app.serve_view import WaitView, open_wait_view
from rlm_kernel.app.signals import EndSignals
from rlm_kernel.app.streams import print_answer, say
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.subcalls.vllm.gpus import choose_gpus, visible_gpus
from rlm_kernel.subcalls.vllm.interpreter import PYTHON_VARIABLE, Interpreter, find_interpreter
from rlm_kernel.subcalls.vllm.launch import (
    POLL_S,
    Started,
    start_server,
    stop_servers,
    wait_until_ready,
    why_it_ended,
)
from rlm_kernel.subcalls.vllm.plan import Planned, model_argument, plan_servers
from rlm_kernel.subcalls.vllm.ports import PortKeeper
from rlm_kernel.subcalls.vllm.processes import KILL_S, ProcessInfo
from rlm_kernel.subcalls.vllm.registry import Registry, ServerEntry

__all__ = ["serve"]

_REAP_S = 5.0


def serve(args: argparse.Namespace) -> int:
    """Start servers, or stop them; returns the exit code."""
    registry = Registry.of(os.environ)
    if args.stop is not None:
        return _stop(args.stop or args.model or "", registry)
    if not args.model:
        raise UsageError("serve needs a model: jupyter rlm serve MODEL, such as Qwen/Qwen3-8B")
    with EndSignals() as signals:
        started: list[Started] = []
        try:
            _start(args, registry, signals, started)
            _report(started)
            if args.foreground:
                return _watch(started, registry, signals)
        except BaseException:
            _end(started, registry)
            raise
    return 0


# --- what is to be started --------------------------------------------------------------------


def _interpreter(args: argparse.Namespace, gpus: Sequence[str]) -> Interpreter:
    """One whose vLLM can use *gpus*. Raises `UsageError` where there is none."""
    interpreter = find_interpreter(args.python or "", os.environ)
    if not gpus and not interpreter.is_cpu:
        raise UsageError(
            f"the vLLM of {interpreter.path} needs a GPU: give --python an interpreter with "
            "vLLM's CPU build, or use the model 'embedded', which needs neither"
        )
    if gpus and interpreter.is_cpu:
        raise UsageError(
            f"the vLLM of {interpreter.path} is the CPU build, which uses no GPU: give --python "
            "an interpreter with the other one, or --gpus none"
        )
    return interpreter


def _plan(
    args: argparse.Namespace,
    model: str,
    gpus: Sequence[str],
    interpreter: Interpreter,
    registry: Registry,
    ports: PortKeeper,
) -> list[Planned]:
    alive = [entry for entry in registry.entries() if entry.processes()]
    planned = plan_servers(
        model,
        gpus,
        args.extra,
        interpreter=interpreter,
        data_parallel=args.data_parallel,
        ports=ports,
        port=args.port,
        name=args.name or "",
        others=alive,
    )
    for one in planned:
        registry.check_name(one.name)
    return planned


def _gpus(args: argparse.Namespace) -> list[str]:
    """Those to use; none for the CPU. Raises `UsageError` where there is none unasked."""
    if args.gpus == "none":
        return []
    visible = visible_gpus(os.environ)
    if not visible:
        raise UsageError(_no_gpu(args))
    return choose_gpus(args.gpus or "all", visible)


def _no_gpu(args: argparse.Namespace) -> str:
    """What can be done on a machine without a GPU, as one sentence."""
    instead = "use the small model that needs none (--sub embedded)"
    try:
        interpreter = find_interpreter(args.python or "", os.environ)
    except UsageError:
        interpreter = None
    if interpreter is not None and interpreter.is_cpu:
        return (
            f"this machine has no GPU that CUDA could use: {instead}, or serve on the CPU with "
            f"--gpus none, since {interpreter.path} has vLLM's CPU build"
        )
    return (
        f"this machine has no GPU that CUDA could use: {instead}, or install vLLM's CPU build, "
        f"name its interpreter with --python or {PYTHON_VARIABLE}, and give --gpus none"
    )


# --- starting -----------------------------------------------------------------------------------


def _start(
    args: argparse.Namespace, registry: Registry, signals: EndSignals, started: list[Started]
) -> None:
    """Start what *args* ask for and wait for it. What was started is in *started* in any case.

    Raises
    ------
    KeyboardInterrupt
        A signal asked to end.
    """
    model = model_argument(args.model)
    gpus = _gpus(args)
    interpreter = _interpreter(args, gpus)
    registry.make()
    signals.check()
    with (
        open_wait_view() as view,
        _turn_on(gpus, registry, signals, view),
        PortKeeper() as ports,
    ):
        # One lock for both, so that a name that was free still is.
        with registry.locked("registry"):
            for one in _plan(args, model, gpus, interpreter, registry, ports):
                server = start_server(one, interpreter, registry, os.environ)
                started.append(server)  # at once: it is ended where the next one fails
        view.note(f"log: {started[0].entry.log} · stop with Ctrl-C")
        wait_until_ready(
            started,
            registry,
            limit=args.timeout,
            keep_on=lambda: not signals.asked,
            tell=view.tell,
        )
    signals.check()


@contextlib.contextmanager
def _turn_on(
    gpus: Sequence[str], registry: Registry, signals: EndSignals, view: WaitView
) -> Iterator[None]:
    """Hold *gpus* while servers start on them.

    vLLM measures how much memory is free when it starts: two that do so at once on one GPU both
    see what neither of them can have.
    """
    places = [re.sub(r"[^\w-]", "_", f"gpu-{gpu}") for gpu in gpus]
    told = False
    while (held := registry.try_lock(places)) is None:
        if not told:
            view.note("waits until another server that starts on the same GPU is ready")
        told = True
        signals.check()
        time.sleep(POLL_S)
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def _report(started: Sequence[Started]) -> None:
    """Say where the servers are and what to do with them."""
    entries = [server.entry for server in started]
    lines = [f"{entry.model} is served at {entry.url} ({_place(entry)})" for entry in entries]
    first = entries[0]
    lines += [
        f"  use it    --sub vllm:{first.model}",
        f"  stop it   jupyter rlm serve --stop {first.group}",
        f"  log       {', '.join(entry.log for entry in entries)}",
    ]
    print_answer("\n".join(lines), otherwise="jupyter rlm servers lists what runs")


def _place(entry: ServerEntry) -> str:
    return f"GPU {','.join(entry.gpus)}" if entry.gpus else "CPU"


def _watch(started: Sequence[Started], registry: Registry, signals: EndSignals) -> int:
    """Stay until somebody asks to end, or every server has ended by itself."""
    alive = list(started)
    while alive and not signals.asked:
        for server in [server for server in alive if server.process.poll() is not None]:
            alive.remove(server)
            say(why_it_ended(server))
            _end([server], registry)
        time.sleep(POLL_S)
    _end(alive, registry)
    return 0 if alive else 1


def _end(started: Sequence[Started], registry: Registry) -> None:
    """Stop what this process started and take note of its end."""
    left = stop_servers([server.entry for server in started], registry)
    for server in started:
        server.reap(_REAP_S)
    if left:
        say(_left_over(left))


# --- stopping -----------------------------------------------------------------------------------


def _stop(target: str, registry: Registry) -> int:
    chosen = _chosen(target, registry.entries())
    if not chosen:
        say("no server is running")
        return 0
    running = [entry for entry in chosen if entry.processes()]
    left = stop_servers(chosen, registry)
    if left:
        raise RLMError(_left_over(left))
    for entry in chosen:
        ended = "stopped" if entry in running else "had ended before"
        say(f"{entry.name} ({entry.model}) {ended}")
    return 0


def _chosen(target: str, entries: Sequence[ServerEntry]) -> list[ServerEntry]:
    """Those of *entries* that *target* names: a name, a model, a URL or ``all``.

    Raises
    ------
    UsageError
        It names none; or nothing was named, and several models are served.
    """
    if not target:
        models = sorted({entry.model for entry in entries})
        if len(models) > 1:
            raise UsageError(
                f"several models are served ({', '.join(models)}): say which to stop, or all"
            )
        return list(entries)
    if target == "all":
        return list(entries)
    url = re.sub(r"/v1/?$|/$", "", target)
    chosen = [
        entry
        for entry in entries
        if target in (entry.name, entry.group, entry.model)
        or os.path.abspath(target) == entry.model
        or url == entry.url.removesuffix("/v1")
    ]
    if not chosen:
        names = ", ".join(entry.name for entry in entries) or "none is running"
        raise UsageError(f"there is no server {target[:80]!r} of yours here: {names}")
    return chosen


def _left_over(processes: Sequence[ProcessInfo]) -> str:
    pids = ", ".join(str(process.pid) for process in processes)
    return (
        f"processes of the servers are still there {KILL_S:.0f} s after they were killed ({pids}): "
        "a driver may hang, look at dmesg; the servers stay listed, so --stop can be tried again"
    )
