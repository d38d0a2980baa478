"""Standard output and standard error of the command line, whatever they are at the other end.

The answer is what a command is run for: where it cannot be printed, that is an
error. What goes to standard error tells of the work and must never end it.
"""

from __future__ import annotations

import io
import os
import sys

from rlm_kernel.errors import RLMError

__all__ = ["escape_controls", "forgive_stderr", "give_up_stdout", "print_answer", "say"]

_NULL_STREAMS = 2


class _Forgiving(io.FileIO):
    """A descriptor that may be full or closed at its other end: what is lost there is lost."""

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # FileIO's own type is not public
        try:
            written = super().write(view)
        except OSError:
            return view.nbytes
        return view.nbytes if written is None else written


def forgive_stderr() -> None:
    """Make a closed or full standard error no reason for any code to fail.

    Descriptors 0 to 2 that are closed are opened on the null device: the next file or socket
    that is opened would get their number, and with it what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _NULL_STREAMS:
        pass
    os.close(descriptor)
    if sys.stderr is not sys.__stderr__:
        return  # somebody's who calls us, and theirs to look after
    raw = _Forgiving(_NULL_STREAMS, "w", closefd=False)
    encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True
    )


def say(text: str) -> None:
    """Print *text* on standard error in one line, as the command's own."""
    print(f"jupyter rlm: {escape_controls(' '.join(text.split()))}", file=sys.stderr)


def print_answer(text: str, *, otherwise: str) -> None:
    """Print *text* on standard output; *otherwise* ends the sentence where that fails.

    Control characters are shown and not obeyed where it is a terminal.

    Raises
    ------
    RLMError
        Standard output is closed or cannot be written.
    BrokenPipeError
        Nobody reads it any more.
    """
    if sys.stdout is None:
        raise RLMError(f"standard output is closed; {otherwise}")
    encoding = sys.stdout.encoding or "utf-8"
    shown = escape_controls(text, keep="\n\t") if sys.stdout.isatty() else text
    try:
        print(shown.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        give_up_stdout()
        reason = error.strerror or error
        raise RLMError(f"standard output cannot be written ({reason}); {otherwise}") from error


def give_up_stdout() -> None:
    """Send what is still held back for standard output nowhere: Python would complain once more
    at its exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def escape_controls(text: str, keep: str = "") -> str:
    r"""*text* with its control characters (C0, DEL, C1) as ``\xNN``, except those in *keep*.

    A terminal would obey them: a model could write its title, or over what stands there.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) if _is_control(c) and c not in keep else c for c in text)


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character <= "\x9f"


def _escaped(character: str) -> str:
    return f"\\x{ord(character):02x}"
