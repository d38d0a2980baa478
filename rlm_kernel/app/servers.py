"""``jupyter rlm servers``: what runs, and how busy it is."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from rlm_kernel.app.streams import print_answer, say
from rlm_kernel.subcalls.vllm.metrics import Figures, fetch, figures_of, is_ready
from rlm_kernel.subcalls.vllm.registry import Registry, ServerEntry

__all__ = ["ServerReport", "servers"]

_WIDE = 200
_AT_ONCE = 16

State = Literal["ready", "starting", "silent", "orphaned"]


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as ``--json`` prints it."""

    name: str
    model: str
    url: str
    gpus: tuple[str, ...]
    pid: int
    state: State
    """``silent``: its process lives but does not answer; ``orphaned``: only its engine lives."""

    uptime_s: float
    log: str
    running: int | None = None
    waiting: int | None = None
    kv_cache_used: float | None = None
    prefix_hit_tokens: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_rate: float | None = None


def servers(args: argparse.Namespace) -> int:
    """List the servers; those that have ended are told and forgotten. Returns the exit code."""
    registry = Registry.of(os.environ)
    living = _drop_dead(registry)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        reports = list(threads.map(_report, living))
    for entry, report in zip(living, reports, strict=True):
        # Whoever started it was killed before it saw that.
        if report.state == "ready" and not entry.ready:
            registry.add(msgspec.structs.replace(entry, ready=True))
    otherwise = "give it a place that can be written"
    if args.json:
        text = msgspec.json.format(msgspec.json.encode(reports), indent=2).decode()
        print_answer(text, otherwise=otherwise)
    elif reports:
        print_answer(_table(reports), otherwise=otherwise)
    else:
        say("no server is running; start one with jupyter rlm serve MODEL")
    return 0


def _drop_dead(registry: Registry) -> list[ServerEntry]:
    living = []
    for entry in registry.entries():
        if entry.processes():
            living.append(entry)
            continue
        registry.remove(entry)
        log = f"; its log is {entry.log}" if entry.log else ""
        say(f"{entry.name} ({entry.model}) has ended and is taken from the list{log}")
    return living


def _report(entry: ServerEntry) -> ServerReport:
    state, figures = _state(entry), Figures()
    if state == "ready":
        try:
            figures = figures_of(fetch(entry.url, "/metrics")[1].decode(errors="replace"))
        except OSError:
            state = "silent"
    return ServerReport(
        name=entry.name,
        model=entry.model,
        url=entry.url,
        gpus=entry.gpus,
        pid=entry.pid,
        state=state,
        uptime_s=round(max(time.time() - entry.started_at, 0), 1),
        log=entry.log,
        running=figures.running,
        waiting=figures.waiting,
        kv_cache_used=figures.cache_used,
        prefix_hit_tokens=figures.hit_tokens,
        prefix_query_tokens=figures.query_tokens,
        prefix_hit_rate=figures.hit_rate,
    )


def _state(entry: ServerEntry) -> State:
    if not entry.alive:
        return "orphaned"
    if is_ready(entry.url):
        return "ready"
    return "silent" if entry.ready else "starting"


def _table(reports: Sequence[ServerReport]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("NAME", "MODEL", "URL", "GPU", "PID", "UP", "STATE"):
        table.add_column(title, overflow="fold")
    for title in ("RUNNING", "WAITING", "KV CACHE", "PREFIX HITS"):
        table.add_column(title, justify="right")
    for report in reports:
        table.add_row(*_row(report))
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else _WIDE
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=False, highlight=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    orphans = [report.name for report in reports if report.state == "orphaned"]
    if orphans:
        lines.append(f"only the engine of {', '.join(orphans)} is left: jupyter rlm serve --stop")
    return "\n".join(lines)


def _row(report: ServerReport) -> list[str]:
    hits = _percent(report.prefix_hit_rate)
    if report.prefix_query_tokens:
        hits += f" of {report.prefix_query_tokens:,}"
    return [
        report.name,
        report.model,
        report.url,
        ",".join(report.gpus) or "CPU",
        str(report.pid),
        _duration(report.uptime_s),
        report.state,
        _count(report.running),
        _count(report.waiting),
        _percent(report.kv_cache_used),
        hits,
    ]


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
