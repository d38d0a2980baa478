"""``jupyter rlm demo``: a whole run that needs no key, no GPU and no network.

The root is a playbook, which is told plainly, and the sub-model is a small
real one. What is real is everything else: the kernel, its REPL, the prompt,
the calls, the notebook.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from rlm_kernel.app import haystack
from rlm_kernel.app.run import drive, exit_code, prompt_label, where_it_is, why_no_answer
from rlm_kernel.app.streams import print_answer, say
from rlm_kernel.app.terminal import open_view, wants_plain
from rlm_kernel.driver.document import check_writable
from rlm_kernel.driver.request import Outcome, RunRequest
from rlm_kernel.errors import RLMError, UsageError

__all__ = ["QUERY", "demo", "playbook_path"]

GATE = "north"
QUERY = f"What is the access code for the {GATE} gate?"


def playbook_path() -> Path:
    """The demo's playbook: beside this module in a wheel, in ``examples`` in a checkout.

    Raises
    ------
    RLMError
        It is in neither place.
    """
    checkout = Path(__file__).parents[2] / "examples" / "needle.py"
    for path in (Path(__file__).with_name("needle.py"), checkout):
        if path.is_file():
            return path
    raise RLMError("the demo's playbook needle.py is missing; install rlm-kernel again")


def demo(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code.

    Raises
    ------
    UsageError
        The notebook cannot be written, or the extra ``demo`` is not installed.
    RLMError
        The model cannot be had, or the run could not be brought to its end.
    """
    out = Path(args.out)
    check_writable(out)
    _need_xllamacpp()
    _say("This demo's root is a playbook: cells that a person wrote, proposed one by one.")
    _say("The sub-model is real and small: SmolLM2-135M-Instruct, on this machine's CPU.")
    _get_model()
    prompt = platformdirs.user_cache_path("rlm-kernel") / "demo" / _prompt_name()
    files = haystack.write_haystack(prompt)
    _say(f"P is the source of Python {platform.python_version()}'s library, {files} files,")
    _say(f"with {len(haystack.CODES)} planted sentences among {len(haystack.DECOYS)} decoys.")
    request = RunRequest(
        prompt=str(prompt),
        query=QUERY,
        options={"root": f"playbook:{playbook_path()}", "sub": "embedded"},
    )
    outcome = drive(request, out, open_view(prompt_label(str(prompt)), QUERY))
    return _finish(outcome, out)


def _prompt_name() -> str:
    return f"python-{platform.python_version()}-library.txt"


def _need_xllamacpp() -> None:
    import importlib.util

    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError(
            "the demo needs xllamacpp, which is not installed: run pip install 'rlm-kernel[demo]'"
        )


def _get_model() -> None:
    """Have the model's file, showing the download where there is one."""
    from rlm_kernel.subcalls.embedded.model_file import ensure_model

    plain = wants_plain(sys.stderr, os.environ)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=plain)
    with bar:
        task = bar.add_task("getting the model", total=None, visible=False)
        told = False

        def show(done: int, total: int) -> None:
            nonlocal told
            if plain and not told:
                _say(f"Getting the model ({total / 1e6:.0f} MB), once.")
            told = True
            bar.update(task, completed=done, total=total, visible=True)

        ensure_model(show)


def _finish(outcome: Outcome, out: Path) -> int:
    """Print the answer beside what was planted: whoever watches can judge it."""
    final = outcome.final
    code = exit_code(outcome)
    if final is not None and final.state == "answered":
        planted = str(haystack.CODES[GATE])
        agree = "the answer is right" if final.response == planted else "THE ANSWER IS WRONG"
        print_answer(final.response, otherwise=where_it_is(outcome))
        _say(f"planted value: {planted}; {agree}")
        code = code or int(final.response != planted)
    else:
        say(why_no_answer(outcome))
    if outcome.unsaved:
        say(outcome.unsaved)
    else:
        _say(f"The whole run is in {out}: {_how_to_open(out)}")
    return code


def _how_to_open(out: Path) -> str:
    import importlib.util

    if importlib.util.find_spec("jupyterlab") is None:
        return f"pip install jupyterlab, then open it with jupyter lab {out}"
    return f"open it with jupyter lab {out}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
