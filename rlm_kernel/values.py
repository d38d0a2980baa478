"""Python values that cross the link, without pickle.

In `cells.Value.data` plain values stand as msgpack has them. All others are a
list of two: a tag and what the value is made of.

=================  =====  ===========================================
type               tag    payload
=================  =====  ===========================================
list, tuple, set,  l t s  list of items
frozenset          f
dict               d      list of pairs
int over 64 bits   i      its hexadecimal digits
complex            c      real and imaginary part
str with lone      u      its bytes, surrogates passed
surrogates
bytearray          b      its bytes
date               da     ISO 8601
datetime, time     dt ti  ISO 8601, and the fold
timedelta          td     days, seconds, microseconds
Decimal            de     its digits
Fraction           fr     numerator and denominator, hexadecimal
path               pa     the path
any other          o      name of its type, and its ``str()``
=================  =====  ===========================================

A Fraction of more than some thousand bits is among the others: to make one takes
time that goes with the square of its digits.

A ``str`` at the top travels as `Value.text` alone, so that a long answer is not
carried twice.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from rlm_kernel.cells import Value
from rlm_kernel.text import escape_surrogates

__all__ = ["decode", "encode", "received"]

MAX_DEPTH = 100
"""Nesting of a value that is carried; what is deeper, or contains itself, is text only."""

_MAX_LISTS = 3 * (MAX_DEPTH + 2)
"""Nesting of lists in what `encode` makes: a dict takes three of them."""

_MAX_FRACTION = 1000
"""Hexadecimal digits of numerator and denominator."""

_MAX_ALIKE = 100
"""Items of a set, or keys of a dict, with one hash. More are made to collide: each is compared
with all the others."""


class _TooDeep(Exception):
    """The value is nested too deeply or contains itself."""


def encode(value: object) -> Value:
    """*value* for the link. Never raises, whatever the classes in it do."""
    kind = type(value)
    text = _text(value)
    if kind is str and text == value:  # else lone surrogates had to be escaped in the text
        return Value(kind.__name__, text)
    encoder = _Encoder()
    try:
        data = encoder.encode(value, MAX_DEPTH)
    except Exception:  # too deep, or a class of the user's that raises when it is looked at
        return Value(kind.__name__, text, None, False)
    if isinstance(data, list) and data[0] == "o":
        return Value(kind.__name__, text, None, False)
    return Value(kind.__name__, text, data, encoder.exact)


def received(value: Value) -> Value:
    """*value* as it came from a worker, without data that `encode` cannot have made.

    What is nested without end would fail everywhere that it is looked at. Goes by levels and
    does not recurse.
    """
    level = [value.data]
    for _ in range(_MAX_LISTS):
        if any(isinstance(item, dict) for item in level):
            break
        level = [item for held in level if isinstance(held, list) for item in held]
        if not level:
            return value
    return Value(value.type, value.text, None, False)


def decode(value: Value) -> Any:
    """What `encode` was given, or the nearest to it.

    Where ``exact`` is false: the ``dict`` of a dataclass, the builtin under a
    subclass or a numpy scalar; and the text of anything else. What comes from a
    worker is not trusted: data that means nothing decodes to the text.
    """
    if value.data is None:
        return None if value.type == "NoneType" and value.exact else value.text
    try:
        return _decode(value.data, MAX_DEPTH + 1)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError):
        return value.text


def _text(value: object) -> str:
    """``str(value)``, fit for UTF-8."""
    try:
        text = str(value)
    except Exception as error:
        # Also for an int of more digits than str() will write.
        if type(value) is int:
            return hex(value)
        text = f"<{type(value).__name__} whose str() raises {type(error).__name__}>"
    return escape_surrogates(text)


class _Encoder:
    """One encoding: knows the containers that it is in, and whether all was exact."""

    def __init__(self) -> None:
        self.exact = True
        self._open: set[int] = set()

    def encode(self, value: Any, depth: int) -> Any:
        if depth < 0:
            raise _TooDeep
        encoder = _ENCODERS.get(type(value))
        if encoder is not None:
            data = encoder(value)
            if isinstance(data, list) and data[0] == "o":
                self.exact = False
            return data
        tag = _CONTAINERS.get(type(value))
        if tag is not None:
            return self._container(tag, value, depth)
        self.exact = False
        return self._nearest(value, depth)

    def _container(self, tag: str, value: Any, depth: int) -> list[Any]:
        if id(value) in self._open:
            raise _TooDeep
        self._open.add(id(value))
        items = list(value.items()) if tag == "d" else value
        if tag == "d":
            made: list[Any] = [
                [self.encode(key, depth - 1), self.encode(item, depth - 1)] for key, item in items
            ]
        else:
            made = [self.encode(item, depth - 1) for item in items]
        self._open.discard(id(value))
        return [tag, made]

    def _nearest(self, value: Any, depth: int) -> Any:
        """For a class that is not ours to carry: its fields, its builtin base, or its text."""
        fields = getattr(type(value), "__dataclass_fields__", None)
        if fields is not None:
            held = {name: getattr(value, name) for name in fields if hasattr(value, name)}
            return self._container("d", held, depth)
        if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
            item = value.item()  # a numpy scalar
            if type(item) is not type(value):
                return self.encode(item, depth - 1)
        for base in _BASES:
            if isinstance(value, base):
                return self.encode(_as_base(base, value), depth - 1)
        return ["o", [type(value).__name__, _text(value)]]


def _as_base(base: type, value: Any) -> Any:
    """The builtin that a subclass's instance is, past whatever the class overrides."""
    if base is str:
        return str.__str__(value)
    if base in (int, float):
        return float.__pos__(value) if base is float else int.__index__(value)
    if base is dict:
        return dict(dict.items(value))
    return base(base.__iter__(value))  # type: ignore[attr-defined]


