"""The command line of ``jupyter rlm``: its arguments, its errors and its exit codes.

Exit codes: 0 answered, 1 failed, 2 used wrongly, 3 stopped by a limit without
an answer, 130 interrupted. The answer is all that goes to standard output; an
error is one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import rlm_kernel
from rlm_kernel.app.streams import forgive_stderr, give_up_stdout, print_answer, say
from rlm_kernel.errors import RLMError, UsageError

__all__ = ["Command", "perform", "prepared"]

Command = Callable[[], int]

_DESCRIPTION = "Let a language model work on a prompt that is too long to read."

_EXAMPLES = """\
examples:
  jupyter rlm run --prompt book.txt --query "Who is the murderer?" \\
      --root openai:qwen3-32b@http://localhost:8000/v1 --out run.ipynb
  jupyter rlm run --prompt src/ --query @question.txt \\
      --root openai:gpt-5 --sub openai:gpt-5-mini --max-cost 2 --json
  jupyter rlm serve Qwen/Qwen3-8B --gpus 0-3
  jupyter rlm demo
"""

_RUN_EPILOG = """\
specs of models:
  openai:MODEL@URL    any OpenAI-compatible server; the key is OPENAI_API_KEY
  openai:MODEL        at OPENAI_BASE_URL, else at OpenAI
  vllm:MODEL          the servers that jupyter rlm serve started
  vllm:MODEL@URL,URL  several servers of one model
  embedded            the small model of the extra 'demo' (for sub-calls)
  playbook:FILE       cells that are written in a .py (percent format) or .ipynb file (as root)

exit codes: 0 answered, 1 failed, 2 used wrongly, 3 stopped without an answer, 130 interrupted
"""


_SERVE_EPILOG = """\
Each GPU gets a server of its own; what follows -- goes to vLLM as it is, so that
-- --tensor-parallel-size 2 gives each server two GPUs. Servers listen on this machine alone and
go on when the command has ended.

vLLM is looked for in the interpreter of --python, else of RLM_VLLM_PYTHON, else in the one that
runs this, else in that of the command vllm.

examples:
  jupyter rlm serve Qwen/Qwen3-8B --gpus 0-7
  jupyter rlm serve Qwen/Qwen3-32B --gpus 0-3 -- --tensor-parallel-size 2 --max-model-len 32768
  jupyter rlm servers
  jupyter rlm serve --stop
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: object = None) -> None:
        # argparse would keep silent where help or version cannot be printed.
        print_answer(message.rstrip("\n"), otherwise="give it a place that can be written")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0")
    return value


def _count(text: str) -> int:
    value = _depth(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return value


def _depth(text: str) -> int:
    from rlm_kernel.engine.budget import MOST

    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 0")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST:,}")
    return value


# argparse names these in its messages.
_positive.__name__, _count.__name__, _depth.__name__ = "number", "whole number", "whole number"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="jupyter rlm", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument(
        "--version", action="version", version=f"rlm-kernel {rlm_kernel.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="answer a query about a prompt and leave the notebook of the run",
        description="Answer a query about a prompt, without a browser.",
        epilog=_RUN_EPILOG,
        formatter_class=raw,
    )
    _add_run_arguments(run)
    demo = commands.add_parser(
        "demo",
        help="find a needle in the source of Python's standard library, without key or network",
        description=(
            "Find a planted sentence in the source of Python's standard library (about 11 MB) "
            "with a playbook as root and a small real model for the sub-calls."
        ),
    )
    demo.add_argument(
        "--out", metavar="FILE", default="demo.ipynb", help="notebook to write (demo.ipynb)"
    )
    _add_serve_arguments(
        commands.add_parser(
            "serve",
            help="start local vLLM servers, or stop them",
            description="Start vLLM servers on this machine and wait until they answer.",
            epilog=_SERVE_EPILOG,
            formatter_class=raw,
        )
    )
    servers = commands.add_parser(
        "servers",
        help="list the local servers and how busy they are",
        description="List the servers that jupyter rlm serve started.",
    )
    servers.add_argument("--json", action="store_true", help="print them as JSON")
    return parser


