"""The magic ``%sub_RLM``: sub-calls for a person who would rather write the prompt than code."""

# IPython's decorators and parsers have no types.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from rlm_kernel.errors import SubcallError
from rlm_kernel.repl.worker.subcalls.templates import Template, fields_of
from rlm_kernel.repl.worker.worker_magics import WorkerMagics

__all__ = ["SubcallMagic"]

_VALUED = ("--map", "--out", "--choices", "--task", "--model", "--temperature", "--max-tokens")


@magics_class
class SubcallMagic(WorkerMagics):
    """Make sub-calls."""

    @magic_arguments()
    @argument("--map", help="ask about each item of this variable; the cell is a template")
    @argument("--out", help="name of the variable that keeps the reply; it is not shown then")
    @argument("--choices", help="what a reply may be, as in --choices yes,no")
    @argument("--task", help="name of the sub-task, under which its calls are grouped")
    @argument("--model", help="the model to ask; left to the kernel if not given")
    @argument("--temperature", type=float, help="of sampling")
    @argument("--max-tokens", type=int, help="length of the reply")
    @argument("text", nargs="*", help="the prompt, with {expression} filled in")
    @no_var_expand
    @line_cell_magic
    def sub_RLM(self, line: str, cell: str | None = None) -> Any:
        """Ask a smaller model once, or once about each of many items.

        Each ``{expression}`` of the prompt is replaced by its value; ``{{`` and ``}}`` are
        braces. ``%sub_RLM`` returns the reply, ``%%sub_RLM`` prints it.

        With ``--map`` the expressions may also use ``item`` and what it holds, such as the keys
        of a dict; ``{}`` is the item, which goes to the end where the prompt has no braces.

        Examples::

            %sub_RLM --max-tokens 40 Which year is meant in: {P[200:400]}

            %%sub_RLM --out summary
            Summarize in one sentence:
            {chapter}

            %%sub_RLM --map mails --out labels --choices spam,ham
            Is this mail spam?

            {subject}
            {body[:2000]}
        """
        head, text = (line, cell) if cell is not None else _leading_options(line)
        given: Namespace = parse_argstring(self.sub_RLM, head)
        if given.text:
            raise UsageError(f"%%sub_RLM does not know {' '.join(given.text)!r}")
        text = text.strip()
        if not text:
            raise UsageError("sub_RLM needs a prompt")
        if given.out and not given.out.isidentifier():
            raise UsageError(f"--out needs the name of a variable, and {given.out!r} is none")
        reply = self._ask(text, given) if given.map is None else self._ask_each(text, given)
        if given.out:
            self._namespace[given.out] = reply
            return None
        if cell is None or given.map is not None:
            return reply
        print(reply)
        return None

    def _ask(self, text: str, given: Namespace) -> Any:
        template = self._template(text, whole=True)
        return self._worker.sub(template.fill(None), **_options(given))

    def _ask_each(self, text: str, given: Namespace) -> Any:
        items = eval(_unquoted(given.map), self._namespace)
        outcomes = self._worker.sub.map(self._template(text).fill, items, **_options(given))
        _tell_of_failures(list(outcomes.values() if isinstance(outcomes, dict) else outcomes))
        return outcomes

    def _template(self, text: str, *, whole: bool = False) -> Template:
        namespace = self._namespace

        def find(name: str, item: Any) -> Any:
            if not name:
                raise UsageError("{} stands for an item of --map, and there is none")
            known = namespace if whole else {**namespace, **fields_of(item), "item": item}
            return eval(name, known)

        try:
            return Template(text, find, with_spec=False, whole=whole)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _options(given: Namespace) -> dict[str, Any]:
    options = {
        "model": given.model,
        "temperature": given.temperature,
        "max_tokens": given.max_tokens,
        "task": given.task,
    }
    if given.choices is not None:
        options["choices"] = [choice.strip() for choice in _unquoted(given.choices).split(",")]
    return options


def _tell_of_failures(outcomes: list[Any]) -> None:
    failed = [outcome for outcome in outcomes if isinstance(outcome, SubcallError)]
    if failed:
        print(
            f"{len(failed):,} of {len(outcomes):,} sub-calls failed and are a SubcallError in "
            f"their place; the first: {failed[0]}",
            file=sys.stderr,
        )


def _unquoted(word: str) -> str:
    """IPython's own splitting of a line keeps the quotes."""
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word


def _leading_options(line: str) -> tuple[str, str]:
    """The options at the beginning of *line*, and the text after them, untouched."""
    rest = line.lstrip()
    while rest.startswith("--"):
        word, _, after = rest.partition(" ")
        if word.partition("=")[0] not in _VALUED:
            break
        if "=" not in word:
            _, _, after = after.lstrip().partition(" ")
        rest = after.lstrip()
    return line[: len(line) - len(rest)], rest
