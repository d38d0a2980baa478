"""Sub-calls whose model uses tools: rounds, their bounds, their budget, their events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.engine.budget import Budget
from rlm_kernel.engine.events import SubcallStarted, ToolCalled
from rlm_kernel.subcalls.endpoint import ToolSpec
from rlm_kernel.subcalls.scheduling.tools import (
    MAX_ROUNDS,
    MAX_TOOL_OUTPUT,
    MAX_USES,
    Toolbox,
    ToolResult,
)
from tests.servers.scripted import AskTools, Hang, Refuse, Say, ScriptedServer, Step
from tests.subcalls.conftest import Bench

SCHEMA = '{"type":"object","properties":{"q":{"type":"string"}},"required":["q"]}'


def look(*questions: str) -> AskTools:
    """The model asks for the tool ``look``, once for each of *questions*."""
    return AskTools(tuple(("look", json.dumps({"q": question})) for question in questions))


class Tools:
    """A toolbox with one tool, and what it was asked."""

    def __init__(self, answer: Callable[[str], ToolResult] | None = None) -> None:
        self.asked: list[str] = []
        self.events: list[Any] = []
        self._answer = answer or (lambda arguments: ToolResult(text=f"saw {arguments}"))
        spec = ToolSpec(name="look", description="Look something up.", parameters=SCHEMA)
        self.box = Toolbox([spec], self._use)

    async def _use(self, name: str, arguments: str) -> ToolResult:
        assert name == "look"
        self.asked.append(arguments)
        return self._answer(arguments)


def used(bench: Bench) -> list[ToolCalled]:
    return [event for _, event in bench.events if isinstance(event, ToolCalled)]


async def ask(bench: Bench, tools: Tools, **options: Any) -> Any:
    (outcome,) = await bench.submit(["p"], toolbox=tools.box, **options).wait()
    bench.check_pairs()
    return outcome


def serving(*script: Step | str) -> ScriptedServer:
    return ScriptedServer(list(script), reply=lambda prompt: f"re: {prompt}")


async def test_the_model_gets_what_its_tools_return_and_the_cell_its_reply(bench_of: Any) -> None:
    """Round by round; the requests hold all that was said so far."""
    async with serving(look("a", "b"), look("c"), "done") as server:
        bench, tools = bench_of(server), Tools()
        outcome = await ask(bench, tools)

        assert outcome.text == "done"
        assert tools.asked == ['{"q": "a"}', '{"q": "b"}', '{"q": "c"}']
        assert [r.body["tools"][0]["function"]["name"] for r in server.requests] == ["look"] * 3
        roles = [message["role"] for message in server.requests[2].messages]
        assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool"]
        assert server.requests[1].messages[3]["content"] == 'saw {"q": "b"}'


async def test_a_model_that_needs_no_tool_just_replies(bench_of: Any) -> None:
    """With one request."""
    async with serving("at once") as server:
        bench, tools = bench_of(server), Tools()
        assert (await ask(bench, tools)).text == "at once"
        assert len(server.requests) == 1
        assert used(bench) == []


async def test_each_use_is_an_event_of_its_call(bench_of: Any) -> None:
    """Between start and end of the call, as the model was shown it."""
    answers = {"a": ToolResult(text="found"), "b": ToolResult(error="not there")}

    def answer(arguments: str) -> ToolResult:
        return answers[json.loads(arguments)["q"]]

    async with serving(look("a", "b"), "done") as server:
        bench = bench_of(server)
        outcome = await ask(bench, Tools(answer))
        first, second = used(bench)
        assert (first.call_id, first.name, first.text, first.error) == (
            outcome.call_id,
            "look",
            "found",
            "",
        )
        assert (second.arguments, second.text, second.error) == ('{"q": "b"}', "", "not there")
        assert server.requests[1].messages[3]["content"] == "error: not there"
        kinds = [type(event).__name__ for _, event in bench.events]
        assert kinds == ["SubcallStarted", "ToolCalled", "ToolCalled", "SubcallEnded"]


async def test_the_tokens_of_all_rounds_are_the_calls(bench_of: Any) -> None:
    """Booked once each, as one sub-call; the event and the ledger say the same."""
    async with serving(look("a"), look("b"), "done") as server:
        bench = bench_of(server)
        await ask(bench, Tools())
        (ended,) = bench.ended
        assert len(server.requests) == 3
        assert ended.usage.tokens == bench.ledger.used.tokens > 0
        assert ended.usage.calls == bench.ledger.used.calls == bench.ledger.subcalls == 1
        assert ended.attempts == 3


async def test_a_round_that_the_budget_does_not_cover_is_not_sent(bench_of: Any) -> None:
    """What tools return grows the next request, which is reserved by itself."""
    long = Tools(lambda arguments: ToolResult(text="word " * 3000))
    async with serving(look("a"), look("b"), "done") as server:
        bench = bench_of(server, budget=Budget(max_tokens=4000))
        outcome = await ask(bench, long, params=SubcallParams(max_tokens=50))
        assert "budget of 4,000 tokens" in str(outcome.error)
        assert len(server.requests) == 1
        assert len(used(bench)) == 1
        assert bench.ledger.used.tokens == bench.ended[0].usage.tokens > 0


async def test_no_more_is_set_aside_than_the_round_under_way_needs(bench_of: Any) -> None:
    """While a tool works nothing is: the round before is settled, the next not begun."""
    held: list[int] = []

    async with serving(look("a"), look("b"), "done") as server:
        bench: Bench = bench_of(server, budget=Budget(max_tokens=100_000))

        def answer(arguments: str) -> ToolResult:
            held.append(bench.ledger.reserved.tokens)
            return ToolResult(text="x")

        await ask(bench, Tools(answer))
        assert held == [0, 0]


async def test_a_model_that_never_answers_is_stopped_after_the_last_round(bench_of: Any) -> None:
    """It was told that the round is the last, and what its rounds used is booked."""
    async with ScriptedServer(reply=lambda prompt: look("again")) as server:
        bench, tools = bench_of(server), Tools()
        outcome = await ask(bench, tools)
        assert f"in {MAX_ROUNDS + 1} replies" in str(outcome.error)
        assert len(server.requests) == MAX_ROUNDS + 1
        assert len(tools.asked) == MAX_ROUNDS
        told = [str(m["content"]) for m in server.requests[-1].messages if m["role"] == "tool"]
        assert [("give your answer now" in text) for text in told] == [False] * 7 + [True]
        assert bench.ended[0].usage.tokens == bench.ledger.used.tokens


async def test_uses_beyond_the_limit_are_not_run(bench_of: Any) -> None:
    """The model is told, and may still answer."""
    many = look(*(str(number) for number in range(MAX_USES + 5)))
    async with serving(many, "done") as server:
        bench, tools = bench_of(server), Tools()
        assert (await ask(bench, tools)).text == "done"
        assert len(tools.asked) == len(used(bench)) == MAX_USES
        told = [str(m["content"]) for m in server.requests[-1].messages if m["role"] == "tool"]
        assert len(told) == MAX_USES + 5
        assert all("not run" in text for text in told[MAX_USES:])


async def test_long_output_is_cut_in_the_middle(bench_of: Any) -> None:
    """For the model and in the record; whatever the REPL sent."""
    long = Tools(lambda arguments: ToolResult(text="a" * 100_000 + "z"))
    async with serving(look("a"), "done") as server:
        bench = bench_of(server)
        await ask(bench, long)
        shown = str(server.requests[1].messages[2]["content"])
        assert len(shown) <= MAX_TOOL_OUTPUT
        assert (shown[0], shown[-1], "characters are left out" in shown) == ("a", "z", True)
        assert used(bench)[0].text == shown


async def test_an_unknown_tool_is_the_models_mistake(bench_of: Any) -> None:
    """It is told which there are; the REPL is not asked."""
    async with serving(AskTools((("lok", "{}"),)), "done") as server:
        bench, tools = bench_of(server), Tools()
        assert (await ask(bench, tools)).text == "done"
        assert tools.asked == []
        assert "there is no tool 'lok': use look" in server.requests[1].messages[2]["content"]


async def test_each_round_is_retried_by_itself(bench_of: Any) -> None:
    """Rounds do not use up the attempts of those after them."""
    script = [Refuse(503), Refuse(503), look("a"), Refuse(503), Refuse(503), "done"]
    async with serving(*script) as server:
        bench = bench_of(server)
        assert (await ask(bench, Tools())).text == "done"
        assert bench.ended[0].attempts == 6


@pytest.mark.parametrize("hang", ["tool", "server"])
async def test_cancelling_ends_the_call_wherever_it_is(bench_of: Any, hang: str) -> None:
    """In a tool or on the server; what the rounds before used is booked."""
    waiting = asyncio.Event()
    cancelled = asyncio.Event()

    async def use(name: str, arguments: str) -> ToolResult:
        if hang == "server":
            return ToolResult(text="x")
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with serving(look("a"), Hang()) as server:
        bench: Bench = bench_of(server)
        batch = bench.submit(["p"], toolbox=Toolbox(Tools().box.specs, use))
        if hang == "tool":
            await waiting.wait()
        else:
            await server.until(lambda s: len(s.requests) == 2 and s.active == 1)
        batch.cancel()
        await batch.wait()
        await server.until(lambda s: s.active == 0)
        await bench.scheduler.close()
        bench.check_pairs()
        assert cancelled.is_set() == (hang == "tool")
        assert ["cancelled" in event.error for event in used(bench)] == [hang == "tool"]
        (ended,) = bench.ended
        assert (ended.ok, ended.usage.tokens) == (False, bench.ledger.used.tokens)
        assert ended.usage.tokens > 0


async def test_a_tool_that_takes_longer_than_the_call_may_ends_with_it(bench_of: Any) -> None:
    """The call's timeout bounds all its rounds and tools."""

    async def use(name: str, arguments: str) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(look("a"), "done") as server:
        bench = bench_of(server)
        box = Toolbox(Tools().box.specs, use)
        params = SubcallParams(timeout=0.3)
        (outcome,) = await bench.submit(["p"], toolbox=box, params=params).wait()
        assert "no reply within 0.3 s" in str(outcome.error)
        bench.check_pairs()


