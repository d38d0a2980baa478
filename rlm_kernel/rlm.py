"""The engine in any Python program: ``RLM(root=…, sub=…).completion(P, query=…)``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rlm_kernel import values
from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.budget import Budget, Usage
from rlm_kernel.engine.decisions import Policy
from rlm_kernel.engine.dialects import dialect_named
from rlm_kernel.engine.events import RunEnded, Stored
from rlm_kernel.engine.roots import Root
from rlm_kernel.errors import NoAnswer, PromptError, RLMError, UsageError
from rlm_kernel.pickled import pickled
from rlm_kernel.prompts import check_prompt
from rlm_kernel.record import Record
from rlm_kernel.repl import Repl
from rlm_kernel.session.eventlog import EventLog
from rlm_kernel.session.models import Models
from rlm_kernel.session.request import TASK_QUERY, Request
from rlm_kernel.session.session import Session, new_id
from rlm_kernel.session.settings import Settings
from rlm_kernel.subcalls.endpoint import Endpoint
from rlm_kernel.subcalls.scheduling.scheduler import Scheduler
from rlm_kernel.tool_function import tool_functions

__all__ = ["RLM", "CompletedRun", "Completion"]

T = TypeVar("T")
Prompt = str | Sequence[str] | Mapping[str, str] | Sequence[Mapping[str, str]]

CHAT_QUERY = "P is a conversation, one message per item. Write the reply to its last message."


class CompletedRun:
    """A run that is over, as its record has it."""

    def __init__(self, run_id: str, path: Path, ended: RunEnded) -> None:
        self.run_id = run_id
        self.record_path = path
        self.state = ended.state
        self.reason = ended.reason
        self.turns = ended.turns
        self.subcalls = ended.subcalls

    def events(self) -> Iterator[Stored]:
        """All events of the run, in order. Raises `RecordError` where the record is gone."""
        record = Record.read(self.record_path)
        try:
            yield from record.events(self.run_id)
        finally:
            record.close()

    def __repr__(self) -> str:
        return f"<run {self.run_id}: {self.state} after {self.turns} turns>"


class Completion:
    """What a run came to."""

    def __init__(self, ended: RunEnded, run: CompletedRun) -> None:
        self.response: str = ended.response
        """The answer as text."""
        self.answer: object = None if ended.answer is None else values.decode(ended.answer)
        """The answer with its Python type."""
        self.usage: Usage = ended.usage
        """Of the root and all sub-calls."""
        self.run = run

    def __str__(self) -> str:
        return self.response

    def __repr__(self) -> str:
        return f"Completion(response={self.response[:80]!r}, run={self.run!r})"


class RLM:
    """A recursive language model (arXiv 2512.24601): a root that works on ``P`` in a REPL.

    Parameters
    ----------
    root
        Spec such as ``"openai:MODEL@URL"``, ``"playbook:FILE"``, or a `Root` of your own. One
        of your own is used for one completion at a time.
    sub
        Spec of the model of sub-calls, or an `Endpoint` of your own; without it the root's.
    dialect
        ``"paper"`` or ``"rlms"``: names, prompt and answer protocol that the root expects.
    budget
        Limits of the whole tree of runs.
    policy
        Called with every proposal; decides what happens with it.
    record
        The SQLite file to append to; without it a new file in Jupyter's data folder.
    on_event
        Called with every event after it was recorded, on the thread that runs the engine.
    environ
        Where keys are looked up; the process's own where ``None``.
    tools
        Documented functions that the models of sub-calls may use; the root is not told of them.
        They run in the REPL's process: copies of them, with what they refer to.
    allow_whole_prompt
        Let a child run get the whole ``P`` of a run above it, which is refused otherwise.
    cache
        Give sub-calls the replies that *record* has of earlier runs, where they ask the same
        again: the n-th time the n-th reply. ``False`` asks the models anew.

    Raises
    ------
    UsageError
        An argument is of another type, or a spec names none or one that needs a key.

    Notes
    -----
    Code that the root writes runs in a process of its own, without your keys. From the first
    completion on the calling process is undumpable (``PR_SET_DUMPABLE``), so that the code
    cannot read them from this process either; it stays so.

    Examples
    --------
    >>> rlm = RLM(root="openai:qwen3@http://localhost:8000", sub="embedded")  # doctest: +SKIP
    >>> rlm.completion(text, query="Which week had most outages?").response  # doctest: +SKIP
    'week 37'
    """

    def __init__(
        self,
        root: str | Root = "",
        sub: str | Endpoint = "",
        *,
        dialect: str = "paper",
        budget: Budget | None = None,
        policy: Policy | None = None,
        record: str | Path | None = None,
        on_event: Callable[[Stored], None] | None = None,
        environ: Mapping[str, str] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        allow_whole_prompt: bool = False,
        cache: bool = True,
    ) -> None:
        _check_kind("root", root, "a spec such as 'openai:MODEL@URL' or a Root", _is_root)
        _check_kind("sub", sub, "a spec such as 'openai:MODEL@URL' or an Endpoint", _is_endpoint)
        _check_kind("dialect", dialect, "a str", _is_str)
        _check_kind("budget", budget, "a Budget", lambda it: it is None or isinstance(it, Budget))
        _check_kind("policy", policy, "a function of a proposal", _is_callback)
        _check_kind("record", record, "the path of a file", _is_path)
        _check_kind("on_event", on_event, "a function of an event", _is_callback)
        _check_kind("environ", environ, "a dict of str", _is_environ)
        _check_kind("tools", tools, "a list of functions", lambda it: isinstance(it, list | tuple))
        tool_functions(tools)
        self._environ = os.environ if environ is None else environ
        self._root = None if isinstance(root, str) else root
        self._sub = None if isinstance(sub, str) else sub
        self._settings = Settings(
            root=(root or self._environ.get("RLM_ROOT", "")) if isinstance(root, str) else "",
            sub=(sub or self._environ.get("RLM_SUB", "")) if isinstance(sub, str) else "",
            dialect=dialect,
            budget=budget or Budget(),
            allow_whole_prompt=allow_whole_prompt,
            cache=cache,
        )
        self._tools = tuple(tools)
        self._policy = policy
        self._record = None if record is None else Path(record)
        self._on_event = on_event
        self._check()

    def _check(self) -> None:
        dialect_named(self._settings.dialect)
        models = self._models()
        if self._root is None:
            models.check_root(self._settings.root)
        if self._settings.sub:
            models.sub_spec(self._settings)

    def _models(self) -> Models:
        models = Models(self._environ, sub=self._sub)
        models.trust(f"{self._settings.root} {self._settings.sub}")
        return models

    def completion(
        self, prompt: Prompt, query: str | None = None, *, root_prompt: str | None = None
    ) -> Completion:
        """Answer *query* about *prompt*. Works with and without a running event loop.

        Parameters
        ----------
        prompt
            The long input: a ``str``, a list or dict of ``str``, or chat messages
            (``[{"role": …, "content": …}]``), which are replied to as in a chat call.
        query
            The question. ``root_prompt`` is another name for it.

        Raises
        ------
        NoAnswer
            The run was stopped by a limit or by its policy.
        RLMError
            The run failed; `RootError` where the root could not be asked.
        UsageError, PromptError
            Where the run cannot start.
        """
        return _run_anywhere(self.acompletion(prompt, query, root_prompt=root_prompt))

    async def acompletion(
        self, prompt: Prompt, query: str | None = None, *, root_prompt: str | None = None
    ) -> Completion:
        """`completion` for a program with an event loop of its own."""
        if query is not None and root_prompt is not None:
            raise UsageError("query and root_prompt are two names for one thing; give one of them")
        given = query if root_prompt is None else root_prompt
        _check_query(given)
        plain, asked = _plain_prompt(prompt)
        request = Request(
            query=given or asked,
            settings=self._settings,
            pickled_tools=pickled(self._tools) if self._tools else b"",
        )
        log = EventLog(lambda: Record.open(self._record))
        if self._on_event is not None:
            log.subscribe(self._on_event)
        repl = Repl.spawn()
        session = Session(
            repl,
            log=log,
            models=self._models(),
            scheduler=Scheduler(emit=log.emit, commit=log.settle, replies=log),
        )
        try:
            return await self._complete(session, request, plain)
        finally:
            await asyncio.shield(session.close())

    async def _complete(
        self, session: Session, request: Request, prompt: str | list[str] | dict[str, str]
    ) -> Completion:
        await session.repl.ready()
        loaded: PromptInfo = await session.repl.load_prompt(prompt, source="program")
        session.prompt_set(loaded)
        run_id = new_id()
        ended = await session.finish(
            await session.prepare(request, root=self._root, policy=self._policy, run_id=run_id)
        )
        run = CompletedRun(run_id, Path(session.log.path), ended)
        if ended.state == "answered":
            return Completion(ended, run)
        error: RLMError
        if ended.state == "stopped":
            error = NoAnswer(f"the run stopped without an answer: {ended.reason}")
        else:
            error = RLMError(f"the run failed: {ended.reason}")
        error.add_note(f"record: {run.record_path}, run {run_id}")
        raise error


def _check_kind(name: str, value: object, wanted: str, fits: Callable[[Any], bool]) -> None:
    if not fits(value):
        raise UsageError(f"{name} is {wanted}, not {_kind(value)}; see help(rlm_kernel.RLM)")


def _kind(value: object) -> str:
    """What *value* is, in a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return value is None or isinstance(value, str | Path)


