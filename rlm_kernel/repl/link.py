"""The kernel's end of the link: frames in, frames out, nothing else believed.

What arrives is decoded into the structs of `rlm_kernel.repl.messages` or
refused; there is no third way. Work per turn of the event loop is bounded in
both directions, so that a worker that floods the link, or never reads it,
costs the kernel neither its responsiveness nor its memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rlm_kernel.errors import LinkError, UsageError
from rlm_kernel.repl.frames import MAX_VALUES, holds_too_many
from rlm_kernel.repl.messages import MAX_FRAME, FromWorker, ToWorker
from rlm_kernel.text import escape_surrogates

__all__ = ["MAX_UNSENT", "Link", "LinkOwner"]

MAX_UNSENT = 256 << 20
"""Bytes that may wait for a worker to read them. Beyond it the worker is given up."""

_READ = 64 << 10
"""Bytes read per turn of the loop. Small frames cost most: 64 KiB of them take some 3 ms."""

_READ_LARGE = 1 << 20
"""The same in the middle of a large frame, which costs only its copy."""

_CATCH_UP = 16
"""Reads at once where something else waits for the link."""

_WRITE = 4 << 20
"""Bytes written per turn of the loop."""


class LinkOwner(Protocol):
    """Who is told what comes over a link. Called on the event loop."""

    def on_messages(self, messages: list[FromWorker]) -> None:
        """Messages that came in one read, in order."""

    def on_violation(self, error: LinkError) -> None:
        """The worker broke the protocol. Nothing more is read."""

    def on_end(self) -> None:
        """The worker closed its end. Nothing more comes."""


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"the extension type {code} is not part of the protocol")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(
    FromWorker,
    ext_hook=_refuse_extension,
)
_length = struct.Struct("<I")


def encode_frame(message: ToWorker) -> bytearray:
    """Return *message* as a frame.

    A lone surrogate, which UTF-8 cannot carry, becomes its backslash escape.

    Raises
    ------
    UsageError
        The frame would be longer than `MAX_FRAME`.
    """
    frame = bytearray(4)
    try:
        _encoder.encode_into(message, frame, 4)
    except UnicodeEncodeError:
        _encoder.encode_into(_without_surrogates(message), frame, 4)
    size = len(frame) - 4
    if size > MAX_FRAME:
        raise UsageError(
            f"A message of {size:,} bytes is too large for the worker, which takes"
            f" {MAX_FRAME:,} at once: send it in parts, or load it as the prompt."
        )
    _length.pack_into(frame, 0, size)
    return frame


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return escape_surrogates(value)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        clean = {name: _without_surrogates(field) for name, field in fields.items()}
        return msgspec.structs.replace(value, **clean)
    if isinstance(value, (list, tuple)):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


class Link:
    """Frames over one stream socket, on one event loop.

    Owns the socket and every descriptor that is given to `send`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._owner: LinkOwner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pauses: set[str] = set()
        self._incoming = bytearray()
        self._wanted = _READ
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent = 0
        self._reading = False
        self._closed = False

    def fileno(self) -> int:
        """Descriptor of the socket, -1 once closed."""
        return self._sock.fileno()

    def attach(self, loop: asyncio.AbstractEventLoop, owner: LinkOwner) -> None:
        """Start to read. *owner* hears of everything from now on."""
        self._loop, self._owner = loop, owner
        self._watch()

    def close(self) -> None:
        """Close the socket, which tells the worker to exit. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._watch()
        if self._loop is not None:
            self._loop.remove_writer(self._sock)
        self._drop_outgoing()
        self._incoming = bytearray()
        self._sock.close()

    # --- incoming -----------------------------------------------------------------------------

    def pause(self, why: str) -> None:
        """Stop reading until `resume` with the same word: the worker feels it as a full buffer."""
        self._pauses.add(why)
        self._watch()

    def resume(self, why: str) -> None:
        """Take back a `pause`."""
        self._pauses.discard(why)
        self._watch()

    def drain(self) -> None:
        """Handle what the worker sent before it ended, paused or not."""
        while not self._closed and self._read():
            pass

    def catch_up(self) -> None:
        """Handle what has come by now, a bounded part of it, unless reading is paused."""
        for _ in range(_CATCH_UP):
            if not self._reading or not self._read():
                break

    def _watch(self) -> None:
        wanted = not (self._pauses or self._closed)
        if self._loop is None or wanted == self._reading:
            return
        self._reading = wanted
        if wanted:
            self._loop.add_reader(self._sock, self._read)
        else:
            self._loop.remove_reader(self._sock)

    def _read(self) -> bool:
        """Read once and pass on the whole frames. Return whether anything came."""
        assert self._owner is not None
        try:
            data = self._sock.recv(self._wanted)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.pause("end")
            self._owner.on_end()
            return False
        self._incoming += data
        messages, violation = self._take_frames()
        if messages:
            self._owner.on_messages(messages)
        if violation is not None and not self._closed:
            self.pause("violation")
            self._owner.on_violation(violation)
        return violation is None

    def _take_frames(self) -> tuple[list[FromWorker], LinkError | None]:
        messages: list[FromWorker] = []
        start, have = 0, len(self._incoming)
        self._wanted = _READ
        with memoryview(self._incoming) as view:
            while have - start >= 4:
                (size,) = _length.unpack_from(view, start)
                if size > MAX_FRAME:
                    return messages, self._violation(f"a frame of {size:,} bytes")
                end = start + 4 + size
                if end > have:
                    self._wanted = min(max(_READ, end - have), _READ_LARGE)
                    break
                with view[start + 4 : end] as frame:
                    if holds_too_many(frame):
                        return messages, self._violation(f"more than {MAX_VALUES:,} values at once")
                    try:
                        messages.append(_decoder.decode(frame))
                    except (msgspec.DecodeError, ValueError, RecursionError) as error:
                        return messages, self._violation(f"a frame that is no message ({error})")
                start = end
        del self._incoming[:start]
        return messages, None

    def _violation(self, what: str) -> LinkError:
        return LinkError(f"The worker sent {what[:300]}, which the link does not allow.")

    # --- outgoing -----------------------------------------------------------------------------

    def send(self, message: ToWorker, fds: Sequence[int] = ()) -> None:
        """Queue *message*, and *fds* with it. They are closed once they are sent.

        Raises
        ------
        UsageError
            The message is too large for a frame. Nothing was queued.
        """
        try:
            frame = encode_frame(message)
        except UsageError:
            _close_all(fds)
            raise
        if self._closed:
            _close_all(fds)
            return
        idle = not self._outgoing
        self._outgoing.append((memoryview(frame), fds))
        self._unsent += len(frame)
        if idle:
            self._write()
        if self._unsent > MAX_UNSENT and self._owner is not None:
            self._drop_outgoing()
            self._owner.on_violation(
                LinkError(f"The worker left more than {MAX_UNSENT:,} bytes unread.")
            )

    def _write(self) -> None:
        budget = _WRITE
        try:
            while self._outgoing and budget > 0:
                budget -= self._write_some()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop_outgoing()  # the other end is closed: the reader hears of it, and says so
        assert self._loop is not None
        if self._outgoing:
            self._loop.add_writer(self._sock, self._write)
        else:
            self._loop.remove_writer(self._sock)

    def _write_some(self) -> int:
        view, fds = self._outgoing[0]
        sent = socket.send_fds(self._sock, [view], list(fds)) if fds else self._sock.send(view)
        _close_all(fds)
        self._unsent -= sent
        if sent == len(view):
            self._outgoing.popleft()
        else:
            self._outgoing[0] = (view[sent:], ())
        return sent

    def _drop_outgoing(self) -> None:
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
        self._unsent = 0


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
