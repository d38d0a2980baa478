"""A chat root streams, counts, retries within bounds, and says in one sentence what went wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from urllib.parse import quote

import pytest

from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.roots import ChatRoot, Message, RootStream
from rlm_kernel.errors import RLMError, RootError, UsageError
from tests.servers.scripted import (
    Cut,
    ErrorEvent,
    Garbage,
    Hang,
    Ramble,
    Refuse,
    Say,
    ScriptedServer,
    Step,
    count_tokens,
)

ASKED = [Message("system", "Be brief."), Message("user", "What is in P?")]
KEY = "sk-very-secret-0123456789"


def root_of(server: ScriptedServer, **options: object) -> ChatRoot:
    options.setdefault("backoff", 0.001)
    return ChatRoot("scripted", server.base_url, KEY, **options)  # type: ignore[arg-type]


def failed_inside(code: int, message: str) -> str:
    """An event of a stream, with an error."""
    return json.dumps({"error": {"message": message, "code": code}})


async def hear(stream: RootStream) -> str:
    try:
        return "".join([piece async for piece in stream])
    finally:
        await stream.aclose()


async def failure(*script: Step | str, **options: object) -> tuple[str, ScriptedServer]:
    """What the root says about a server that answers with *script*."""
    async with ScriptedServer(script) as server:
        root = root_of(server, **options)
        with pytest.raises(RootError) as caught:
            await hear(root.propose(ASKED))
        await root.close()
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"the root {root.name} ")
    return str(caught.value), server


async def test_a_reply_streams_and_is_counted_by_the_server() -> None:
    text = "Let me look at P first, then decide. " * 4
    async with ScriptedServer([Say(text, chunk=10)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        pieces = [piece async for piece in stream]
        await stream.aclose()
        await root.close()

    assert "".join(pieces) == text
    assert len(pieces) > 10
    assert stream.finish == "stop"
    usage = stream.usage
    assert usage.input_tokens == sum(count_tokens(m.content) for m in ASKED)
    assert (usage.output_tokens, usage.calls) == (count_tokens(text), 1)
    assert not usage.estimated
    assert usage.seconds > 0


async def test_a_usage_that_no_count_can_be_is_not_believed() -> None:
    """One that no database can hold would end the record."""
    many = "1" + "0" * 30
    end = (
        '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],'
        f'"usage":{{"prompt_tokens":{many},"completion_tokens":1,"total_tokens":{many}}}}}'
    )
    async with ScriptedServer([Garbage(text="hello", body=end)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        assert "".join([piece async for piece in stream]) == "hello"
        await stream.aclose()
        await root.close()

    assert stream.usage.estimated
    assert stream.usage.tokens < 1000


@pytest.mark.parametrize("cost", ["-1", "1e300", "1e400", "NaN", '"much"', "true", "[1]"])
async def test_a_cost_that_no_sum_can_be_is_not_believed(cost: str) -> None:
    """One would use up the budget, or give some back."""
    end = (
        '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":'
        f'{{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"cost":{cost}}}}}'
    )
    async with ScriptedServer([Garbage(text="hello", body=end)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        await hear(stream)
        await root.close()

    assert (stream.usage.tokens, stream.usage.cost) == (4, 0)


async def test_the_request_holds_what_was_asked_for_and_nothing_else() -> None:
    async with ScriptedServer(["ok"] * 2) as server:
        plain = root_of(server)
        await hear(plain.propose(ASKED))
        await plain.close()
        tuned = root_of(server, temperature=0.0, max_tokens=50, extra={"top_k": 5})
        await hear(tuned.propose(ASKED))
        await tuned.close()

    first, second = (request.body for request in server.requests)
    assert set(first) == {"model", "messages", "stream", "stream_options"}
    assert first["stream_options"]["include_usage"] is True
    assert (second["temperature"], second["max_tokens"], second["top_k"]) == (0.0, 50, 5)
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


async def test_thoughts_are_counted_and_not_part_of_the_reply() -> None:
    async with ScriptedServer([Say("hello", reasoning="I think so. " * 9)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        assert await hear(stream) == "hello"
        await root.close()

    assert stream.usage.output_tokens == count_tokens("I think so. " * 9 + "hello")


async def test_the_context_length_is_learned_from_the_server() -> None:
    async with ScriptedServer(["ok"], models={"scripted": 4321}) as server:
        root = root_of(server)
        assert root.context_limit is None
        await hear(root.propose(ASKED))
        await root.close()

    assert root.context_limit == 4321


async def test_a_stream_that_is_left_early_ends_at_the_server_with_its_usage_estimated() -> None:
    async with ScriptedServer([Ramble("again ")]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        await server.until(lambda s: s.cancelled == 1)
        await root.close()

    assert stream.usage.estimated
    assert 5 <= stream.usage.output_tokens < 20
    assert stream.usage.input_tokens > 0


async def test_a_server_that_gives_no_usage_has_it_estimated() -> None:
    async with ScriptedServer([Say("x" * 160, usage=False)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED)
        await hear(stream)
        await root.close()

    assert stream.usage.estimated
    assert 160 // 6 <= stream.usage.output_tokens <= 160 // 3


async def test_what_the_budget_has_bounds_the_reply_in_the_request() -> None:
    """The smaller of the root's own bound and the budget's; a request that asks for more than
    fits beside its prompt would be refused, so it names the root's own bound alone."""
    async with ScriptedServer(["ok"] * 4, models={"scripted": 3000}) as server:
        root = root_of(server)
        await hear(root.propose(ASKED, max_tokens=700))
        await hear(root.propose(ASKED, max_tokens=2999))
        await root.close()
        bound = root_of(server, max_tokens=500)
        await hear(bound.propose(ASKED, max_tokens=700))
        await hear(bound.propose(ASKED, max_tokens=300))
        await bound.close()

    assert [r.body.get("max_tokens") for r in server.requests] == [700, None, 500, 300]


