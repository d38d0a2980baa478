"""Dialects: the names, the prompt and the answer protocol that a root expects.

`paper` uses the names of the paper (arXiv 2512.24601): ``P``, ``sub_RLM``,
``Final``. `rlms` uses those of the rlms library, on which models were
trained: ``context``, ``llm_query``, ``answer``. The REPL has all names at any
time; a dialect only says which of them the root is told of.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.fences import CODE_WORDS, fence_for
from rlm_kernel.errors import UsageError
from rlm_kernel.text import LEAST_CHARS_PER_TOKEN

__all__ = ["DIALECTS", "PAPER", "RLMS", "Dialect", "RunFacts", "dialect_named"]

PREVIEW_CHARS = 500
"""Of the prompt, in the first message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a system prompt says of the run at hand."""

    budget: Budget
    depth: int = 0
    """Of this run; 0 for the first."""

    sub: str = ""
    """Spec of the model of the sub-calls; empty where it has none."""

    sub_context: int | None = None
    """Tokens that the sub-model takes, reply included; ``None`` where nobody knows."""

    @property
    def may_recurse(self) -> bool:
        """Whether this run can start child runs."""
        return self.depth < self.budget.max_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a root is talked to."""

    name: str
    observation_chars: int
    """Bound of an observation."""

    prompt_name: str
    """What the root calls the prompt."""

    set_answer: str
    """Code that ends the run, as an example."""

    build_system_prompt: Callable[[Dialect, RunFacts], str]
    words: frozenset[str] = CODE_WORDS
    """Info words of fences that hold a cell."""

    fence_word: str = "repl"

    def system_prompt(self, facts: RunFacts) -> str:
        """What the root is told of its work, once."""
        return self.build_system_prompt(self, facts)

    def first_message(self, query: str, prompt: PromptInfo) -> str:
        """The query, and what can be told of the prompt without showing it."""
        return "\n\n".join(
            [
                f"Question: {query.strip()}",
                _about(self.prompt_name, prompt),
                f"Begin with a cell that looks at `{self.prompt_name}`.",
            ]
        )

    def cell(self, prose: str, source: str) -> str:
        """A reply that proposes *source*, as the root would have written it."""
        mark = fence_for(source)
        code = f"{mark}{self.fence_word}\n{source}\n{mark}"
        return f"{prose}\n\n{code}" if prose else code

    def no_code(self, *, cut: bool = False) -> str:
        """Told after a reply without a cell; *cut* where it was too long to be heard out."""
        why = "was cut off because it was too long" if cut else "held no cell"
        return (
            f"That reply {why}, so nothing was run. Reply with one fenced block:\n\n"
            f"```{self.fence_word}\n# Python\n```\n\n"
            f"If you have the answer, set it in a cell: `{self.set_answer}`. "
            "A second reply without a cell ends the run."
        )

    def skipped(self, note: str) -> str:
        """Told after a person decided that a cell is not to run."""
        return _with_note("A person skipped this cell: it was not run.", note) + (
            " Propose another one."
        )

    def regenerate(self, note: str) -> str:
        """Told where a person wants another proposal and says why."""
        return _with_note("A person read this cell and wants another one in its place.", note)

    def turns_left(self, left: int) -> str:
        """Told with an observation when the run is about to end; empty before."""
        if left > 3:
            return ""
        if left <= 1:
            return f"This is the last turn: set the answer now, with `{self.set_answer}`."
        return f"{left} turns are left. Set the answer in good time: `{self.set_answer}`."

    def rejected(self, reason: str) -> str:
        """Told with an observation when an answer does not count."""
        return f"The answer was not accepted: {reason}. The run goes on."

    def summary_request(self) -> str:
        """Asks the root to write down what it needs, when its context is nearly full."""
        return (
            "This conversation is close to the limit of your context. Write a summary to go on "
            "from, in prose, without a cell: what the question needs, what you found and where "
            "(with the names of the variables that hold it), what failed, and what is left to "
            "do. At most 400 words. It replaces the turns so far; the variables stay, and the "
            "whole conversation is in the list `history`."
        )

    def go_on(self) -> str:
        """Told after a summary replaced earlier turns."""
        return (
            "The turns before were replaced by this summary. Your variables are unchanged; "
            "`history` holds all messages. Go on with one cell."
        )


def dialect_named(name: str) -> Dialect:
    """The dialect of this name. Raises `UsageError`."""
    try:
        return DIALECTS[name]
    except KeyError:
        close = difflib.get_close_matches(name.lower(), DIALECTS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"there is no dialect {name!r}: choose {' or '.join(DIALECTS)}{hint}"
        ) from None


