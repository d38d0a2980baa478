"""``jupyter rlm run``: one run without a browser."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rlm_kernel.app.streams import print_answer, say
from rlm_kernel.app.terminal import View, open_view
from rlm_kernel.config import EndpointSpec, api_key_for, parse_root_spec, parse_sub_spec
from rlm_kernel.driver.document import Document, check_writable
from rlm_kernel.driver.host import Host
from rlm_kernel.driver.request import Outcome, RunRequest
from rlm_kernel.engine.budget import Usage
from rlm_kernel.errors import PromptError, RLMError, UsageError
from rlm_kernel.text import escape_surrogates

__all__ = [
    "Report",
    "drive",
    "exit_code",
    "prompt_label",
    "read_query",
    "run",
    "where_it_is",
    "why_no_answer",
]

_GLOB = frozenset("*?[")
_EXIT_CODES = {"answered": 0, "failed": 1, "stopped": 3}
_MAX_QUERY = 1 << 20
"""Bytes of a query from a file; what is longer is material, and belongs into the prompt."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    state: str
    response: str
    reason: str
    usage: Usage
    seconds: float
    notebook: str | None
    record: str


def run(args: argparse.Namespace) -> int:
    """Answer the query of *args*; returns the exit code.

    Raises
    ------
    UsageError
        For whatever can be known to be wrong before anything is started.
    RLMError
        The run could not be brought to its end.
    """
    root, sub = _models(args)
    query = read_query(args.query)
    out = Path(args.out) if args.out else None
    prompt = _prompt_spec(args.prompt, out)
    if out is not None:
        check_writable(out)
    request = RunRequest(prompt=prompt, query=query, options=_options(args, root, sub))
    view = open_view(prompt_label(prompt), query)
    outcome = drive(request, out, view)
    return _finish(outcome, as_json=args.json)


def drive(request: RunRequest, out: Path | None, view: View) -> Outcome:
    """Work on *request* while *view* shows it; Ctrl-C stops it, twice ends it at once."""
    return asyncio.run(_drive(request, out, view))


async def _drive(request: RunRequest, out: Path | None, view: View) -> Outcome:
    host = Host(request, Document(out), listener=view)
    with _interrupts(host):
        async with view.shown():
            return await host.run()


@contextlib.contextmanager
def _interrupts(host: Host) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP are for *host*: a run that ends in order leaves its notebook."""
    loop = asyncio.get_running_loop()
    # A terminal that closes may say so twice, without being impatient.
    handlers = {
        signal.SIGINT: host.interrupt,
        signal.SIGTERM: host.interrupt,
        signal.SIGHUP: _once(host.interrupt),
    }
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del handlers[signal.SIGHUP]  # started with nohup
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _once(do: Callable[[], None]) -> Callable[[], None]:
    left = [do]
    return lambda: left.pop()() if left else None


def exit_code(outcome: Outcome) -> int:
    """What the command ends with."""
    final = outcome.final
    if outcome.interrupted and (final is None or final.state != "answered"):
        return 130
    if final is None or outcome.unsaved:
        return 1
    return _EXIT_CODES[final.state]


def _finish(outcome: Outcome, *, as_json: bool) -> int:
    final = outcome.final
    if as_json:
        print_answer(_as_json(_report(outcome)), otherwise=where_it_is(outcome))
    elif final is not None and final.state == "answered":
        print_answer(final.response, otherwise=where_it_is(outcome))
    if final is None or final.state != "answered":
        say(why_no_answer(outcome))
    if outcome.unsaved:
        say(outcome.unsaved)
    return exit_code(outcome)


def why_no_answer(outcome: Outcome) -> str:
    """Why *outcome* has no answer, as a sentence."""
    final = outcome.final
    if outcome.interrupted:
        return f"you interrupted the run; {where_it_is(outcome)}"
    reason = final.reason if final is not None else "the run was ended before its answer"
    return reason or "the run ended without an answer and gave no reason"


def where_it_is(outcome: Outcome) -> str:
    """Where the answer of *outcome*, or what was done for it, can be read; ends a sentence."""
    final = outcome.final
    answered = final is not None and final.state == "answered"
    what = "the answer" if answered else "what it had done"
    if outcome.notebook is not None and not outcome.unsaved:
        return f"{what} is in {outcome.notebook}"
    if final is not None and final.record:
        return f"{what} is in the record {final.record}"
    return "give --out to keep what a run does"


def _as_json(report: Report) -> str:
    """*report* for people and programs: without lone surrogates, and no control character that
    a terminal would obey."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _report(outcome: Outcome) -> Report:
    final = outcome.final
    return Report(
        state=final.state if final is not None else "stopped",
        response=escape_surrogates(final.response) if final is not None else "",
        reason=final.reason if final is not None else "interrupted",
        usage=final.usage if final is not None else Usage(),
        seconds=round(outcome.seconds, 3),
        notebook=None if outcome.notebook is None else str(outcome.notebook),
        record=final.record if final is not None else "",
    )