async def test_a_server_that_keeps_to_no_bound_is_cut_in_its_thoughts() -> None:
    """Thoughts cost tokens like text, and none of them is text that the reader could count."""
    async with ScriptedServer([Say("done", reasoning="I think so. " * 9000)]) as server:
        root = root_of(server)
        stream = root.propose(ASKED, max_tokens=300)
        assert await hear(stream) == ""
        await server.until(lambda s: not s.active)
        await root.close()

    assert stream.finish == "length"
    assert 300 <= stream.usage.output_tokens < 310


async def test_a_root_that_rambles_is_cut() -> None:
    async with ScriptedServer([Ramble("on and on, ")]) as server:
        root = root_of(server, max_chars=1000)
        stream = root.propose(ASKED)
        text = await hear(stream)
        await server.until(lambda s: s.cancelled == 1)
        await root.close()

    assert stream.finish == "length"
    assert 1000 <= len(text) < 1100


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503])
async def test_a_busy_server_is_asked_again(status: int) -> None:
    refusals = [Refuse(status, headers={"Retry-After": "0"}), Refuse(status, page="<h1>busy</h1>")]
    async with ScriptedServer([*refusals, "ok"]) as server:
        root = root_of(server)
        assert await hear(root.propose(ASKED)) == "ok"
        await root.close()

    assert len(server.requests) == 3


async def test_asking_again_is_bounded_told_of_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        said, server = await failure(*[Refuse(503, "no room")] * 9, retries=2)

    assert said.endswith("failed (503: no room); try again later (sent 3 times)")
    assert len(server.requests) == 3
    assert len([r for r in caplog.records if "sending again" in r.message]) == 2
    assert KEY not in caplog.text


@pytest.mark.parametrize("header", ["nan", "-5", "soon", "1e400", "9" * 400])
async def test_an_absurd_retry_after_is_ignored(header: str) -> None:
    """As though the server had named no time."""
    busy = Refuse(429, headers={"Retry-After": header})
    async with ScriptedServer([busy, "ok"]) as server:
        root = root_of(server)
        async with asyncio.timeout(30):  # less than the longest wait
            assert await hear(root.propose(ASKED)) == "ok"
        await root.close()

    assert len(server.requests) == 2


async def test_retry_after_is_honoured_up_to_a_minute_and_the_wait_can_be_cancelled() -> None:
    waits: asyncio.Queue[str] = asyncio.Queue()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waits.put_nowait(record.getMessage())

    handler = Told()
    logging.getLogger("rlm_kernel.engine.chat_root").addHandler(handler)
    async with ScriptedServer([Refuse(429, headers={"Retry-After": "3000"})]) as server:
        root = root_of(server)
        task = asyncio.ensure_future(hear(root.propose(ASKED)))
        assert "sending again in 60.0 s" in await asyncio.wait_for(waits.get(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await root.close()
    logging.getLogger("rlm_kernel.engine.chat_root").removeHandler(handler)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Refuse(401, f"bad key {KEY}"), "refused the key (401); set OPENAI_API_KEY"),
        (Refuse(403), "refused the key (403)"),
        (Refuse(404, "no model x"), "has no such model or path (404: no model x)"),
        (Refuse(400, "temperature is odd"), "refused the request (400: temperature is odd)"),
        (Refuse(400, "This model's maximum context length is 9"), "too long for it (400: This"),
        (Refuse(400, f"odd {KEY}"), "refused the request (400: odd ***)"),
        (Refuse(404, page="<html>nothing here</html>"), "no such model or path (404)"),
        (Refuse(400, f"odd {KEY[:16]}...{KEY[-8:]}"), "(400: odd ***...***)"),
        (Refuse(400, f"odd {quote(KEY)}"), "(400: odd ***)"),
        (Refuse(422, b64encode(KEY.encode()).decode()), "(422: ***"),
        (Refuse(400, "lone \ud800 half"), "(400)"),
        (Refuse(413, "too much"), "too long for it (413: too much)"),
        (Refuse(307, headers={"Location": "https://h/v1"}), "redirects to https://h/v1 (307)"),
        (Refuse(307, headers={"Location": f"https://h/?k={KEY}"}), "https://h/?k=*** (307)"),
        (Garbage(body=failed_inside(400, "bad form")), "error: bad form; check its model"),
        (Garbage(), "sent something that is no chat completion"),
        (Garbage(body="[1, 2]"), "sent something that is no chat completion"),
        (Garbage(body='{"choices": 7}'), "sent something that is no chat completion"),
        (Garbage(text="half a rep"), "sent something that is no chat completion"),
        (Say("", finish=""), "ended its stream without a reply"),
    ],
)
async def test_a_refusal_is_told_at_once_in_one_sentence(step: Step, says: str) -> None:
    said, server = await failure(step)

    assert says in said
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Cut("half a reply, no more"), "cut the connection in the middle of its reply"),
        (ErrorEvent("the engine died", text="half"), "broke off with an error: the engine died"),
        (Hang("half a reply"), "sent nothing for 0.1 s"),
    ],
)
async def test_a_reply_that_has_begun_is_not_asked_for_again(step: Step, says: str) -> None:
    said, server = await failure(step, idle_timeout=0.1 if isinstance(step, Hang) else 30)

    assert says in said
    assert len(server.requests) == 1


