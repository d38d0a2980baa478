"""How much a frame may hold, told before it is decoded.

A byte of msgpack can become an empty container of some 90 bytes, and more work
after that: the size of a frame bounds neither memory nor time, the number
of its values does. Both ends look, the worker so that a cell hears of it and
the kernel because it believes nothing.
"""

from __future__ import annotations

import struct

__all__ = ["MAX_VALUES", "holds_too_many"]

MAX_VALUES = 1_000_000
"""Values in one frame: numbers, strings, containers, and all that is in them."""

_HARMLESS = 256 << 10
"""Bytes of a frame that is not looked at: whatever is in it, it is small."""

# What follows the first byte of a value: a fixed number of bytes, or a length of this width.
# Of a container only the head counts, since its items come next as values of their own.
_FIXED = [1] * 256
for _byte in range(0xA0, 0xC0):  # short strings
    _FIXED[_byte] = 1 + (_byte & 0x1F)
_FIXED[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # floats, unsigned and signed integers
_FIXED[0xDC:0xE0] = [3, 5, 3, 5]  # arrays and maps
_LENGTHS = {
    0xC4: struct.Struct(">B"),
    0xC5: struct.Struct(">H"),
    0xC6: struct.Struct(">I"),
    0xD9: struct.Struct(">B"),
    0xDA: struct.Struct(">H"),
    0xDB: struct.Struct(">I"),
}
for _byte in _LENGTHS:
    _FIXED[_byte] = 0


def holds_too_many(frame: bytes | bytearray | memoryview, place: int = 0) -> bool:
    """Whether *frame*, msgpack from *place* on, holds more than `MAX_VALUES` values.

    What is no msgpack may get either answer, and is left to the decoder.
    Source: the msgpack specification, https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    end = len(frame)
    if end <= max(_HARMLESS, place):
        return False
    # Every value takes a byte, so nothing needs to be known of where a container ends.
    fixed = _FIXED
    for _ in range(MAX_VALUES):
        byte = frame[place]
        size = fixed[byte]
        if size:
            place += size
        else:
            length = _LENGTHS[byte]
            if place + 1 + length.size > end:
                return False
            place += 1 + length.size + length.unpack_from(frame, place + 1)[0]
        if place >= end:
            return False
    return True