def _int(value: int) -> Any:
    return value if -(2**63) <= value < 2**63 else ["i", format(value, "x")]


def _str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["u", value.encode("utf-8", "surrogatepass")]
    return value


def _zoned(tag: str) -> Callable[[Any], Any]:
    def encode_time(value: Any) -> Any:
        zone = value.tzinfo
        # Only fixed offsets are whole in ISO 8601; of a zone its name would be lost.
        if zone is None or type(zone) is datetime.timezone:
            return [tag, [value.isoformat(), value.fold]]
        return ["o", [type(value).__name__, str(value)]]

    return encode_time


def _fraction(value: Fraction) -> Any:
    if max(abs(value.numerator), value.denominator) >= 16**_MAX_FRACTION:
        return ["o", [type(value).__name__, _text(value)]]
    return ["fr", [format(value.numerator, "x"), format(value.denominator, "x")]]


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: _int,
    float: lambda value: value,
    str: _str,
    bytes: lambda value: value,
    bytearray: lambda value: ["b", bytes(value)],
    complex: lambda value: ["c", [value.real, value.imag]],
    datetime.date: lambda value: ["da", value.isoformat()],
    datetime.datetime: _zoned("dt"),
    datetime.time: _zoned("ti"),
    datetime.timedelta: lambda value: ["td", [value.days, value.seconds, value.microseconds]],
    Decimal: lambda value: ["de", str(value)],
    Fraction: _fraction,
    type(Path()): lambda value: ["pa", str(value)],
}

_CONTAINERS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", dict: "d"}

_BASES: tuple[type, ...] = (str, int, float, dict, list, tuple, set, frozenset)


def _decode(data: Any, depth: int) -> Any:
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("no value is a map")
        return data
    if depth < 0:
        raise ValueError("nested too deeply")
    tag, payload = data
    if tag == "d":
        pairs = [(_decode(key, depth - 1), _decode(item, depth - 1)) for key, item in payload]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    collect = _COLLECT.get(tag)
    if collect is not None:
        items = [_decode(item, depth - 1) for item in payload]
        if tag in "sf":
            _check_hashes(items)
        return collect(items)
    return _DECODERS[tag](payload)


def _check_hashes(items: list[Any]) -> None:
    if len(items) > _MAX_ALIKE and max(Counter(map(hash, items)).values()) > _MAX_ALIKE:
        raise ValueError("the items are made to collide")


def _decode_fraction(payload: Any) -> Fraction:
    numerator, denominator = payload
    # One more for a sign.
    if max(len(numerator), len(denominator)) > _MAX_FRACTION + 1:
        raise ValueError("the fraction is too long")
    return Fraction(int(numerator, 16), int(denominator, 16))


def _folded(time: Any, fold: int) -> Any:
    return time.replace(fold=fold) if fold else time


_COLLECT: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "f": frozenset,
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda payload: int(payload, 16),
    "c": lambda payload: complex(*payload),
    "u": lambda payload: payload.decode("utf-8", "surrogatepass"),
    "b": lambda payload: bytearray(memoryview(payload)),  # of an int it would allocate
    "da": datetime.date.fromisoformat,
    "dt": lambda payload: _folded(datetime.datetime.fromisoformat(payload[0]), payload[1]),
    "ti": lambda payload: _folded(datetime.time.fromisoformat(payload[0]), payload[1]),
    "td": lambda payload: datetime.timedelta(*payload),
    "de": Decimal,
    "fr": _decode_fraction,
    "pa": Path,
    "o": lambda payload: payload[1],
}