async def test_a_root_that_hangs_is_waited_for_once() -> None:
    """One deadline holds for all attempts, not for each of them."""
    said, server = await failure(*[Hang()] * 5, timeout=0.5)

    assert "sent nothing for 0.5 s" in said
    assert len(server.requests) == 1


async def test_a_root_that_is_busy_is_not_asked_beyond_the_deadline() -> None:
    """However many retries there are."""
    async with ScriptedServer(reply=lambda prompt: Refuse(503)) as server:
        root = root_of(server, timeout=0.3, retries=10**6, backoff=0.01)
        async with asyncio.timeout(20):
            with pytest.raises(RootError, match=r"failed \(503"):
                await hear(root.propose(ASKED))
        await root.close()

    assert len(server.requests) > 1


@pytest.mark.parametrize("step", [Cut(), ErrorEvent()])
async def test_a_fault_before_the_first_token_is_asked_again(step: Step) -> None:
    async with ScriptedServer([step], reply=lambda prompt: "ok") as server:
        root = root_of(server)
        assert await hear(root.propose(ASKED)) == "ok"
        await root.close()

    assert len(server.requests) >= 2


async def test_a_server_that_is_not_there_is_told_of() -> None:
    async with ScriptedServer() as server:
        root = root_of(server, retries=1)
    stream = root.propose(ASKED)
    with pytest.raises(RootError, match=r"cannot be reached .*check its URL.*sent 2 times"):
        await hear(stream)
    await root.close()

    assert stream.usage == Usage()


async def test_a_strict_server_is_asked_without_the_extension_it_refuses() -> None:
    strict = Refuse(400, "unknown field stream_options.continuous_usage_stats")
    async with ScriptedServer([strict, "ok", "ok"]) as server:
        root = root_of(server)
        assert await hear(root.propose(ASKED)) == "ok"
        assert await hear(root.propose(ASKED)) == "ok"
        await root.close()

    options: list[Sequence[str]] = [list(r.body["stream_options"]) for r in server.requests]
    assert options[1:] == [["include_usage"]] * 2


async def test_a_closed_root_can_be_asked_again() -> None:
    async with ScriptedServer(["one", "two"]) as server:
        root = root_of(server)
        assert await hear(root.propose(ASKED)) == "one"
        await root.close()
        assert await hear(root.propose(ASKED)) == "two"
        await root.close()


def test_a_root_is_named_by_its_spec_without_the_key() -> None:
    root = ChatRoot("org/model:1", "http://127.0.0.1:9", KEY)
    assert root.name == "openai:org/model:1@http://127.0.0.1:9/v1"
    assert KEY not in repr(root)


@pytest.mark.parametrize("key", [f"{KEY}\nX-Other: 1", f"{KEY}ä"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UsageError, match="characters that no key has") as caught:
        ChatRoot("m", "http://127.0.0.1:9", key)
    assert KEY not in str(caught.value)


def test_a_url_with_a_password_is_refused() -> None:
    with pytest.raises(UsageError, match="user name or password") as caught:
        ChatRoot("m", "http://me:hush@127.0.0.1/v1")
    assert "hush" not in str(caught.value)
    assert issubclass(UsageError, RLMError)


def test_the_client_library_is_not_imported_before_a_model_is_asked() -> None:
    code = (
        "import sys, rlm_kernel.engine.run, rlm_kernel.engine.roots as r\n"
        "r.ChatRoot('m', 'http://127.0.0.1:9/v1', 'k')\n"
        "print(sorted({'openai', 'aiohttp', 'IPython', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "[]\n"
