"""The names that the REPL gives to a cell, and the answer that a cell gives with them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal

from rlm_kernel.cells import AnswerSet
from rlm_kernel.repl.worker.prompt import PromptHolder
from rlm_kernel.values import encode

__all__ = ["Answer", "AnswerBook", "Names"]

_MISSING = object()

How = Literal["Final", "FINAL", "FINAL_VAR", "SUBMIT", "answer"]


class Answer(dict[str, Any]):
    """Ends the run once ``answer["ready"]`` is true; ``answer["content"]`` is its result then.

    Looked at when the cell has ended, so the order of the two does not matter.
    """

    def __init__(self) -> None:
        super().__init__(content="", ready=False)


class AnswerBook:
    """Everything with which a cell can set the answer of the run.

    Parameters
    ----------
    namespace
        Of the user's module.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._called: tuple[How, Any] | None = None
        self.answer = Answer()
        self._before: tuple[Any, Any, Any] = (_MISSING, "", False)

    def begin_run(self) -> None:
        """Forget every answer."""
        self._namespace.pop("Final", None)
        self.answer = Answer()
        self._namespace["answer"] = self.answer

    def begin_cell(self, *, turn: bool) -> None:
        """Whatever is set from now on was set by this cell."""
        self._called = None
        if turn:
            # An earlier answer that did not end the run was no answer: without this, setting
            # the same object again could not be told from leaving it there.
            self._namespace.pop("Final", None)
            self.answer["ready"] = False
        self._before = (
            self._namespace.get("Final", _MISSING),
            self.answer.get("content"),
            _true(self.answer.get("ready")),
        )

    def end_cell(self, say: Callable[[str], None]) -> AnswerSet | None:
        """The answer that the cell set, if it set one. *say* tells it of a mistake."""
        self._take_over()
        found = self._called or self._from_dict(say) or self._from_name(say)
        if found is None:
            return None
        how, value = found
        return AnswerSet(how, encode(value))

    def _take_over(self) -> None:
        """A cell that bound ``answer`` to a dict of its own meant ours."""
        bound = self._namespace.get("answer")
        if bound is self.answer:
            return
        if isinstance(bound, dict) and bound.keys() & {"content", "ready"}:
            self.answer.update(bound)
            self._namespace["answer"] = self.answer

    def _from_dict(self, say: Callable[[str], None]) -> tuple[How, Any] | None:
        content, ready = self.answer.get("content"), _true(self.answer.get("ready"))
        _, before, was_ready = self._before
        if not ready or (was_ready and content is before):
            return None
        if content is None or (isinstance(content, str) and not content):
            say('answer["ready"] is set, but answer["content"] is empty: no answer was taken.')
            return None
        return "answer", content

    def _from_name(self, say: Callable[[str], None]) -> tuple[How, Any] | None:
        value = self._namespace.get("Final", _MISSING)
        if value is _MISSING or value is self._before[0] or _is_typing_final(value):
            return None
        if value is None:
            say("Final is set to None, which is no answer: no answer was taken.")
            return None
        return "Final", value

    # --- what the REPL offers -----------------------------------------------------------------

    def FINAL(self, value: Any) -> None:
        """End the run with this value as its answer."""
        if value is None:
            raise ValueError("FINAL(None): None is no answer; give the value that answers")
        self._called = ("FINAL", value)

    def FINAL_VAR(self, name: Any) -> None:
        """End the run with the value of the variable of this name as its answer."""
        value = self._variable(name) if isinstance(name, str) else name
        if value is None:
            raise ValueError("FINAL_VAR: None is no answer; give a variable that holds one")
        self._called = ("FINAL_VAR", value)

    def _variable(self, name: str) -> Any:
        namespace = self._namespace
        key = name.strip()
        if key in namespace:
            return namespace[key]
        # FINAL_VAR(x) in place of FINAL_VAR("x"): the value came itself.
        is_value = not key.isidentifier() or any(value is name for value in namespace.values())
        if is_value:
            return name
        names = [known for known in namespace if not known.startswith("_")]
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "SHOW_VARS() lists all."
        raise NameError(f"FINAL_VAR: there is no variable {key!r}; {hint}")

    def SUBMIT(self, *value: Any, **fields: Any) -> None:
        """End the run with one value, or with several named ones as a dict."""
        if len(value) > 1 or bool(value) == bool(fields):
            raise TypeError("SUBMIT takes one value, or named ones as in SUBMIT(answer=…)")
        submitted = value[0] if value else fields
        if submitted is None:
            raise ValueError("SUBMIT(None): None is no answer; give the value that answers")
        self._called = ("SUBMIT", submitted)


