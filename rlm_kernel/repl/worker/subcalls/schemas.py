"""Python types and JSON Schemas as something that a reply can be read by.

Types are msgspec's affair, except for pydantic's models, which bring their own
schema and validation. A type with few values (``bool``, ``Literal``, an enum) is
a choice between labels, which small models get right more often than JSON.
"""

from __future__ import annotations

import enum
import json
import sys
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rlm_kernel.repl.worker.subcalls.numerals import number_in
from rlm_kernel.repl.worker.subcalls.replies import Unfit, bare, value_in

__all__ = ["Reading", "reading_of", "reading_of_choices"]

Fit = Callable[[str], Any]
"""Makes a value of its JSON text; raises `Unfit`."""

_MAX_NAME = 60
_NUMBERS = ("integer", "number")
_TOO_DEEP = "it is nested too deeply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a reply becomes a value."""

    name: str
    """For people: of the type, or of the choice."""

    read: Callable[[str], Any]
    """Makes the value of a reply; raises `Unfit`."""

    told: str
    """What the answer of a child run is to be; goes on after "with". Completions are told by
    the kernel, in words that suit their server."""

    choices: list[str] | None = None
    schema: str | None = None
    """Text of a JSON Schema."""


def reading_of(schema: Any) -> Reading | None:
    """The reading of ``schema=``; ``None`` for ``str``, which every reply is.

    Raises
    ------
    TypeError
        There is no JSON Schema for it.
    ValueError
        It is a dict that is no JSON Schema.
    """
    if schema is str:
        return None
    if isinstance(schema, Mapping):
        return _reading_of_json_schema(dict(schema))
    if schema is bool:
        return _labelled("bool", {"yes": True, "no": False}, {"true": True, "false": False})
    if typing.get_origin(schema) is typing.Literal:
        return _labelled(_name(schema), _labels(typing.get_args(schema)))
    if isinstance(schema, type) and issubclass(schema, enum.Enum):
        return _labelled(schema.__name__, _labels(schema))
    own = hasattr(schema, "__pydantic_validator__")  # a model, or a dataclass of pydantic's
    reading = _reading_by_pydantic(schema) if own else None
    return reading or _reading_of_type(schema)


def reading_of_choices(choices: Any) -> Reading:
    """The reading of ``choices=``: one of them, told apart by its str."""
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise TypeError(f"choices must be a list of values, not {type(choices).__name__}")
    labels = _labels(choices)
    return _labelled(_cut(f"choices({'|'.join(labels)})"), labels)


# --- labels -----------------------------------------------------------------------------------


def _labels(values: Iterable[Any]) -> dict[str, Any]:
    """*values* by their labels."""
    labels: dict[str, Any] = {}
    for value in values:
        label = str(value.value if isinstance(value, enum.Enum) else value)
        if not label.strip():
            raise ValueError("an empty text cannot be chosen; give every choice a name")
        if label in labels:
            raise ValueError(f"two choices read {label!r}; every choice needs a text of its own")
        labels[label] = value
    if not labels:
        raise ValueError("choices is empty; give the values to choose from")
    return labels


def _labelled(name: str, labels: dict[str, Any], also: Mapping[str, Any] | None = None) -> Reading:
    known = {**(also or {}), **labels}
    folded: dict[str, Any] = {}
    for label, value in known.items():
        key = _folded(label)
        folded[key] = _Twice if key in folded else value

    def read(text: str) -> Any:
        text = text.strip()
        if text in known:
            return known[text]
        value = folded.get(_folded(text), _Twice)
        if value is _Twice:
            raise Unfit(f"is none of {_cut(shown, 200)}")
        return value

    shown = _listed(labels)
    told = f"exactly one of these, and nothing else: {shown}"
    return Reading(name=name, read=read, told=told, choices=list(labels))


def _folded(text: str) -> str:
    """*text* regardless of dress, of case and of how its accents are written."""
    return unicodedata.normalize("NFC", bare(text)).casefold()


class _Twice:
    """Stands for a label that means two values once case and quotes are disregarded."""


def _listed(labels: Iterable[str]) -> str:
    """*labels* for the model to read; quoted where one could be taken for two."""
    labels = list(labels)
    if any("," in label or "\n" in label for label in labels):
        labels = [json.dumps(label, ensure_ascii=False) for label in labels]
    return ", ".join(labels)


