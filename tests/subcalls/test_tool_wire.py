"""Tools on the wire: what a model is offered, what it asks for, what it is told."""

from __future__ import annotations

import json

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.subcalls.embedded.endpoint import EmbeddedEndpoint
from rlm_kernel.subcalls.endpoint import EndpointError, Exchange, Reply, ToolSpec, ToolUse
from rlm_kernel.subcalls.server.server_kind import ServerFacts
from tests.servers.scripted import AskTools, Refuse, Say, ScriptedServer, Step
from tests.subcalls.conftest import endpoint_for

PLAIN = SubcallParams()
ADD = ToolSpec(
    name="add",
    description="Add two numbers.",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        }
    ),
)
USES = (("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": ["ü", "\\""]}'))

streamed = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


async def reply_to(
    step: Step, *, stream: bool = False, tools: list[ToolSpec] | None = None
) -> Reply:
    async with ScriptedServer([step]) as server:
        endpoint = endpoint_for(server, stream=stream, facts=ServerFacts())
        try:
            return await endpoint.complete("a", PLAIN, tools=[ADD] if tools is None else tools)
        finally:
            await endpoint.close()


@streamed
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no-ids"])
@pytest.mark.parametrize("numbered", [True, False], ids=["index", "no-index"])
async def test_the_tools_that_a_model_asks_for_come_with_the_reply(
    stream: bool, ids: bool, numbered: bool
) -> None:
    """In order, arguments whole, whatever the server leaves out; no text is no error then."""
    reply = await reply_to(AskTools(USES, chunk=3, ids=ids, numbered=numbered), stream=stream)

    assert [(use.name, use.arguments) for use in reply.uses] == list(USES)
    assert len({use.use_id for use in reply.uses}) == 2
    assert reply.text == ""
    assert reply.finish == "tool_calls"
    assert reply.usage.calls == 1


@streamed
async def test_arguments_that_are_no_json_are_passed_on(stream: bool) -> None:
    """The model is told by whoever runs the tool."""
    reply = await reply_to(AskTools((("add", '{"a": 1,'),), text="Let me see."), stream=stream)

    assert reply.uses[0].arguments == '{"a": 1,'
    assert reply.text == "Let me see."


@streamed
async def test_a_reply_without_tools_is_an_ordinary_one(stream: bool) -> None:
    """The model need not use any."""
    reply = await reply_to(Say("three"), stream=stream)

    assert (reply.text, reply.uses) == ("three", [])


async def test_a_tool_that_was_not_offered_is_no_answer() -> None:
    """It cannot be run, so there is nothing in the reply."""
    with pytest.raises(EndpointError, match="asked for a tool that it was not offered"):
        await reply_to(AskTools(USES), tools=[])


async def test_more_tools_than_a_model_means_are_an_error() -> None:
    """What a server can make of the kernel's memory is bounded."""
    with pytest.raises(EndpointError, match="more than 128 tools"):
        await reply_to(AskTools((("add", "{}"),) * 200))


async def test_tools_and_rounds_are_sent_as_chat_messages() -> None:
    """Each result after the use that it answers; what is no JSON object is wrapped, because servers
    parse what was said before and refuse the whole request for it."""
    asked = [
        ToolUse(use_id="u1", name="add", arguments='{"a": 1, "b": 2}'),
        ToolUse(use_id="u2", name="add", arguments='{"a": 1,'),
        ToolUse(use_id="u3", name="now", arguments=""),
    ]
    exchange = Exchange(text="Let me see.", uses=asked, results=["3", "error: no JSON", "noon"])
    async with ScriptedServer([Say("three")]) as server:
        endpoint = endpoint_for(server)
        params = SubcallParams(system="Be brief.")
        reply = await endpoint.complete("1 + 2?", params, tools=[ADD], exchanges=[exchange])
        await endpoint.close()
    body = server.requests[0].body

    assert reply.text == "three"
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two numbers.",
                "parameters": json.loads(ADD.parameters),
            },
        }
    ]
    system, user, said, *results = body["messages"]
    assert [system["role"], user["role"]] == ["system", "user"]
    assert said["content"] == "Let me see."
    assert [call["id"] for call in said["tool_calls"]] == ["u1", "u2", "u3"]
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == [
        {"a": 1, "b": 2},
        {"invalid_json": '{"a": 1,'},
        {},
    ]
    assert results == [
        {"role": "tool", "content": "3", "tool_call_id": "u1"},
        {"role": "tool", "content": "error: no JSON", "tool_call_id": "u2"},
        {"role": "tool", "content": "noon", "tool_call_id": "u3"},
    ]


async def test_parameters_that_are_no_schema_are_refused() -> None:
    """Before anything is sent."""
    broken = ToolSpec(name="add", description="", parameters="{")
    with pytest.raises(EndpointError, match="parameters of tool 'add' are no JSON object"):
        await reply_to(Say("never asked"), tools=[broken])


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser'),
        (500, "tools param requires --jinja flag"),
        (400, "registry.ollama.ai/library/gemma does not support tools"),
    ],
)
async def test_a_server_that_takes_no_tools_says_how_to_change_that(
    status: int, message: str
) -> None:
    """vLLM needs two options. It is not asked again."""
    with pytest.raises(EndpointError, match="--enable-auto-tool-choice with --tool-call") as caught:
        await reply_to(Refuse(status, message))

    assert not caught.value.retryable


@pytest.mark.embedded
async def test_llama_cpp_takes_tools_and_rounds() -> None:
    """The small model uses none; that the request is in order is the claim."""
    endpoint = EmbeddedEndpoint()
    use = ToolUse(use_id="u1", name="add", arguments='{"a": 1, "b": 2}')
    exchange = Exchange(text="", uses=[use], results=["3"])
    params = SubcallParams(temperature=0.0, max_tokens=8)
    reply = await endpoint.complete("1 + 2?", params, tools=[ADD], exchanges=[exchange])
    await endpoint.close()

    assert reply.text
