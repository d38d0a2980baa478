"""What cells write: standard streams, displays, and the limit on both."""

from __future__ import annotations

import fcntl
import io
import sys
import termios
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any, Literal

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.repl import messages
from rlm_kernel.repl.worker.captured import captured
from rlm_kernel.repl.worker.link import FrameTooLarge, Link

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import ReadableBuffer

__all__ = ["OutStream", "Outlet", "Streams"]

_PIECE = 1 << 18
"""Characters per message: at most 1 MiB of UTF-8."""

_PARTIAL_S = 0.1
"""Seconds after which text without a line end is sent, once more is written."""

_SETTLE_S = 0.01
"""Seconds that text waits for what others write to the descriptors."""

_ALWAYS = 20_000
"""Characters of a result that are shown even where the cell's output limit is used up."""


class _Pipes:
    """The pipes behind descriptors 1 and 2, which C code and subprocesses write to.

    Text that this process sends over the link must not overtake what they wrote before. The
    kernel reads the link first and then the pipes; so it is enough to send nothing while a
    pipe holds text. Keeps descriptors of its own: code may close 1 and 2.
    """

    def __init__(self) -> None:
        self._fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (1, 2)]

    def settle(self) -> None:
        """Wait until the kernel has read them; not long, because others may go on writing."""
        if not any(map(_unread, self._fds)):
            return
        until = time.monotonic() + _SETTLE_S
        while any(map(_unread, self._fds)) and time.monotonic() < until:
            time.sleep(0.0001)


def _unread(fd: int) -> int:
    """Bytes in the pipe *fd*; 0 where it is gone."""
    size = array("i", [0])
    try:
        fcntl.ioctl(fd, termios.FIONREAD, size)
    except OSError:
        return 0
    return size[0]


class Outlet:
    """Sends output of the current cell, as much as its limit allows, and counts the rest.

    ``cell`` is the cell that output belongs to: also what a thread or a
    background task writes after its end belongs to it, until the next.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pipes = _Pipes()
        self.interrupts = link.interrupts
        self.cell = 0
        self.left = 10_000_000
        self.dropped = 0

    def begin(self, cell: int, limit: int) -> None:
        """From now on output belongs to *cell*."""
        self.cell, self.left, self.dropped = cell, limit, 0

    def text(self, name: Literal["stdout", "stderr"], text: str) -> None:
        """Send stream text, in pieces."""
        kept = min(len(text), self.left)
        self.dropped += len(text) - kept
        self.left -= kept
        for start in range(0, kept, _PIECE):
            self.raw(Stream(name, text[start : min(start + _PIECE, kept)]))

    def rich(self, output: Display | Result) -> None:
        """Send a display or a result; what is over the limit is cut or left out."""
        if captured() is not None:
            return
        data: dict[str, Any] = {}
        for mime, content in output.data.items():
            size = len(content) if isinstance(content, (str, bytes)) else 0
            if size <= self.left:
                self.left -= size
                data[mime] = content
            elif mime == "text/plain":
                data[mime] = self._cut(content)
            else:
                self.dropped += size
        if not data:
            return
        if isinstance(output, Result):
            self._rich(Result(output.execution_count, data, output.metadata))
        else:
            self._rich(Display(data, output.metadata, output.display_id, output.update))

    def _cut(self, text: str) -> str:
        kept = min(len(text), max(self.left, _ALWAYS))
        self.left = max(0, self.left - kept)
        self.dropped += len(text) - kept
        return text if kept == len(text) else f"{text[:kept]}… (+{len(text) - kept:,} characters)"

    def _rich(self, output: Display | Result) -> None:
        try:
            self.raw(output)
        except FrameTooLarge as error:
            self.text("stderr", f"An output of this cell is not shown: {error}.\n")

    def error(self, error: ErrorOutput) -> None:
        """Send a traceback, always."""
        self.raw(error)

    def clear(self, wait: bool) -> None:
        """Ask the front end to clear what the cell has shown."""
        if captured() is None:
            self.raw(Clear(wait))

    def raw(self, output: Output) -> None:
        """Send *output* as it is."""
        self._pipes.settle()
        self._link.send(messages.Emit(id=self.cell, output=output))


class _Bytes(io.RawIOBase):
    """``sys.stdout.buffer``: bytes become text of the stream."""

    def __init__(self, stream: OutStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: ReadableBuffer, /) -> int:
        raw = bytes(data)
        self._stream.write(raw.decode("utf-8", "replace"))
        return len(raw)

    def flush(self) -> None:
        self._stream.flush()


class OutStream(io.TextIOBase):
    """A standard stream whose text goes up the link.

    Lines are sent as they end. `fileno` is that of the real descriptor, a pipe
    to the kernel: what C code and subprocesses write there is shown too.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: Literal["stdout", "stderr"], fd: int, outlet: Outlet) -> None:
        self._interrupts = outlet.interrupts
        self.name = f"<{name}>"
        self._stream = name
        self._fd = fd
        self._outlet = outlet
        self._parts: list[str] = []
        self._size = 0
        self._since = 0.0
        self._lock = threading.RLock()  # a finalizer may print while this thread is in here
        self._other: OutStream | None = None
        self._shut = False
        self.buffer = _Bytes(self)

    def pair(self, other: OutStream) -> None:
        """Keep the order of what is written to this stream and *other*."""
        self._other = other
        other._other = self

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._shut:
            raise ValueError("I/O operation on closed file.")
        below = captured()
        if below is not None:
            below.write(text)
            return len(text)
        other = self._other
        if other is not None and other._parts:
            other.flush()
        main = self._interrupts.enter()
        try:
            with self._lock:
                if not self._parts:
                    self._since = time.monotonic()
                self._parts.append(text)
                self._size += len(text)
                due = "\n" in text or self._size > 8192 or self._late()
            if due:
                self._send()
        finally:
            self._interrupts.leave(main)
        return len(text)

    def _late(self) -> bool:
        return time.monotonic() - self._since > _PARTIAL_S

    def writelines(self, lines: Iterable[str], /) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._parts:
            return
        main = self._interrupts.enter()
        try:
            self._send()
        finally:
            self._interrupts.leave(main)

    def _send(self) -> None:
        with self._lock:
            parts, self._parts, self._size = self._parts, [], 0
        self._outlet.text(self._stream, parts[0] if len(parts) == 1 else "".join(parts))

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        return self._shut

    def close(self) -> None:
        """Closed until the end of the cell: the REPL cannot do without its streams."""
        if not self._shut:
            self.flush()
            self._shut = True

    def reopen(self) -> None:
        """Undo `close`."""
        self._shut = False


class Streams:
    """``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, outlet: Outlet) -> None:
        self.out = OutStream("stdout", 1, outlet)
        self.err = OutStream("stderr", 2, outlet)
        self.out.pair(self.err)

    def install(self) -> None:
        """Put them in place."""
        sys.stdout = sys.__stdout__ = self.out  # type: ignore[assignment,misc]
        sys.stderr = sys.__stderr__ = self.err  # type: ignore[assignment,misc]

    def flush(self) -> None:
        """Send what is still held back."""
        self.out.flush()
        self.err.flush()

    def restore(self) -> None:
        """Put them back where a cell replaced or closed one, and say so."""
        for name, stream in (("stdout", self.out), ("stderr", self.err)):
            if getattr(sys, name, None) is stream and not stream.closed:
                continue
            stream.reopen()
            setattr(sys, name, stream)
            self.err.write(f"sys.{name} was replaced or closed by this cell; it is back now.\n")