# --- JSON -------------------------------------------------------------------------------------


def _json_reading(name: str, schema: dict[str, Any], fit: Fit) -> Reading:
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    find = number_in if schema.get("type") in _NUMBERS else value_in
    return Reading(
        name=_cut(name),
        read=lambda reply: find(reply, fit),
        told=f"JSON that fits this JSON Schema, and nothing else: {text}",
        schema=text,
    )


def _reading_of_type(kind: Any) -> Reading:
    if kind is None:
        raise TypeError("schema must be a type or a JSON Schema, not None")
    try:
        schema = msgspec.json.schema(kind)
        decoder = msgspec.json.Decoder(kind)
    except (TypeError, NameError) as error:
        reading = _reading_by_pydantic(kind)
        if reading is not None:
            return reading
        why = str(error).rpartition("\n")[2]  # before it, what is of use to msgspec's own callers
        raise TypeError(
            f"there is no JSON Schema for {_name(kind)}: {why}; use a dataclass, a TypedDict, "
            "plain types, a pydantic model, or a JSON Schema as a dict"
        ) from None

    def fit(text: str) -> Any:
        try:
            return decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise _misfit(str(error).replace("`", "")) from None

    return _json_reading(_name(kind), _without_root_reference(schema), fit)


def _without_root_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """*schema* with the type itself at the root, where servers expect to find it."""
    reference = schema.get("$ref", "")
    if not reference:
        return schema
    kinds = dict(schema["$defs"])
    name = reference.rpartition("/")[2]
    root = kinds[name]
    if json.dumps(root).find(f'"{reference}"') < 0:
        del kinds[name]
    return {**root, "$defs": kinds} if kinds else root


def _reading_of_json_schema(schema: dict[str, Any]) -> Reading:
    problem_of = _validator(schema)

    def fit(text: str) -> Any:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:
            raise Unfit(f"is no JSON: {error}") from None
        problem = problem_of(value)
        if problem:
            raise _misfit(problem)
        return value

    title = schema.get("title")
    name = title if isinstance(title, str) and title else "JSON"
    try:
        return _json_reading(name, schema, fit)
    except TypeError as error:
        raise TypeError(f"the JSON Schema cannot be written as JSON: {error}") from None


def _validator(schema: dict[str, Any]) -> Callable[[Any], str]:
    """Says how a value breaks *schema*; an empty str where it does not."""
    try:
        import jsonschema  # type: ignore[import-untyped]
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        return lambda value: ""
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(
            f"schema is no JSON Schema: {_cut(error.message, 300)} at {error.json_path}"
        ) from None
    except RecursionError:
        raise ValueError("schema holds itself: use $ref to a schema under $defs") from None
    # A registry of its own: without one, a reference to a URL would be fetched.
    validator = kind(schema, registry=Registry())

    def problem_of(value: Any) -> str:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except Unresolvable as missing:
            raise ValueError(
                f"schema refers to {missing.ref!r}, which is not in it; put it under $defs"
            ) from None
        except RecursionError:
            return _TOO_DEEP
        return "" if error is None else f"{_cut(error.message, 300)} at {error.json_path}"

    if problem_of(None) == _TOO_DEEP:
        raise ValueError("schema refers to itself without end: let it say what a value is")
    return problem_of


# --- pydantic ---------------------------------------------------------------------------------


def _reading_by_pydantic(kind: Any) -> Reading | None:
    """The reading of a model, or of a type that has one in it, such as ``list[Model]``."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None:  # then no model of its can be in there
        return None
    try:
        adapter = pydantic.TypeAdapter(kind)
        schema = adapter.json_schema()
    except (pydantic.errors.PydanticUserError, NameError):
        return None

    def fit(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise _misfit(f"{first['msg']} at $.{place}" if place else first["msg"]) from None

    return _json_reading(_name(kind), schema, fit)


def _misfit(problem: str) -> Unfit:
    return Unfit(f"does not fit the schema: {_cut(problem, 400)}")


def _name(kind: Any) -> str:
    """``Point``, ``list[Point]``, ``Literal['a', 'b']``."""
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    return _cut(repr(kind).replace("typing.", "").replace("__main__.", ""))


def _cut(text: str, most: int = _MAX_NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
