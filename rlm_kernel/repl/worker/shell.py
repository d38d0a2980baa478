"""IPython, with the link as its front end."""

# IPython has types, but not for much of what a subclass overrides and calls.
# mypy: disable-error-code="no-untyped-call,override,union-attr"

from __future__ import annotations

import ast
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from IPython.core import interactiveshell
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Any as AnyTrait
from traitlets import Instance, Type, default
from traitlets.config import Config

from rlm_kernel.cells import Display, ErrorOutput, Result
from rlm_kernel.errors import RLMError
from rlm_kernel.text import escape_surrogates

if TYPE_CHECKING:
    from rlm_kernel.repl.worker.interrupts import Interrupts
    from rlm_kernel.repl.worker.streams import Outlet, Streams

__all__ = ["WorkerShell", "make_shell"]

_LONG = 1_000_000
"""Characters of a str that its repr in a result shows."""

_MAX_NAME, _MAX_MESSAGE, _MAX_TRACEBACK = 1000, 20_000, 1_000_000
"""Characters of an exception that are told: with more, its frame might be too large."""

_MAX_LINES = 10_000
"""Of a traceback, for the same reason."""

_OWN = "rlm_kernel.repl.worker."
"""Beginning of the names of the worker's own modules."""

_INLINE = "module://matplotlib_inline.backend_inline"


def _encoded(data: dict[str, Any]) -> dict[str, Any]:
    """A MIME bundle as a notebook file has it: binary contents in base64."""
    if not any(isinstance(content, bytes) for content in data.values()):
        return data
    from base64 import b64encode

    return {
        mime: b64encode(content).decode() if isinstance(content, bytes) else content
        for mime, content in data.items()
    }


class _Publisher(DisplayPublisher):
    """``display()``, ``update_display()``, ``clear_output()``."""

    outlet: Outlet
    streams: Streams

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        self._validate_data(data, metadata)
        self.streams.flush()
        display_id = (transient or {}).get("display_id")
        self.outlet.rich(Display(_encoded(data), metadata or {}, display_id, update))

    def clear_output(self, wait: bool = False) -> None:
        self.streams.flush()
        self.outlet.clear(bool(wait))


class _Hook(DisplayHook):
    """The value of a trailing expression."""

    outlet: Outlet
    streams: Streams

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        self.streams.flush()
        self.outlet.rich(Result(self.prompt_count, _encoded(format_dict), md_dict or {}))

    def log_output(self, format_dict: dict[str, Any]) -> None:
        # For `%history -o`. IPython would keep all that was shown, images included.
        text = format_dict.get("text/plain")
        if isinstance(text, str) and len(text) < 10_000:
            self.shell.history_manager.output_hist_reprs[self.prompt_count] = text

    def finish_displayhook(self) -> None:
        self._is_active = False


