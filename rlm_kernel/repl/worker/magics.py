"""The magics of the REPL: ``%prompt`` and ``%rlm``."""

# IPython's decorators and parsers have no types.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from rlm_kernel import errors
from rlm_kernel.cells import PromptInfo
from rlm_kernel.errors import PromptError
from rlm_kernel.repl.worker.worker_magics import WorkerMagics
from rlm_kernel.tool_function import tool_names

__all__ = ["RLMMagics"]


def _summary(info: PromptInfo) -> str:
    count = "" if info.kind == "str" else f" in {info.items:,} items"
    source = f", from {info.source}" if info.source else ""
    return f"P is a {info.kind} of {info.chars:,} characters{count}{source}."


@magics_class
class RLMMagics(WorkerMagics):
    """Load a prompt; start and steer a run."""

    # --- %prompt ------------------------------------------------------------------------------

    @magic_arguments()
    @argument(
        "-e",
        "--expression",
        action="store_true",
        help="what follows is a Python expression whose value becomes P",
    )
    @argument("source", nargs="*", help="a file, a folder, or a glob such as docs/**/*.md")
    @no_var_expand
    @line_cell_magic
    def prompt(self, line: str, cell: str | None = None) -> None:
        """Load the prompt P, also known as context.

        Examples::

            %prompt book.txt
            %prompt ~/project/src
            %prompt -e "\\n".join(pages)

        As ``%%prompt`` the rest of the cell is the prompt. A folder or a glob becomes one
        text with a header line for each file; a ``.json`` file with a list or dict of
        str becomes that.
        """
        if cell is not None:
            self._take(cell, line.strip())
            return
        head, _, expression = line.strip().partition(" ")
        if head in ("-e", "--expression"):
            if not expression.strip():
                raise UsageError("%prompt -e needs a Python expression whose value becomes P")
            self._take(eval(expression, self._namespace), expression.strip())
        elif not head:
            raise UsageError("%prompt needs a file, a folder, a glob, or -e and an expression")
        else:
            self._read(line.strip())

    def _read(self, spec: str) -> None:
        from rlm_kernel.prompts import read_prompt

        if spec[0] == spec[-1] and spec[0] in "'\"":
            spec = spec[1:-1]
        try:
            found = read_prompt(spec)
        except PromptError as error:
            raise UsageError(str(error)) from None
        self._take(found.value, found.source)
        if found.skipped:
            print(f"{found.files:,} files read, {found.skipped:,} skipped that are no text.")

    def _take(self, value: object, source: str) -> None:
        try:
            info = self._worker.set_prompt(value, source)
        except PromptError as error:
            raise UsageError(str(error)) from None
        print(_summary(info))

    # --- %rlm ---------------------------------------------------------------------------------

    @magic_arguments()
    @argument("--root", help="what proposes the cells, such as openai:MODEL@URL or human")
    @argument("--sub", help="the model of sub-calls, such as openai:MODEL@URL or embedded")
    @argument("--dialect", help="names and prompt that the root expects: paper or rlms")
    @argument("--max-turns", help="root turns")
    @argument("--max-tokens", help="tokens of root and sub-calls together")
    @argument("--max-subcalls", help="sub-calls of the whole tree")
    @argument("--max-depth", help="depth of child runs")
    @argument("--max-seconds", help="wall time")
    @argument("--max-cost", help="US dollars")
    @argument("--policy", help="run (by itself) or ask (before every cell)")
    @argument("--tools", help="functions for the models of sub-calls: names, or a .py file")
    @argument(
        "--allow-whole-prompt",
        action="store_true",
        default=None,
        help="let a child run get the whole P again",
    )
    @argument(
        "--no-cache",
        action="store_true",
        default=None,
        help="ask anew what the record has a reply to",
    )
    @argument("words", nargs="*", help="a command instead of a query, such as status or edit")
    @no_var_expand
    @line_cell_magic
    def rlm(self, line: str, cell: str | None = None) -> None:
        """Start a run that answers the query in this cell about P, or steer the one there is.

        Examples::

            %%rlm --root openai:qwen3@http://localhost:8000/v1 --max-turns 20
            Which access code opens the north gate?

            %rlm status
            %rlm pause

            %%rlm edit
            print(P[:200])

        Commands: status, pause, resume, stop, budget; and for a proposal that waits for a
        decision: run, edit (with the new source below), skip, regenerate.
        """
        if cell is None:
            self._command(line)
            return
        parsed: Namespace = self.rlm.parser.parse_args(_words(line))
        if parsed.words:
            self._tell(parsed.words[0], [*parsed.words[1:], cell])
            return
        given = _options(parsed)
        query = cell.strip()
        if not query:
            raise UsageError("%%rlm needs the query in the lines below it")
        with _refusals():
            self._worker.tools.load(tool_names(parsed.tools or ""))
            _show(self._worker.requests.start_run(query, given))

    def _command(self, line: str) -> None:
        words = _words(line) or ["status"]
        self._tell(words[0], words[1:])

    def _tell(self, command: str, args: list[str]) -> None:
        with _refusals():
            _show(self._worker.requests.run_command(command, args))


@contextmanager
def _refusals() -> Iterator[None]:
    """What the kernel refuses is shown as one line, as IPython does for its own magics."""
    try:
        yield
    except errors.UsageError as error:
        raise UsageError(str(error)) from None


def _show(text: str) -> None:
    if text:
        print(text)


def _words(line: str) -> list[str]:
    """*line* as a shell splits it; IPython's own splitting keeps the quotes."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%rlm: {error}") from None


def _options(parsed: Namespace) -> dict[str, str | bool | None]:
    """The options of ``%%rlm`` that were given; the kernel checks what they say."""
    return {
        name: value for name, value in vars(parsed).items() if name != "words" and value is not None
    }