def _is_environ(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_callback(value: object) -> bool:
    return value is None or callable(value)


def _is_root(value: object) -> bool:
    # Generators have a `close` as well, models of other libraries a `name`.
    return isinstance(value, str) or _has_methods(value, "propose", "close")


def _is_endpoint(value: object) -> bool:
    return isinstance(value, str) or _has_methods(value, "complete", "context_limit", "close")


def _has_methods(value: object, *names: str) -> bool:
    methods = (getattr(value, name, None) for name in names)
    return not isinstance(value, type) and all(callable(method) for method in methods)


def _check_query(query: object) -> None:
    if query is not None and not isinstance(query, str):
        raise UsageError(f"the query is a str, not {_kind(query)}; ask in words")
    if query is not None and not query.strip():
        raise UsageError("the query is empty; ask something about the prompt")


def _plain_prompt(prompt: Prompt) -> tuple[str | list[str] | dict[str, str], str]:
    """*prompt* as what ``P`` can be, and the query where none is given."""
    if isinstance(prompt, str):
        return prompt, TASK_QUERY
    if isinstance(prompt, Mapping):
        return check_prompt(dict(prompt)), TASK_QUERY
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        return check_prompt(prompt), TASK_QUERY  # says what can be one
    items = list(prompt)
    messages = [item for item in items if isinstance(item, Mapping)]
    if items and len(messages) == len(items):
        texts = [_message_text(number, item) for number, item in enumerate(messages, 1)]
        return texts, CHAT_QUERY
    return check_prompt(items), TASK_QUERY


def _message_text(number: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    # Chat APIs take parts of a message too.
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    said = [text for text in texts if isinstance(text, str)]
    if len(said) < len(texts):
        raise PromptError(
            f"message {number} of the prompt holds no content, or other than text; give each "
            "message as {'role': …, 'content': 'its text'}"
        )
    return f"{message.get('role', 'user')}: " + "\n".join(said)


def _run_anywhere(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run *coroutine* to its end, on a thread of its own where this one has a running loop.

    Ctrl-C cancels it and is raised when it has ended, in either case.
    """
    if not _has_running_loop():
        return asyncio.run(coroutine)
    begun: Future[Callable[[], None]] = Future()
    """How to cancel it."""

    async def work() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        begun.set_result(lambda: _call_soon(loop, task.cancel))
        return await coroutine

    # Its exit waits for the thread.
    with ThreadPoolExecutor(1, thread_name_prefix="rlm-completion") as thread:
        done = thread.submit(lambda: asyncio.run(work()))
        try:
            return done.result()
        except BaseException:
            if not done.done():  # interrupted here; else it is the completion's own error
                begun.add_done_callback(lambda cancel: cancel.result()())
            raise


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """From another thread; nothing where *loop* has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