def _about(name: str, prompt: PromptInfo) -> str:
    what = {
        "str": "a str",
        "list": f"a list of {prompt.items:,} str",
        "dict": f"a dict of {prompt.items:,} str",
    }[prompt.kind]
    origin = f", from {prompt.source}" if prompt.source else ""
    preview = prompt.preview[:PREVIEW_CHARS]
    more = " …" if prompt.chars > len(preview) else ""
    return (
        f"`{name}` is {what} with {prompt.chars:,} characters in all{origin}. "
        f"It begins:\n\n{_quoted(preview + more)}"
    )


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines()) or "> (nothing)"


def _with_note(text: str, note: str) -> str:
    note = note.strip()
    return f"{text} The reason given: {note}" if note else text


# --- paper ------------------------------------------------------------------------------------

_PAPER = """\
You are the root of a recursive language model. You answer a question about a prompt that is \
too long to read. The prompt is not in this conversation: it is the variable `P` of a Python \
REPL. You see of it only what your cells show you. You work on it with code, and you hand \
pieces of it to a smaller model with `sub_RLM`.

## A turn
Reply with a sentence or two on what you want to know next, then with exactly one cell:

```repl
print(type(P), len(P))
print(P[:300])
```

Your reply ends where the fence closes; the cell is run, and the next message is its \
observation: what it printed, the value of its last expression, the variables that it changed, \
and the last lines of an error. Do not write down what you expect to see: wait for it. An \
observation has at most @OBSERVATION@ characters; of longer output the middle is left out. \
Variables, functions and imports stay from cell to cell. The REPL is IPython, so `await`, \
`%magics` and `!commands` work.

## In the REPL
- `P`: the prompt. Do not assign to it.
- `sub_RLM(prompt)`: asks the sub-model and returns its reply, a `str`. With a list of prompts \
it asks them all at once and returns a list in the same order: always prefer that to a loop. \
Options: `temperature=`, `max_tokens=`, `system=`, `stop=`. The sub-model sees the text that \
you pass and nothing else: not `P`, not this conversation. Put the question, the form of \
reply that you want, and the piece of text into every prompt.
- `choices=["yes", "no"]` makes every reply one of these; `schema=int` (or `list[str]`, a \
dataclass, a JSON Schema as a dict) makes it a value of that type; `check=f` asks once more where \
`f(value)` is false.
- `sub_RLM.map("instruction", items)`: one prompt for each item, with the item at the end, or \
where `{item}` stands; the same options.
@RECURSION@
- A call that fails raises `SubcallError`. In a list, the failed item *is* a `SubcallError` \
and the others are still there: find it with `isinstance(r, SubcallError)`, and ask again.
- `budget()`: what is used and left. `SHOW_VARS()`: your variables. `history`: all messages so far.
- `Final = value` ends the run with this answer; it may have any type. `FINAL(value)` and \
`FINAL_VAR("name")` do the same. An answer set by a cell that raises an error does not count.

## How to work
1. Look at the form of `P` first: its length, its first lines, what separates its parts.
2. Never print `P` or a large part of it, and do not read it piece by piece yourself.
3. Narrow with code: `re`, `str.find`, splitting, counting. Code is exact and costs nothing. \
Try several spellings before you conclude that something is not there.
4. Where the text has to be understood, cut it into windows that fit the sub-model, with some \
overlap, and ask about all of them in one `sub_RLM` call. @WINDOW@
5. Ask for short replies in a fixed form, with `choices=` or `schema=`, so that code can read \
them. Try two or three prompts before you send hundreds.
6. Check what comes back. Does the quoted text stand in its window (`reply in window`)? Is it a \
number where it should be? Do several windows agree? Ask again where they do not.
7. Keep intermediate results in variables, and print only what you need to decide the next step.
8. When the evidence is there, print the answer once, read it, and then set `Final` in a cell \
of its own.

## Limits
@LIMITS@
"""

_PAPER_RECURSION = """\
- `sub_RLM(text, depth="rlm", query="…")`: starts a child run with a REPL of its own, in which \
*text* is the prompt. Dear and slow; for a piece that is itself too long to read and needs \
several steps. A plain call is enough for everything else."""


def _paper_prompt(dialect: Dialect, facts: RunFacts) -> str:
    return _fill(_PAPER, dialect, facts, _PAPER_RECURSION)


# --- rlms -------------------------------------------------------------------------------------

