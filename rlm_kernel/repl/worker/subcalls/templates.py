"""One prompt for each item: a template that is filled, or a function."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from rlm_kernel.repl.messages import MAX_PROMPTS
from rlm_kernel.repl.worker.subcalls.prompts import exact, too_many

__all__ = ["Find", "Template", "collected", "map_prompts", "material"]

Find = Callable[[str, Any], Any]
"""The value that a field's name has for an item."""

_FORMATTER = string.Formatter()
_ITEM = ("", "item")


class Template:
    """A prompt with fields: ``{}`` or ``{item}`` for the item, ``{title}`` for what it holds.

    The part before the first field is the same in all prompts, which servers read once for
    all of them: put the instruction there. In a template without a field the item goes to the
    end, after an empty line. ``{{`` and ``}}`` are braces.

    Parameters
    ----------
    text
        The template.
    find
        Looks a field up; by default in the item itself.
    whole
        Whether the text is a prompt without an item.
    with_spec
        Whether what follows a colon is a format, as in ``{price:.2f}``; else it belongs to the
        name, as in the expression ``{item[:200]}``.

    Raises
    ------
    ValueError
        A brace has no partner.
    """

    def __init__(
        self, text: str, find: Find | None = None, *, with_spec: bool = True, whole: bool = False
    ) -> None:
        self._find, self._whole = find or found_in, whole
        try:
            pieces = list(_FORMATTER.parse(exact(text)))
        except ValueError as error:
            raise ValueError(f"{error} in the template; {_BRACES}") from None
        self._pieces = [_piece(*piece, with_spec=with_spec) for piece in pieces]
        if not whole and all(piece.name is None for piece in self._pieces):
            self._pieces.append(_Piece("\n\n", ""))

    def fill(self, item: Any) -> str:
        """The prompt for *item*."""
        return "".join(self._filled(item))

    def _filled(self, item: Any) -> Iterable[str]:
        for piece in self._pieces:
            yield piece.before
            if piece.name is None:
                continue
            is_item = piece.name in _ITEM and not self._whole
            value = material(item) if is_item else self._find(piece.name, item)
            value = _FORMATTER.convert_field(value, piece.conversion)
            yield value if isinstance(value, str) and not piece.spec else format(value, piece.spec)


_BRACES = "write {{ and }} for braces of the text"


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Text, and the field after it."""

    before: str
    name: str | None = None
    spec: str = ""
    conversion: str | None = None


def _piece(
    before: str, name: str | None, spec: str | None, conversion: str | None, *, with_spec: bool
) -> _Piece:
    if name is None:
        return _Piece(before)
    if not with_spec and spec:
        name, spec = f"{name}:{spec}", ""
    return _Piece(before, name.strip(), spec or "", conversion)


def found_in(name: str, item: Any) -> Any:
    """What *item* holds under *name*, which may go on as in ``item[0]`` and ``author.name``."""
    fields = fields_of(item)
    try:
        return _FORMATTER.get_field(name, (), {**fields, "item": item})[0]
    except (KeyError, AttributeError, IndexError, TypeError, ValueError):
        has = f"it has {', '.join(map(str, fields))}" if fields else "use {item}"
        raise ValueError(
            f"the template asks for {{{name}}}, which a {type(item).__name__} among the items "
            f"does not have; {has}, or {_BRACES}"
        ) from None


def fields_of(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    if hasattr(item, "_asdict"):  # a named tuple, such as a row of a table
        return dict(item._asdict())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    return {}


def material(item: Any) -> Any:
    """*item* as a prompt shows it: what has fields as one line for each, all else as it is."""
    fields = fields_of(item)
    if not fields:
        return item
    return "\n".join(f"{name}: {value}" for name, value in fields.items())


def collected(items: Any) -> list[Any]:
    """*items* of any iterable; of a dict its values.

    Raises
    ------
    TypeError
        It is a str, or nothing that can be iterated.
    ValueError
        It has more items than a call takes.
    """
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise TypeError(
            f"items must be a list or another iterable of items, not {type(items).__name__}"
        )
    if isinstance(items, Mapping):
        items = items.values()
    found = list(islice(items, MAX_PROMPTS + 1))  # it may have no end
    if len(found) > MAX_PROMPTS:
        raise too_many(f"more than {MAX_PROMPTS:,} items")
    return found


def map_prompts(make: str | Callable[[Any], str], items: list[Any]) -> list[str]:
    """The prompt of each item, by a template or a function.

    Raises
    ------
    TypeError
        *make* is neither, or the function returns something else than a str.
    ValueError
        The template asks for what an item does not have.
    """
    if isinstance(make, str):
        return [*map(Template(make).fill, items)]
    if not callable(make):
        raise TypeError(
            f"map takes a template or a function first, not {type(make).__name__}, and then items"
        )
    prompts = []
    for place, item in enumerate(items):
        prompt = make(item)
        if not isinstance(prompt, str):
            raise TypeError(
                f"the function returned {type(prompt).__name__} for item {place}; "
                "it must return the prompt, a str"
            )
        prompts.append(exact(prompt))
    return prompts