class WorkerShell(InteractiveShell):
    """The InteractiveShell of a worker. Make it with `make_shell`."""

    display_pub: _Publisher
    displayhook: _Hook
    display_pub_class = Type(_Publisher)
    displayhook_class = Type(_Hook)
    kernel = AnyTrait()
    worker = AnyTrait()
    profile_dir = Instance(ProfileDir)

    @default("profile_dir")
    def _make_profile_dir(self) -> Any:
        # Only `%store` and its like need it; a REPL that starts writes nothing to the disk.
        return ProfileDir.create_profile_dir_by_name(self.ipython_dir, "default")

    def __init__(
        self, *, outlet: Outlet, streams: Streams, interrupts: Interrupts, **kwargs: Any
    ) -> None:
        self.outlet = outlet
        self.streams = streams
        self.interrupts = interrupts
        self.last_error: ErrorOutput | None = None
        self.display_failed = False
        super().__init__(**kwargs)
        self.display_pub.outlet = self.displayhook.outlet = outlet
        self.display_pub.streams = self.displayhook.streams = streams
        self.display_formatter.formatters["text/plain"].for_type(str, _pretty_str)

    # --- parts of IPython that a worker does differently --------------------------------------

    def init_profile_dir(self, profile_dir: Any) -> None:
        pass

    def init_virtualenv(self) -> None:
        pass

    def init_environment(self) -> None:
        os.environ.update(TERM="xterm-color", CLICOLOR="1", PAGER="cat", GIT_PAGER="cat")
        os.environ.setdefault("MPLBACKEND", _INLINE)

    def init_hooks(self) -> None:
        from IPython.core import page

        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self._page), 99)

    def _page(
        self, text: Any, start: int = 0, screen_lines: int = 0, pager_cmd: Any = None
    ) -> None:
        data = text if isinstance(text, dict) else {"text/plain": text}
        payload = {"source": "page", "data": data, "start": max(0, start)}
        self.payload_manager.write_payload(payload)

    def set_next_input(self, s: str, replace: bool = False) -> None:
        payload = {"source": "set_next_input", "text": s, "replace": replace}
        self.payload_manager.write_payload(payload)

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in (None, "inline", "agg"):
            raise UsageError(
                f"The event loop of {gui!r} cannot run in this REPL; use %matplotlib inline"
            )

    def ask_exit(self) -> None:
        """``exit`` and ``quit``: the end of the cell, not of the REPL."""
        raise SystemExit

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        # IPython keeps all that a cell prints in its history: unbounded memory for nothing.
        yield

    # --- running ------------------------------------------------------------------------------

    def run_cell(self, *args: Any, **kwargs: Any) -> Any:
        self.last_error, self.display_failed = None, False
        return super().run_cell(*args, **kwargs)

    def should_run_async(self, raw_cell: str, **kwargs: Any) -> bool:
        if super().should_run_async(raw_cell, **kwargs):
            return True
        transformed = kwargs.get("transformed_cell")
        return bool(self.autoawait and transformed and starts_tasks(transformed))

    def evaluate(self, expressions: dict[str, str]) -> dict[str, Any]:
        """Evaluate the ``user_expressions`` of an execute request."""
        values: dict[str, Any] = self.user_expressions(expressions)
        return values

    def take_payload(self) -> list[dict[str, Any]]:
        """What the cell left for the front end: a pager's text, the next input."""
        payload: list[dict[str, Any]] = self.payload_manager.read_payload()
        self.payload_manager.clear_payload()
        return payload

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        # IPython would format the traceback once more, and call str() of the exception.
        return {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    # --- errors -------------------------------------------------------------------------------

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            etype, value, tb = self._get_exc_info(exc_tuple)
        except ValueError:  # nothing to show: IPython says so
            super().showtraceback(exc_tuple, *args, **kwargs)
            return
        if etype is UsageError:
            # One line, as IPython shows it; but as the error of the cell, which otherwise some
            # front ends show beside the text on stderr.
            self._showtraceback(etype, value, [f"UsageError: {value}"])
        elif issubclass(etype, SystemExit):
            self._showtraceback(etype, value, [_exit_note(value)])
        elif self.interrupts.count and etype.__name__ == "CancelledError":
            # An interrupt of a cell that awaits is a cancellation inside the loop only.
            stop = KeyboardInterrupt().with_traceback(tb)
            self._format((KeyboardInterrupt, stop, tb), *args, **kwargs)
        elif _has_group(value):
            # IPython prints groups straight to stderr.
            self._showtraceback(etype, value, traceback.format_exception(etype, value, tb))
        else:
            if issubclass(etype, (KeyboardInterrupt, RLMError)):
                _end_in_user_code(tb)
            self._format((etype, value, tb), *args, **kwargs)

    def _format(self, error: Any, *args: Any, **kwargs: Any) -> None:
        """Show *error* as IPython does; plainly where that fails, or is interrupted itself."""
        shown = self.last_error
        super().showtraceback(error, *args, **kwargs)
        if self.last_error is shown:
            etype, value, tb = error
            self._showtraceback(etype, value, traceback.format_exception(etype, value, tb))

    def _showtraceback(self, etype: type[BaseException], evalue: Any, stb: list[str]) -> None:
        self.streams.flush()
        try:
            message = str(evalue)
        except Exception as error:
            message = f"<str() of the exception raised {type(error).__name__}>"
        self.last_error = ErrorOutput(
            _shortened(etype.__name__, _MAX_NAME),
            _shortened(message, _MAX_MESSAGE),
            _shortened_lines(stb),
        )
        if self.displayhook.is_active:
            self.display_failed = True
        self.outlet.error(self.last_error)


def _shortened(text: str, most: int) -> str:
    """*text* as UTF-8 can carry it, of a very long one only its beginning."""
    shown = escape_surrogates(text[:most])
    return shown if len(text) <= most else f"{shown}… (+{len(text) - most:,} characters)"


def _shortened_lines(lines: list[str]) -> list[str]:
    """The beginning of a traceback, which may be much longer than its message."""
    shown: list[str] = []
    room = _MAX_TRACEBACK
    for number, line in enumerate(lines):
        if room <= 0 or number == _MAX_LINES:
            return [*shown, f"… (+{len(lines) - number:,} lines)"]
        shown.append(_shortened(line, room))
        room -= len(line) + 1
    return shown


# Libraries (rich, plotly and many a recipe) know a notebook by the name of this class.
WorkerShell.__name__ = WorkerShell.__qualname__ = "ZMQInteractiveShell"


def _stand_in_for_zmqshell() -> None:
    """Others (tqdm) know it by this module's being loaded, or by an instance of its class.

    The real one would load ZeroMQ, whose threads and sockets do not belong in a worker.
    """
    module = ModuleType("ipykernel.zmqshell", "Stands in for ipykernel's in a worker.")
    module.ZMQInteractiveShell = WorkerShell  # type: ignore[attr-defined]
    sys.modules.setdefault(module.__name__, module)


def _let_interrupts_of_commands_end_cells(interrupts: Interrupts) -> None:
    """IPython hands an interrupt on to the command of ``!cmd`` and goes on with the cell; or
    fails, where it had not started the command yet.

    Methods of the shell would not do: they look for ``{names}`` in the frame that called them.
    """

    def ending(run: Callable[[str], Any]) -> Callable[[str], Any]:
        @wraps(run)
        def run_command(command: str) -> Any:
            before = interrupts.count
            try:
                return run(command)
            finally:
                if interrupts.count > before:
                    raise KeyboardInterrupt from None

        return run_command

    for name in ("system", "getoutput", "get_output_error_code"):
        if run := getattr(interactiveshell, name, None):  # not all versions have the last one
            setattr(interactiveshell, name, ending(run))


def _pretty_str(text: str, printer: Any, cycle: bool) -> None:
    """repr of a str; of a very long one only its beginning, or P would fill the notebook."""
    if len(text) <= _LONG:
        printer.text(repr(text))
    else:
        printer.text(f"{text[:_LONG]!r}… (+{len(text) - _LONG:,} characters)")


def _exit_note(value: SystemExit) -> str:
    code = "" if value.code is None else f"({value.code!r})"
    return f"SystemExit{code}: this ended the cell only; the REPL and its variables are still here."


def _end_in_user_code(tb: TracebackType | None) -> None:
    """Cut off the frames in which the worker raised what the user's code is to see."""
    last = None
    while tb is not None:
        if not tb.tb_frame.f_globals.get("__name__", "").startswith(_OWN):
            last = tb
        tb = tb.tb_next
    if last is not None:
        last.tb_next = None


def _has_group(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return True
        error = error.__context__
    return False


def starts_tasks(source: str) -> bool:
    """Whether *source* starts tasks at its top level and so needs a running event loop.

    In a Jupyter kernel cells run inside of one. Here only these and those with
    ``await`` do, so that ``asyncio.run`` works in all others.
    """
    if not any(name in source for name in _TASK_STARTERS):
        return False
    try:
        pending: list[ast.AST] = list(ast.parse(source).body)
    except (SyntaxError, ValueError):
        return False
    starts = False
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("run", "run_until_complete"):
                return False
            starts |= name in _TASK_STARTERS
        pending.extend(ast.iter_child_nodes(node))
    return starts


_TASK_STARTERS = ("create_task", "ensure_future", "get_running_loop")


def make_shell(outlet: Outlet, streams: Streams, interrupts: Interrupts) -> WorkerShell:
    """The shell of this worker, in the module ``__main__``."""
    config = Config()
    # Its thread would make the worker multi-threaded; `%history` works without the database.
    config.HistoryManager.enabled = False
    # How tqdm, ipywidgets and others recognize a notebook.
    config.IPKernelApp = Config()
    _stand_in_for_zmqshell()
    _let_interrupts_of_commands_end_cells(interrupts)
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    if "" not in sys.path:
        sys.path.insert(0, "")
    return WorkerShell.instance(
        config=config, outlet=outlet, streams=streams, interrupts=interrupts
    )