class Names:
    """Installs the REPL's names, and puts them back after a turn that rebound them.

    Parameters
    ----------
    namespace
        Of the user's module.
    offered
        Functions of the REPL, by name; ``P``, ``context``, ``answer`` and ``history`` are added.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        prompt: PromptHolder,
        book: AnswerBook,
        offered: dict[str, Any],
    ) -> None:
        self._namespace = namespace
        self._prompt = prompt
        self._book = book
        self._offered = offered
        self._history: list[dict[str, str]] = []
        self._bound = frozenset(offered) | {"answer", "history"}

    @property
    def reserved(self) -> frozenset[str]:
        """All names that are the REPL's."""
        return self._bound | {"P", "context", "Final"}

    def install(self) -> None:
        """Bind all names afresh."""
        self._namespace.update(self._offered, answer=self._book.answer, history=self._copies())
        self.install_prompt()

    def install_prompt(self) -> None:
        """Bind ``P`` and ``context`` to the prompt."""
        if self._prompt.loaded:
            self._namespace["P"] = self._namespace["context"] = self._prompt.value

    def begin_run(self, history: list[dict[str, str]]) -> None:
        """Bind all names afresh and forget what an earlier run left in them."""
        self._history = list(history)
        self._book.begin_run()
        self.install()

    def begin_cell(self, *, turn: bool, history: list[dict[str, str]]) -> None:
        """Append to ``history``; remember what the cell must leave alone."""
        self._book.begin_cell(turn=turn)
        if history:
            self._history += history
            self._namespace["history"] = self._copies()

    def restore(self) -> list[str]:
        """Put back what a turn rebound or deleted; the names of what was."""
        namespace = self._namespace
        found = [name for name, value in self._offered.items() if namespace.get(name) is not value]
        if namespace.get("answer") is not self._book.answer:
            found.append("answer")
        if namespace.get("history") != self._history:
            found.append("history")
        if self._prompt.loaded:
            touched = self._prompt.restore()
            found += [
                name
                for name in ("P", "context")
                if touched or namespace.get(name, _MISSING) is not self._prompt.value
            ]
        if found:
            self.install()
        return found

    def replace_missing(self) -> None:
        """Give back what ``%reset`` or ``del`` in a person's cell took away."""
        wanted = self._bound | {"P", "context"} if self._prompt.loaded else self._bound
        if wanted <= self._namespace.keys():
            return
        own = dict(self._offered, answer=self._book.answer, history=self._copies())
        if self._prompt.loaded:
            own |= {"P": self._prompt.value, "context": self._prompt.value}
        for name, value in own.items():
            self._namespace.setdefault(name, value)

    def rebound_prompt(self) -> Any:
        """What a person's cell bound ``P`` or ``context`` to; the prompt itself where nothing."""
        for name in ("P", "context"):
            if name in self._namespace and self._namespace[name] is not self._prompt.value:
                return self._namespace[name]
        return self._prompt.value

    def _copies(self) -> list[dict[str, str]]:
        return [dict(message) for message in self._history]


def _true(value: object) -> bool:
    try:
        return bool(value)
    except Exception:  # such as an array's: it was set to something
        return True


def _is_typing_final(value: object) -> bool:
    """``from typing import Final`` binds the name too, and means nothing by it."""
    return type(value).__module__ == "typing"
