"""Typed replies: what a server is sent so that a reply has the form that was asked for.

Servers differ, and ignore in silence what they do not know: vLLM has ``structured_outputs``,
llama.cpp grammars (GBNF), OpenAI a JSON Schema whose root is an object. To others nothing is
sent that they might refuse. Every model is told the form in words, too, in the system message:
a grammar alone makes a model that meant something else say what it did not mean.

A schema is passed on and never evaluated here: a pattern in it could hold up the event loop.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

import msgspec

from rlm_kernel.cells import SubcallParams
from rlm_kernel.errors import UsageError
from rlm_kernel.subcalls.endpoint import EndpointError

__all__ = ["ServerKind", "TypedForm", "check_form", "gbnf_literal", "typed_form"]

ServerKind = Literal["vllm", "llamacpp", "openai", "other"]
"""``openai`` is OpenAI's own, ``other`` any that did not say what it is."""

MOST_CHOICES = 1000
LONGEST = 64 << 10
"""Bytes of a schema, and of all choices together."""

DEEPEST = 32
"""Levels of a schema."""

_TOLD = 2000
"""Characters of a schema that is told in words too, where the server enforces it anyway."""

_SCALARS = ("integer", "number", "boolean", "null")
_SCALAR_TOKENS = 64
"""Of a reply that is a number. A grammar lets small models write digits or blanks without end."""

_SLACK = 16
"""Tokens of a reply beside its choice. Of the choice, no more than its bytes."""

_STRICT_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
        *("anyOf", "$ref", "$defs", "definitions", "title", "description", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems"),
    }
)
"""What OpenAI's strict mode takes. Source: its guide to structured outputs."""

_DEFINITIONS = ("$defs", "definitions")
_REF_TO_ROOT = re.compile(r'"\$ref"\s*:\s*"#"')

_STRICT_ENUM = 250
_STRICT_PROPERTIES = 100
_STRICT_DEPTH = 5


class TypedForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a reply, as one kind of server is told it. At most one field constrains it."""

    instruction: str
    """For the system message."""

    structured_outputs: msgspec.Raw | None = None
    response_format: msgspec.Raw | None = None
    grammar: str | None = None
    unwrap: bool = False
    """The reply is an object that has what was asked for as its ``value``."""

    choices: tuple[str, ...] = ()
    most: int | None = None
    """Tokens that suffice for the reply; ``None`` where nothing bounds it, or where a model may
    say something before it: the server does not keep it to the form, or counts its thoughts."""

    def is_whole(self, text: str) -> bool:
        """Whether *text*, which ended at max_tokens, was whole nevertheless."""
        if self.choices and not self.unwrap:
            return text in self.choices
        # A number may lack digits, unless a blank follows; the others have an end of their own.
        return text[-1:] in ("}", "]", '"', " ", "\n", "\t", "\r") and _is_json(text)

    def taken(self, text: str) -> str:
        """What was asked for, out of the reply *text*."""
        if not self.unwrap:
            return text
        try:
            value = _decode_wrapped(text).value
            return msgspec.json.decode(value, type=str) if self.choices else bytes(value).decode()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return text  # whoever asked for the form judges it


class _Wrapped(msgspec.Struct, frozen=True):
    value: msgspec.Raw


_decode_wrapped = msgspec.json.Decoder(_Wrapped).decode


def check_form(params: SubcallParams) -> None:
    """Raise `UsageError` where *params* ask for a form that no server can be sent."""
    try:
        if params.choices is not None:
            _check_choices(tuple(params.choices))
        elif params.schema is not None:
            _parsed(params.schema)
    except EndpointError as error:
        raise UsageError(error.reason) from None


def typed_form(params: SubcallParams, kind: ServerKind, *, tools: bool) -> TypedForm | None:
    """The form that *params* ask for, for a server of *kind*; ``None`` where they ask for none.

    A model that may use *tools* must be able to ask for one, which grammars would forbid: only
    OpenAI can do both.

    Raises
    ------
    EndpointError
        Choices or schema are none that can be sent.
    """
    if params.choices is not None:
        form = _form_of_choices(tuple(params.choices), kind)
    elif params.schema is not None:
        form = _form_of_schema(params.schema, kind)
    else:
        return None
    if tools and kind != "openai":
        return TypedForm(instruction=form.instruction, choices=form.choices)
    return form


# --- choices ----------------------------------------------------------------------------------


@functools.lru_cache(64)
def _form_of_choices(choices: tuple[str, ...], kind: ServerKind) -> TypedForm:
    _check_choices(choices)
    told = _told_choices(choices)
    most = max(len(choice.encode()) for choice in choices) + _SLACK
    if kind == "vllm":
        raw = _raw({"choice": list(choices)})
        return TypedForm(instruction=told, structured_outputs=raw, choices=choices, most=most)
    if kind == "llamacpp":
        grammar = "root ::= " + " | ".join(map(gbnf_literal, choices))
        return TypedForm(instruction=told, grammar=grammar, choices=choices, most=most)
    if kind == "openai":
        schema = {"type": "string", "enum": list(choices)}
        strict = len(choices) <= _STRICT_ENUM
        raw = _response_format(_wrapped(schema), strict=strict)
        return TypedForm(instruction=told, response_format=raw, unwrap=True, choices=choices)
    return TypedForm(instruction=told, choices=choices)


def _check_choices(choices: tuple[str, ...]) -> None:
    if not choices or not all(choices):
        raise EndpointError("choices must be texts that are not empty: leave the others out")
    if len(choices) > MOST_CHOICES:
        raise EndpointError(
            f"{len(choices):,} choices are more than {MOST_CHOICES:,}: ask in two steps"
        )
    if any(_CONTROL.search(choice) or not _is_unicode(choice) for choice in choices):
        raise EndpointError("a choice has a character that no model can write: take it out")
    if sum(len(choice.encode()) for choice in choices) > LONGEST:
        raise EndpointError(f"the choices are longer than {LONGEST >> 10} KiB: shorten them")


def _told_choices(choices: tuple[str, ...]) -> str:
    # Of several wordings the small model that comes with rlm-kernel did best with this one.
    if all(choice == choice.strip(" .") and _PLAIN.fullmatch(choice) for choice in choices):
        return f"Reply with exactly one of: {', '.join(choices)}. Write nothing else."
    listed = "\n".join(msgspec.json.encode(choice).decode() for choice in choices)
    return f"Reply with exactly one of these texts, without the quotes, and nothing else:\n{listed}"


_CONTROL = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
_PLAIN = re.compile(r"[^,\n\r\t\"]+")
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def gbnf_literal(text: str) -> str:
    """*text* as a literal of GBNF, the grammars of llama.cpp."""
    return '"' + "".join(_ESCAPED.get(c) or _gbnf_char(c) for c in text) + '"'


def _gbnf_char(char: str) -> str:
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- schemas ----------------------------------------------------------------------------------


@functools.lru_cache(64)
def _form_of_schema(schema: str, kind: ServerKind) -> TypedForm:
    parsed = _parsed(schema)
    raw = msgspec.Raw(schema.encode())
    told = f"Reply with JSON and nothing else. This JSON Schema describes it:\n{schema}"
    if kind == "other":
        return TypedForm(instruction=told)
    if len(schema) > _TOLD:
        told = "Reply with JSON and nothing else."
    if kind != "openai":
        most = _SCALAR_TOKENS if parsed.get("type") in _SCALARS else None
        return TypedForm(instruction=told, response_format=_response_format(raw), most=most)
    unwrap = parsed.get("type") != "object" or "anyOf" in parsed
    if unwrap and _REF_TO_ROOT.search(schema):
        return TypedForm(instruction=told)  # inside of another object it would mean that one
    sent = _wrapped(parsed) if unwrap else raw
    strict = _is_strict(_wrapped(parsed) if unwrap else parsed)
    return TypedForm(
        instruction=told, response_format=_response_format(sent, strict=strict), unwrap=unwrap
    )


def _parsed(schema: str) -> dict[str, Any]:
    """*schema* as plain data."""
    if len(schema) > LONGEST or not _is_unicode(schema) or len(schema.encode()) > LONGEST:
        raise EndpointError(
            f"the schema is longer than {LONGEST >> 10} KiB or no Unicode text: shorten it"
        )
    try:
        parsed = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        raise EndpointError("the schema is no JSON text: pass a JSON Schema") from None
    if not isinstance(parsed, dict) or _depth(parsed) > DEEPEST:
        raise EndpointError(
            f"the schema is no JSON object of at most {DEEPEST} levels: pass a simpler JSON Schema"
        )
    return parsed


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for outer in level for inner in _inside(outer)]
    return depth


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _response_format(schema: object, *, strict: bool | None = None) -> msgspec.Raw:
    inner: dict[str, object] = {"name": "reply", "schema": schema}
    if strict is not None:
        inner["strict"] = strict
    return _raw({"type": "json_schema", "json_schema": inner})


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """*schema* as the ``value`` of an object; its definitions stay at the root."""
    inner = {name: value for name, value in schema.items() if name not in _DEFINITIONS}
    outer = {name: value for name, value in schema.items() if name in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"value": inner},
        "required": ["value"],
        "additionalProperties": False,
        **outer,
    }


def _is_strict(schema: dict[str, Any]) -> bool:
    """Whether OpenAI's strict mode takes *schema*; it refuses the request where it does not."""
    try:
        return _strict_level(schema, 1) <= _STRICT_PROPERTIES
    except (ValueError, TypeError, AttributeError):  # the last two where it is no schema at all
        return False


def _strict_level(schema: object, depth: int) -> int:
    """Properties in *schema*. Raises `ValueError` where it is not strict."""
    if not isinstance(schema, dict) or not _STRICT_KEYWORDS.issuperset(schema):
        raise ValueError
    properties = schema.get("properties", {})
    if "properties" in schema or schema.get("type") == "object":
        required = schema.get("required", [])
        is_closed = schema.get("additionalProperties") is False
        if not is_closed or set(required) != set(properties) or depth > _STRICT_DEPTH:
            raise ValueError
    if len(schema.get("enum", ())) > _STRICT_ENUM:
        raise ValueError
    definitions = {**schema.get("$defs", {}), **schema.get("definitions", {})}
    count = len(properties)
    count += sum(_strict_level(inner, depth + 1) for inner in properties.values())
    count += sum(_strict_level(inner, depth) for inner in definitions.values())
    count += sum(_strict_level(inner, depth) for inner in schema.get("anyOf", ()))
    return count + (_strict_level(schema["items"], depth) if "items" in schema else 0)
