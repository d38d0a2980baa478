"""Typed replies: what each kind of server is sent, and what a real one answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlm_kernel.cells import SubcallParams
from rlm_kernel.subcalls.embedded.endpoint import EmbeddedEndpoint
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.server_kind import ServerFacts
from rlm_kernel.subcalls.server.structured import ServerKind, TypedForm, gbnf_literal, typed_form
from tests.servers.scripted import Say, ScriptedServer
from tests.subcalls.conftest import endpoint_for

CHOICES = SubcallParams(choices=["spam", "ham"])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = SubcallParams(schema=json.dumps(PERSON))
KINDS: list[ServerKind] = ["vllm", "llamacpp", "openai", "other"]
CONSTRAINTS = {"structured_outputs", "grammar", "response_format"}


async def sent(kind: ServerKind, params: SubcallParams, answer: str = "ham") -> tuple[Any, str]:
    """The body of one request to a server of *kind*, and the text of its reply."""
    async with ScriptedServer([Say(answer)]) as server:
        endpoint = endpoint_for(server, facts=ServerFacts(kind=kind))
        reply = await endpoint.complete("a prompt", params)
        await endpoint.close()
    return server.requests[0].body, reply.text


def form_of(params: SubcallParams, kind: ServerKind, *, tools: bool = False) -> TypedForm:
    form = typed_form(params, kind, tools=tools)
    assert form is not None
    return form


def strictness(schema: dict[str, Any]) -> bool:
    """Whether OpenAI is asked to be strict about *schema*."""
    form = form_of(SubcallParams(schema=json.dumps(schema)), "openai")
    assert form.response_format is not None
    sent = msgspec.json.decode(form.response_format)
    return bool(sent["json_schema"]["strict"])


# --- what is sent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("vllm", "structured_outputs", {"choice": ["spam", "ham"]}),
        ("llamacpp", "grammar", 'root ::= "spam" | "ham"'),
    ],
)
async def test_choices_are_put_as_the_server_knows_them(
    kind: ServerKind, field: str, value: Any
) -> None:
    """Servers pass over in silence what they do not know, so each gets its own field alone."""
    body, text = await sent(kind, CHOICES)

    assert body[field] == value
    assert CONSTRAINTS & set(body) == {field}
    assert text == "ham"


async def test_openai_gets_choices_as_an_object_which_is_unwrapped() -> None:
    """Its structured outputs have an object at their root."""
    body, text = await sent("openai", CHOICES, '{"value": "ham"}')

    asked = body["response_format"]["json_schema"]
    assert asked["strict"] is True
    assert asked["schema"]["properties"] == {"value": {"type": "string", "enum": ["spam", "ham"]}}
    assert text == "ham"


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "openai"])
async def test_a_schema_is_put_as_it_is(kind: ServerKind) -> None:
    """All three take it as a response format."""
    answer = '{"name": "Anna", "age": 31}'
    body, text = await sent(kind, SCHEMA, answer)

    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == PERSON
    assert CONSTRAINTS & set(body) == {"response_format"}
    assert text == answer


@pytest.mark.parametrize("params", [CHOICES, SCHEMA], ids=["choices", "schema"])
async def test_a_server_of_no_known_kind_is_sent_words_alone(params: SubcallParams) -> None:
    """It might refuse the request for a field that it does not know."""
    body, _ = await sent("other", params)

    assert set(body) == {"model", "messages"}
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_form_is_told_in_the_system_message(kind: ServerKind) -> None:
    """After what the caller says there; the prompt stays as it is, and last."""
    params = SubcallParams(system="Be kind.", choices=["spam", "ham"])
    body, _ = await sent(kind, params)

    system, user = body["messages"]
    assert system["content"].startswith("Be kind.\n\n")
    assert "spam, ham" in system["content"]
    assert user == {"role": "user", "content": "a prompt"}


def test_a_long_schema_is_told_in_words_only_where_nothing_else_tells_it() -> None:
    """It would take room of the context twice."""
    schema = json.dumps({**PERSON, "description": "x" * 5000})
    params = SubcallParams(schema=schema)

    assert schema in form_of(params, "other").instruction
    assert len(form_of(params, "vllm").instruction) < 100


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "other"])
def test_with_tools_the_form_is_only_told(kind: ServerKind) -> None:
    """A grammar would keep the model from asking for one."""
    form = form_of(CHOICES, kind, tools=True)

    assert "spam" in form.instruction
    assert (form.grammar, form.structured_outputs, form.response_format) == (None, None, None)


# --- schemas for OpenAI -------------------------------------------------------------------------


NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (PERSON, True),
        ({"type": "array", "items": PERSON}, True),
        ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, True),
        ({**PERSON, "required": ["name"]}, False),
        ({**PERSON, "additionalProperties": True}, False),
        ({**PERSON, "allOf": []}, False),
        ({**PERSON, "properties": {"name": {"type": "object"}}, "required": ["name"]}, False),
        ({"type": "object", "properties": [], "required": 3}, False),
        ({"type": "string", "minLength": 3}, False),
        ({"enum": list(range(1000))}, False),
    ],
)
def test_openai_is_strict_about_schemas_that_it_can_be_strict_about(
    schema: dict[str, Any], strict: bool
) -> None:
    """It refuses the request for others."""
    assert strictness(schema) is strict


async def test_what_is_no_object_is_wrapped_and_unwrapped() -> None:
    """Its definitions stay where references find them."""
    schema = {"type": "array", "items": {"$ref": "#/$defs/P"}, "$defs": {"P": PERSON}}
    answer = '{"value": [{"name": "A", "age": 1}]}'
    body, text = await sent("openai", SubcallParams(schema=json.dumps(schema)), answer)

    outer = body["response_format"]["json_schema"]["schema"]
    assert outer["properties"]["value"] == {"type": "array", "items": {"$ref": "#/$defs/P"}}
    assert outer["$defs"] == {"P": PERSON}
    assert json.loads(text) == [{"name": "A", "age": 1}]


def test_a_reference_to_the_root_is_not_wrapped() -> None:
    """Inside of another object it would mean that one."""
    schema = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]}
    form = form_of(SubcallParams(schema=json.dumps(schema)), "openai")

    assert form.response_format is None
    assert '"#"' in form.instruction


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("params", "says"),
    [
        (SubcallParams(choices=[]), "not empty"),
        (SubcallParams(choices=["a", ""]), "not empty"),
        (SubcallParams(choices=["a\0b"]), "no model can write"),
        (SubcallParams(choices=["\x1b[0m"]), "no model can write"),
        (SubcallParams(choices=["a\ud800"]), "no model can write"),
        (SubcallParams(choices=[str(n) for n in range(2000)]), "2,000 choices"),
        (SubcallParams(choices=["x" * 70_000]), "longer than 64 KiB"),
        (SubcallParams(schema=""), "no JSON text"),
        (SubcallParams(schema='{"type":'), "no JSON text"),
        (SubcallParams(schema="[]"), "no JSON object"),
        (SubcallParams(schema='"#"'), "no JSON object"),
        (SubcallParams(schema='{"a":' * 100 + "1" + "}" * 100), "no JSON object of at most 32"),
        (SubcallParams(schema='{"a":' * 8000 + "1" + "}" * 8000), "schema is no JSON"),
        (SubcallParams(schema=json.dumps({"description": "x" * 70_000})), "longer than 64 KiB"),
        (SubcallParams(schema='{"title": "\ud800"}'), "no Unicode"),
    ],
)
def test_what_cannot_be_sent_is_refused_whatever_the_server(
    kind: ServerKind, params: SubcallParams, says: str
) -> None:
    """In one sentence, before anything is sent."""
    with pytest.raises(EndpointError, match=re.escape(says)):
        typed_form(params, kind, tools=False)


async def test_blanks_alone_are_a_reply_where_they_are_a_choice() -> None:
    """Else they are an empty completion."""
    async with ScriptedServer([" \n", " \n"]) as server:
        endpoint = endpoint_for(server)
        reply = await endpoint.complete("a prompt", SubcallParams(choices=["x", " \n"]))
        assert reply.text == " \n"
        with pytest.raises(EndpointError, match="empty completion"):
            await endpoint.complete("a prompt", SubcallParams(choices=["x", "\n"]))
        await endpoint.close()


# --- replies that have a bound ------------------------------------------------------------------

NUMBER = SubcallParams(schema='{"type": "integer", "minimum": 0}')


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
@pytest.mark.parametrize(
    ("params", "bound"),
    [
        (NUMBER, 64),
        (CHOICES, 4 + 16),
        (SubcallParams(choices=["ab", "\u65e5\u672c\u8a9e"]), 9 + 16),
        (SCHEMA, None),
        (SubcallParams(schema='{"type": "string"}'), None),
        (SubcallParams(), None),
        (msgspec.structs.replace(NUMBER, max_tokens=2000), 2000),
    ],
)
async def test_a_small_form_bounds_the_reply_by_itself(
    kind: ServerKind, params: SubcallParams, bound: int | None
) -> None:
    """A small model that a grammar keeps to a number may else fill its context with digits."""
    body, _ = await sent(kind, params)
    assert body.get("max_tokens") == bound


@pytest.mark.parametrize("params", [NUMBER, CHOICES])
@pytest.mark.parametrize("kind", ["openai", "other"])
async def test_a_model_that_may_say_more_than_the_form_has_no_bound(
    kind: ServerKind, params: SubcallParams
) -> None:
    """Its thoughts count, or it speaks before it comes to the value."""
    body, _ = await sent(kind, params)
    assert not {"max_tokens", "max_completion_tokens"} & set(body)


def test_with_tools_a_small_form_is_no_bound() -> None:
    """The reply may ask for one, with arguments of any length."""
    assert form_of(CHOICES, "vllm", tools=True).most is None


# --- replies that were cut ----------------------------------------------------------------------


async def cut(params: SubcallParams, text: str, kind: ServerKind = "vllm") -> str:
    """What a call returns whose reply *text* ended at max_tokens."""
    params = msgspec.structs.replace(params, max_tokens=8)
    async with ScriptedServer([Say(text, finish="length")]) as server:
        endpoint = endpoint_for(server, facts=ServerFacts(kind=kind))
        try:
            return (await endpoint.complete("a prompt", params)).text
        finally:
            await endpoint.close()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SCHEMA, '{"name": "An'),
        (SubcallParams(schema='{"type": "integer"}'), "12"),
        (SubcallParams(schema='{"type": "string"}'), '"An \\"'),
        (CHOICES, "spa"),
    ],
)
async def test_a_typed_reply_that_was_cut_is_an_error(params: SubcallParams, text: str) -> None:
    """It names the limit; the tokens were spent."""
    with pytest.raises(EndpointError, match=r"cut at max_tokens \(8\)") as caught:
        await cut(params, text)

    assert caught.value.finish == "length"
    assert caught.value.usage is not None
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SCHEMA, '{"name": "A", "age": 1}\n'),
        (SubcallParams(schema='{"type": "integer"}'), "12\n\n\n\n\n"),
        (CHOICES, "spam"),
        (SubcallParams(), "12"),
    ],
)
async def test_a_reply_that_was_whole_when_its_tokens_were_used_up_is_taken(
    params: SubcallParams, text: str
) -> None:
    """``max_tokens=1`` and a choice of one token is ordinary."""
    assert await cut(params, text) == text


# --- real models --------------------------------------------------------------------------------

CONTROLS = "".join(chr(n) for n in (*range(32), 127) if chr(n) not in "\t\n\r")
TEXTS = st.text(
    st.characters(exclude_characters=CONTROLS, exclude_categories=("Cs",)), min_size=1, max_size=12
)
WRITABLE = st.text(
    st.characters(
        exclude_characters=CONTROLS, exclude_categories=("Cs", "Cn", "Co"), max_codepoint=0x1FFFF
    ),
    min_size=1,
    max_size=8,
)
"""The vocabulary of the small model lacks the first bytes of planes that nobody uses."""

TROUBLE = [
    '"',
    "\\",
    '\\"',
    "\n",
    "a\r\nb\tc",
    "\\n",
    " ü ",
    "日本語",
    "😀",
    "[^a]",
    '::= | "',
    "'",
]


def gbnf_text(literal: str) -> str:
    """What a literal of GBNF stands for, by the rules of llama.cpp's ``parse_char``."""
    plain = {'"': '"', "\\": "\\", "n": "\n", "r": "\r", "t": "\t", "[": "[", "]": "]"}
    digits = {"x": 2, "u": 4, "U": 8}
    assert (literal[0], literal[-1]) == ('"', '"')
    out, at, body = [], 0, literal[1:-1]
    while at < len(body):
        if body[at] != "\\":
            assert body[at] not in '"\n'
            out.append(body[at])
            at += 1
        elif body[at + 1] in plain:
            out.append(plain[body[at + 1]])
            at += 2
        else:
            size = digits[body[at + 1]]
            out.append(chr(int(body[at + 2 : at + 2 + size], 16)))
            at += 2 + size
    return "".join(out)