# --- arguments --------------------------------------------------------------------------------


def _models(args: argparse.Namespace) -> tuple[EndpointSpec, EndpointSpec | None]:
    """Root and sub, checked: a wrong spec or a missing key starts nothing."""
    root = parse_root_spec(args.root)
    if root.kind == "human":
        raise UsageError("a human root needs a notebook to write in; open one in JupyterLab")
    if root.kind == "playbook":
        root = msgspec.structs.replace(root, path=_playbook(root.path))
    sub = parse_sub_spec(args.sub) if args.sub else None
    for spec in (root, sub):
        if spec is not None:
            api_key_for(spec)
    return root, sub


def _playbook(given: str) -> str:
    path = Path(given).expanduser().absolute()
    if path.suffix not in (".py", ".ipynb") or not path.is_file():
        raise UsageError(f"there is no playbook in {given}; give the path of a .py or .ipynb file")
    return str(path)


def _options(
    args: argparse.Namespace, root: EndpointSpec, sub: EndpointSpec | None
) -> dict[str, str]:
    """The options of ``%%rlm``, those that were given."""
    given = {"root": str(root), "sub": None if sub is None else str(sub)}
    names = ("dialect", "max_turns", "max_tokens", "max_subcalls", "max_depth", "max_seconds")
    for name in (*names, "max_cost"):
        given[name.replace("_", "-")] = getattr(args, name)
    given["tools"] = None if args.tools is None else _tools_file(args.tools)
    given["allow-whole-prompt"] = "" if args.allow_whole_prompt else None
    given["no-cache"] = "" if args.no_cache else None
    return {name: str(value) for name, value in given.items() if value is not None}


def _tools_file(given: str) -> str:
    path = Path(given).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UsageError(f"there are no tools in {given}; give a .py file that defines functions")
    if "," in str(path):
        raise UsageError(f"the path {path} has a comma in it, where names end; rename it")
    return str(path)


def read_query(given: str) -> str:
    """The query: as it is, from a file (``@FILE``) or from standard input (``-``).

    Raises
    ------
    UsageError
        The file cannot be read, is no text or too long, or there is no query in it.
    """
    if given == "-":
        text = _decoded(sys.stdin.buffer.read(_MAX_QUERY + 1), "standard input")
    elif given.startswith("@"):
        text = _decoded(_bytes_of(Path(given[1:]).expanduser()), given[1:])
    else:
        text = given
    if not text.strip():
        raise UsageError("the query is empty; ask something about the prompt")
    return text.strip()


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_QUERY + 1)
    except OSError as error:
        raise UsageError(
            f"the query cannot be read from {path} ({error.strerror}); give a file after the @"
        ) from error


def _decoded(data: bytes, source: str) -> str:
    if len(data) > _MAX_QUERY:
        raise UsageError(f"the query in {source} is over 1 MiB; put the material into --prompt")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"the query in {source} is not UTF-8 text; convert the file") from error


def _prompt_spec(given: str, out: Path | None) -> str:
    """What ``%prompt`` is told. The kernel works in the folder of the notebook when it is
    opened later, so a relative path is kept only where that is this folder.

    Raises
    ------
    PromptError
        There is nothing of that name.
    """
    if "\n" in given or not given.strip():
        raise PromptError("--prompt is no path; give a text file, a folder or a glob pattern")
    path = Path(given).expanduser()
    if not _exists(path) and not _GLOB & set(given):
        raise PromptError(f"there is no prompt {given}; give a text file, a folder or a glob")
    if path.is_file():
        _check_file(path)
    here = out is None or out.absolute().parent == Path.cwd()
    return str(path if here else path.absolute())


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise PromptError(
            f"the prompt cannot be read ({error.strerror}); check --prompt"
        ) from error


def _check_file(path: Path) -> None:
    """Refuse what cannot be a prompt by its look, before a kernel is started for it."""
    if not os.access(path, os.R_OK):
        raise PromptError(f"{path} cannot be read; check its permissions")
    if path.stat().st_size == 0:
        raise PromptError(f"{path} is empty; give a file with text in it")


def prompt_label(spec: str) -> str:
    """The prompt's name and size, for the view."""
    path = Path(spec)
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise RLMError(f"the prompt cannot be read ({error.strerror})") from error
    return spec if size is None else f"{path.name} ({_size(size)})"


def _size(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
