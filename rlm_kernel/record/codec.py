"""Events to JSON and back, without loss, with long texts left to blobs.

A string in the JSON that starts with ``rlm:`` stands for what JSON cannot
hold, or should not hold in every row:

    rlm:blob:SHA256     a text that lies in the table ``blob``
    rlm:bytes:SHA256    bytes that lie there
    rlm:float:nan       a number that JSON has no word for (also inf and -inf)

A text that itself starts so is always left to a blob, so no text can be
taken for a reference. A mapping whose keys are not plain strings becomes
``{"rlm:pairs": [[key, value], …]}``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rlm_kernel.engine.events import Event, RunEnded, TurnExecuted
from rlm_kernel.record.fault import Fault

__all__ = ["LONG", "compress", "decompress", "pack", "references", "unpack", "unpack_text"]

LONG = 4096
"""Characters; a longer text becomes a blob."""

_PREFIX = "rlm:"
_BLOB, _BYTES, _FLOAT, _PAIRS = "rlm:blob:", "rlm:bytes:", "rlm:float:", "rlm:pairs"

# Bounded already, and what one reads first in plain SQL, where a reference would say nothing.
_INLINE = frozenset({"source", "observation"})

# Their fields of type Any come from user code and may hold what JSON silently changes.
_FREE_FORM = (TurnExecuted, RunEnded)

_encode = msgspec.json.Encoder().encode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_tree = msgspec.json.Decoder().decode

Fetch = Callable[[str], bytes]
"""Gives the bytes of a blob by its SHA-256. Raises `Fault` where it is missing."""


def pack(event: Event) -> tuple[str, dict[str, bytes]]:
    """*event* as JSON, and the blobs that it refers to by SHA-256.

    Nearly all events are small and hold nothing special: they are encoded
    straight from the struct, and only searched for signs of the contrary.
    """
    if not isinstance(event, _FREE_FORM):
        try:
            body = _encode(event)
        except UnicodeEncodeError:  # lone surrogates
            body = b""
        # A float that is no number was written as null, and would not be read back.
        if 0 < len(body) <= LONG and b'"rlm:' not in body and b"null" not in body:
            return body.decode(), {}
    blobs: dict[str, bytes] = {}
    tree = msgspec.to_builtins(event, builtin_types=(bytes,))
    inline = {name: tree[name] for name in _INLINE & tree.keys() if _can_be_inline(tree[name])}
    packed = {name: _pack(value, blobs) for name, value in tree.items() if name not in inline}
    return _encode({**packed, **inline}).decode(), blobs


def _pack(value: Any, blobs: dict[str, bytes]) -> Any:
    if isinstance(value, str):
        plain = len(value) <= LONG and _can_be_inline(value)
        return value if plain else _BLOB + _put(value.encode("utf-8", "surrogatepass"), blobs)
    if isinstance(value, float):
        return value if math.isfinite(value) else f"{_FLOAT}{value}"
    if isinstance(value, bytes):
        return _BYTES + _put(value, blobs)
    if isinstance(value, (list, tuple)):
        return [_pack(item, blobs) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and _can_be_inline(key) for key in value):
            return {key: _pack(item, blobs) for key, item in value.items()}
        pairs = [[_pack(key, blobs), _pack(item, blobs)] for key, item in value.items()]
        return {_PAIRS: pairs}
    return value


def _can_be_inline(value: object) -> bool:
    if not isinstance(value, str):
        return value is None
    if value.startswith(_PREFIX):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _put(data: bytes, blobs: dict[str, bytes]) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    blobs[sha256] = data
    return sha256


def unpack(body: str, fetch: Fetch) -> Event:
    """The event that `pack` made *body* of.

    Raises
    ------
    Fault
        A blob is missing or damaged.
    msgspec.DecodeError
        *body* is no event.
    """
    if '"rlm:' not in body:
        return _decode_event(body)
    event: Event = msgspec.convert(_unpack(_decode_tree(body), fetch), Event)
    return event


def unpack_text(text: str, fetch: Fetch) -> str:
    """A single text as it stands in a column: itself, or what it refers to."""
    found: str = _unpack(text, fetch)
    return found


def _unpack(value: Any, fetch: Fetch) -> Any:
    if isinstance(value, str):
        return _dereference(value, fetch) if value.startswith(_PREFIX) else value
    if isinstance(value, list):
        return [_unpack(item, fetch) for item in value]
    if isinstance(value, dict):
        if _PAIRS in value:
            return {_key(_unpack(k, fetch)): _unpack(v, fetch) for k, v in value[_PAIRS]}
        return {key: _unpack(item, fetch) for key, item in value.items()}
    return value


def _dereference(reference: str, fetch: Fetch) -> str | bytes | float:
    if reference.startswith(_BLOB):
        return fetch(reference.removeprefix(_BLOB)).decode("utf-8", "surrogatepass")
    if reference.startswith(_BYTES):
        return fetch(reference.removeprefix(_BYTES))
    if reference.startswith(_FLOAT):
        return float(reference.removeprefix(_FLOAT))
    raise Fault(f"the record refers to {reference[:60]!r}, which this rlm-kernel cannot read")


def _key(key: Any) -> Any:
    return tuple(_key(item) for item in key) if isinstance(key, list) else key


def references(body: str) -> Iterator[str]:
    """SHA-256 of every blob that *body* refers to."""
    if '"rlm:' in body:
        yield from _references(_decode_tree(body))


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith((_BLOB, _BYTES)):
        yield value.rpartition(":")[2]
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _references(item)


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame that says how long its content is."""
    import zstandard  # here: a kernel in which nothing is recorded need not wait for it

    return zstandard.ZstdCompressor(level=level).compress(data)


def decompress(frame: bytes, size: int) -> bytes:
    """The *size* bytes that `compress` was given.

    Raises
    ------
    Fault
        *frame* is damaged, or says another size: then nothing is allocated for it.
    """
    import zstandard

    try:
        if zstandard.get_frame_parameters(frame).content_size != size:
            raise Fault("compressed data of the record does not have the size it should have")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise Fault(f"compressed data of the record is damaged: {error}") from error