@given(TEXTS)
def test_a_literal_of_a_grammar_stands_for_its_text(text: str) -> None:
    """Whatever is in it; it is one line of ASCII."""
    literal = gbnf_literal(text)

    assert gbnf_text(literal) == text
    assert literal.isascii()
    assert literal.isprintable()


@pytest.fixture
async def embedded() -> AsyncIterator[EmbeddedEndpoint]:
    endpoint = EmbeddedEndpoint()
    yield endpoint
    await endpoint.close()


@pytest.mark.embedded
async def test_a_choice_comes_back_from_llama_cpp_as_it_is(embedded: EmbeddedEndpoint) -> None:
    """Quotes, backslashes, blanks and characters of any script."""
    for text in TROUBLE:
        params = SubcallParams(temperature=0.0, max_tokens=40, choices=[text])
        assert (await embedded.complete("Say it.", params)).text == text


@pytest.mark.embedded
def test_any_choice_comes_back_from_llama_cpp_as_it_is() -> None:
    """Texts that nobody thought of."""
    loop = asyncio.new_event_loop()
    embedded = EmbeddedEndpoint()

    @settings(
        max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(WRITABLE)
    def check(text: str) -> None:
        params = SubcallParams(temperature=0.0, max_tokens=80, choices=[text])
        assert loop.run_until_complete(embedded.complete("Say it.", params)).text == text

    try:
        check()
    finally:
        loop.run_until_complete(embedded.close())
        loop.close()


@pytest.mark.embedded
async def test_one_of_the_choices_comes_back_from_llama_cpp(embedded: EmbeddedEndpoint) -> None:
    """The one that the model means."""
    params = SubcallParams(temperature=0.0, choices=["positive", "negative"])
    reply = await embedded.complete(
        "Is this review positive or negative?\n\nThis is the worst phone I ever had.", params
    )

    assert reply.text == "negative"


@pytest.mark.embedded
async def test_json_of_the_schema_comes_back_from_llama_cpp(embedded: EmbeddedEndpoint) -> None:
    """An object with just the properties that the schema names."""
    params = msgspec.structs.replace(SCHEMA, temperature=0.0, max_tokens=100)
    reply = await embedded.complete("My grandfather Otto turned 84.", params)

    assert json.loads(reply.text) == {"name": "Otto", "age": 84}


@pytest.mark.embedded
async def test_a_choice_that_the_model_cannot_write_is_an_error(embedded: EmbeddedEndpoint) -> None:
    """llama.cpp fails with 500 at a character that the vocabulary lacks; again will not help."""
    params = SubcallParams(max_tokens=40, choices=["\U00040000"])
    with pytest.raises(EndpointError, match="cannot keep to the form") as caught:
        await embedded.complete("Say it.", params)

    assert not caught.value.retryable


@pytest.mark.embedded
async def test_a_schema_that_llama_cpp_cannot_take_is_an_error(embedded: EmbeddedEndpoint) -> None:
    """It says why, and the next call goes through."""
    schema = '{"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}'
    with pytest.raises(EndpointError, match="cannot keep to the form"):
        await embedded.complete("a prompt", SubcallParams(schema=schema, max_tokens=5))
    assert (await embedded.complete("a prompt", SubcallParams(max_tokens=5))).text