_RLMS = """\
You answer a question about a context that is too long for you to read. The context is not in \
this conversation: it is the variable `context` of a Python REPL. You see of it only what your \
cells show you. Inspect and transform it with code, and give pieces of it to language models \
with `llm_query` and its relatives. Direct the work; let code and sub-models do the reading.

## A turn
Reply with a short plan and then with exactly one block of code:

```repl
print(type(context), len(context))
print(context[:300])
```

Your reply ends where the fence closes; the code is run, and the next message shows what it \
printed, the value of its last expression, the variables that it changed, and the last lines of \
an error. Do not write down what you expect to see: wait for it. You are shown at most \
@OBSERVATION@ characters a turn; of longer output the middle is left out. Variables, functions \
and imports stay from turn to turn.

## In the REPL
- `context`: the text (or list, or dict of texts) that the question is about.
- `llm_query(prompt)`: one completion of the sub-model, as `str`. It sees the text that you pass \
and nothing else, so put the question and the piece of context into the prompt.
- `llm_query_batched(prompts)`: the same for a list of prompts, all at once; returns a list in \
the same order. Always prefer it to a loop over `llm_query`.
@RECURSION@
- A call that fails raises `SubcallError`; in a batch the failed item *is* a `SubcallError` and \
the others are still there: filter with `isinstance(r, str)`.
- `SHOW_VARS()`: your variables. `budget()`: what is used and left. `history`: all messages so far.
- `answer`: a dict, `{"content": "", "ready": False}`. Set `answer["content"]` to the answer and \
then `answer["ready"] = True` to end the run. An answer set by a cell that raises does not count.

## How to work
1. Probe the context first: type, length, first lines, what separates its parts.
2. Then plan how the question splits into steps of code and of sub-model calls.
3. Never print the whole context. Narrow it with code where code can: `re`, `str.find`, \
splitting and counting are exact and cost nothing.
4. Where text has to be understood, cut it into chunks that fit the sub-model and send them in \
one `llm_query_batched` call. @WINDOW@
5. Ask for short replies in a fixed form, so that code can read them; try a few prompts before \
you send many.
6. Check the replies against the text that they came from, and ask again where they disagree.
7. Print the result, read it, and set `answer` in a later turn. Never set it in the first turn.

## Limits
@LIMITS@
"""

_RLMS_RECURSION = """\
- `rlm_query(prompt)` and `rlm_query_batched(prompts)`: like the above, but each prompt becomes \
the context of a child with a REPL of its own, for pieces that need several steps. Dear and \
slow; use them where a plain call is not enough."""


def _rlms_prompt(dialect: Dialect, facts: RunFacts) -> str:
    return _fill(_RLMS, dialect, facts, _RLMS_RECURSION)


# --- both -------------------------------------------------------------------------------------


def _fill(template: str, dialect: Dialect, facts: RunFacts, recursion: str) -> str:
    recursion = recursion if facts.may_recurse else ""
    if not recursion:
        template = template.replace("@RECURSION@\n", "")
    for mark, text in (
        ("@OBSERVATION@", f"{dialect.observation_chars:,}"),
        ("@RECURSION@", recursion),
        ("@WINDOW@", _window(facts)),
        ("@LIMITS@", _limits(facts)),
    ):
        template = template.replace(mark, text)
    return template.rstrip()


def _window(facts: RunFacts) -> str:
    if facts.sub_context is None:
        return (
            "How much the sub-model takes is not known; start with windows of some thousand "
            "characters, and make them smaller where a call says that its prompt is too long."
        )
    chars = facts.sub_context * LEAST_CHARS_PER_TOKEN
    return (
        f"The sub-model takes {facts.sub_context:,} tokens in all, prompt and reply together: "
        f"that is about {chars:,} characters, of which a window should fill two thirds at most."
    )


def _limits(facts: RunFacts) -> str:
    budget = facts.budget
    lines = [f"- {budget.max_turns} turns for this run."]
    if not facts.sub:
        lines.append("- There is no sub-model in this run: work with code alone.")
    elif budget.max_subcalls is not None:
        at_once = f", at most {budget.max_concurrency:,} at once" if budget.max_concurrency else ""
        lines.append(f"- {budget.max_subcalls:,} sub-calls{at_once}.")
    if budget.max_tokens is not None:
        lines.append(f"- {budget.max_tokens:,} tokens, yours and those of all sub-calls together.")
    if budget.max_seconds is not None:
        lines.append(f"- {budget.max_seconds:g} seconds of wall time.")
    if budget.max_cost is not None:
        lines.append(f"- ${budget.max_cost:g} in all.")
    if facts.depth:
        lines.append(f"- This is a child run, {facts.depth} below the first: be brief.")
    lines.append("A run that reaches a limit ends without an answer, so set one in good time.")
    return "\n".join(lines)


PAPER = Dialect(
    name="paper",
    # 30 full observations of 8,000 characters are some 70k tokens: they fit a context of 128k
    # without compaction. More would invite the root to read what sub-models should.
    observation_chars=8_000,
    prompt_name="P",
    set_answer="Final = value",
    build_system_prompt=_paper_prompt,
)
RLMS = Dialect(
    name="rlms",
    # What roots that were trained with rlms are used to.
    observation_chars=20_000,
    prompt_name="context",
    set_answer='answer["content"] = value; answer["ready"] = True',
    build_system_prompt=_rlms_prompt,
)
DIALECTS = {dialect.name: dialect for dialect in (PAPER, RLMS)}
