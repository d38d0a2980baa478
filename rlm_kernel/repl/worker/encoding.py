"""Messages of the worker as frames of the link."""

from __future__ import annotations

import msgspec

from rlm_kernel.repl import messages
from rlm_kernel.repl.frames import MAX_VALUES, holds_too_many
from rlm_kernel.repl.messages import FromWorker
from rlm_kernel.repl.worker.plain import encode_hook, plain

__all__ = ["FrameTooLarge", "frame_of"]

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


class FrameTooLarge(ValueError):
    """A message is longer, or holds more values, than the link allows."""


def frame_of(message: FromWorker) -> bytearray:
    """The frame that carries *message*, its length first.

    Raises
    ------
    FrameTooLarge
        See there.
    TypeError
        It holds an object that the link cannot carry.
    """
    frame = bytearray(4)
    try:
        _encoder.encode_into(message, frame, 4)
    except (UnicodeEncodeError, OverflowError):
        # Lone surrogates and huge integers: rare enough to be found out by failing.
        builtins = msgspec.to_builtins(
            message, builtin_types=(bytes,), enc_hook=encode_hook, str_keys=False
        )
        frame = bytearray(4)
        _encoder.encode_into(plain(builtins), frame, 4)
    size = len(frame) - 4
    if size > messages.MAX_FRAME:
        raise FrameTooLarge(
            f"{size / 2**20:.0f} MiB are more than the {messages.MAX_FRAME >> 20} MiB that "
            "one message between REPL and kernel can hold; make it smaller"
        )
    if holds_too_many(frame, 4):
        raise FrameTooLarge(
            f"more than the {MAX_VALUES:,} numbers, texts and containers that one message "
            "between REPL and kernel can hold; make it smaller"
        )
    frame[:4] = size.to_bytes(4, "little")
    return frame