def _add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.usage = "%(prog)s MODEL [options] [-- ARGUMENTS OF VLLM]\n       %(prog)s --stop [WHAT]"
    serve.add_argument(
        "model", metavar="MODEL", nargs="?", help="a name on Hugging Face, or a folder"
    )
    serve.add_argument(
        "--gpus", metavar="LIST", help="which, as in 0-7 or 0,2; none for the CPU (all)"
    )
    serve.add_argument("--port", metavar="N", type=_count, help="the first port (a free one)")
    serve.add_argument(
        "--data-parallel",
        action="store_true",
        help="one server with an engine on each GPU, at one URL",
    )
    serve.add_argument("--name", metavar="NAME", help="what to call it (by the model)")
    serve.add_argument("--python", metavar="PATH", help="an interpreter that has vLLM")
    serve.add_argument(
        "--timeout",
        metavar="S",
        type=_positive,
        default=3600.0,
        help="seconds to wait until it answers (3600: it may have to download the model)",
    )
    serve.add_argument(
        "--foreground", action="store_true", help="stay, and stop the servers with Ctrl-C"
    )
    serve.add_argument(
        "--stop",
        metavar="WHAT",
        nargs="?",
        const="",
        help="stop the servers of this name, model or URL, or all; the only model's where not said",
    )


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--prompt", metavar="FILE", required=True, help="a text file, a folder or a quoted glob"
    )
    run.add_argument(
        "--query", required=True, help="the question; @FILE reads it from a file, - from stdin"
    )
    run.add_argument("--root", metavar="SPEC", required=True, help="the model that writes cells")
    run.add_argument("--sub", metavar="SPEC", help="the model of sub-calls (the root's)")
    run.add_argument("--out", metavar="FILE", help="notebook to write; the record lies beside it")
    run.add_argument("--dialect", metavar="NAME", help="what the root expects: paper or rlms")
    run.add_argument("--tools", metavar="FILE", help="functions for the models of sub-calls (.py)")
    run.add_argument(
        "--allow-whole-prompt", action="store_true", help="let a child run get the whole P again"
    )
    run.add_argument(
        "--no-cache", action="store_true", help="ask anew what the record has a reply to"
    )
    run.add_argument("--json", action="store_true", help="print the answer and usage as JSON")
    limits = run.add_argument_group("limits of the whole tree of runs")
    limits.add_argument("--max-turns", metavar="N", type=_count, help="turns of each run")
    limits.add_argument("--max-tokens", metavar="N", type=_count, help="input and output tokens")
    limits.add_argument("--max-subcalls", metavar="N", type=_count, help="sub-calls")
    limits.add_argument("--max-depth", metavar="N", type=_depth, help="levels of child runs")
    limits.add_argument("--max-seconds", metavar="S", type=_positive, help="wall time")
    limits.add_argument("--max-cost", metavar="D", type=_positive, help="US dollars")


def prepared(argv: Sequence[str] | None) -> Command:
    """The command that *argv* asks for, with all that it needs imported.

    Whatever is wrong with it, it says so when it is performed.
    """
    forgive_stderr()
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        work = _work(args.command)
    except (RLMError, BrokenPipeError, SystemExit) as end:
        return partial(_raise, end)
    return partial(work, args)


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; `extra` are those of another program, which stand behind ``--``."""
    own, extra = list(argv), []
    if own[:1] == ["serve"] and "--" in own:
        at = own.index("--")
        own, extra = own[:at], own[at + 1 :]
    args = _parser().parse_args(own)
    args.extra = extra
    return args


def _work(command: str) -> Callable[[argparse.Namespace], int]:
    """What does *command*; only that is imported."""
    if command == "demo":
        from rlm_kernel.app.demo import demo

        return demo
    if command == "serve":
        from rlm_kernel.app.serve import serve

        return serve
    if command == "servers":
        from rlm_kernel.app.servers import servers

        return servers
    from rlm_kernel.app.run import run

    return run


def _raise(error: BaseException) -> int:
    raise error


def perform(command: Command) -> int:
    """Do *command*; returns the exit code."""
    try:
        return command()
    except RLMError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read the answer is gone.
        give_up_stdout()
        return 1