async def test_the_calls_of_a_batch_use_tools_each_for_itself(bench_of: Any) -> None:
    """Results stay with their prompts, whatever the order of their rounds."""

    def reply(prompt: str) -> Step:
        return look(prompt) if prompt.startswith("p") else Say(f"re: {prompt}")

    async with ScriptedServer(reply=reply) as server:
        bench, tools = bench_of(server), Tools()
        prompts = [f"p{number}" for number in range(20)]
        outcomes = await bench.submit(prompts, toolbox=tools.box).wait()
        bench.check_pairs()
        asked = [f"re: saw {json.dumps({'q': prompt})}" for prompt in prompts]
        assert [outcome.text for outcome in outcomes] == asked
        by_call = {
            event.call_id: event.prompt
            for _, event in bench.events
            if isinstance(event, SubcallStarted)
        }
        assert all(by_call[event.call_id] in event.arguments for event in used(bench))


async def test_a_server_without_tools_says_so(bench_of: Any) -> None:
    """The call fails with the server's reason and how to change it."""
    refusal = Refuse(400, '"auto" tool choice requires --enable-auto-tool-choice')
    async with serving(refusal) as server:
        outcome = await ask(bench_of(server), Tools())
        assert "enable-auto-tool-choice" in str(outcome.error)


async def test_descriptions_count_among_the_tokens_that_are_set_aside(bench_of: Any) -> None:
    """They are sent with every request."""
    tools = Tools()
    spec = ToolSpec(name="look", description="word " * 3000, parameters=SCHEMA)
    tools.box = Toolbox([spec], tools.box.use)
    async with serving("done") as server:
        bench = bench_of(server, budget=Budget(max_tokens=3000))
        outcome = await ask(bench, tools)
        assert "budget of 3,000 tokens" in str(outcome.error)
        assert server.requests == []
