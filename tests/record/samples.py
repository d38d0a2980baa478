"""Events as a run makes them, for the tests of the record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rlm_kernel.cells import (
    AnswerSet,
    CellResult,
    Display,
    PromptInfo,
    Result,
    Stream,
    SubcallParams,
    Value,
    Variable,
)
from rlm_kernel.engine.budget import Budget, Usage
from rlm_kernel.engine.events import (
    AnswerRejected,
    Compacted,
    Event,
    ReplyStreamed,
    ReplyWithoutCode,
    RunEnded,
    RunPaused,
    RunResumed,
    RunStarted,
    SubcallEnded,
    SubcallJudged,
    SubcallStarted,
    ToolCalled,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
    WorkerLost,
)

RUN = "0123456789ab"
LONG = "A gate, a code, and a decoy. " * 1_000


def prompt_bytes(prompt: str | list[str] | dict[str, str]) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    return json.dumps(prompt, ensure_ascii=True).encode()


def prompt_info(prompt: str | list[str] | dict[str, str], **fields: Any) -> PromptInfo:
    chars = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
    return PromptInfo(
        **{
            "kind": type(prompt).__name__,
            "chars": chars,
            "items": 1 if isinstance(prompt, str) else len(prompt),
            "sha256": hashlib.sha256(prompt_bytes(prompt)).hexdigest(),
            "preview": prompt[:20] if isinstance(prompt, str) else "",
            "source": "gates.txt",
            **fields,
        }
    )


def started(prompt: str = LONG, query: str = "What is the code?", **fields: Any) -> RunStarted:
    return RunStarted(
        query=query,
        prompt=prompt_info(prompt),
        dialect="paper",
        root="playbook:needle.py",
        sub="embedded",
        budget=Budget(max_turns=5),
        version="0.1.0",
        **fields,
    )


def subcall(call_id: str, *, ok: bool = True, turn: int = 1) -> Iterator[Event]:
    yield SubcallStarted(
        call_id=call_id,
        kind="llm",
        prompt=f"Which code is in: {call_id}?",
        model="small",
        turn=turn,
        batch_id="b1",
        params=SubcallParams(temperature=0.5),
    )
    yield SubcallEnded(
        call_id=call_id,
        ok=ok,
        response="48213" if ok else "",
        error="" if ok else "the endpoint answered 500",
        usage=Usage(input_tokens=100, output_tokens=10, calls=1, seconds=0.25),
    )


def turn(number: int = 1, source: str = "Final = 48213", *, ok: bool = True) -> Iterator[Event]:
    yield TurnStarted(turn=number)
    yield TurnProposed(
        turn=number,
        reply=f"I look.\n```repl\n{source}\n```",
        prose="I look.",
        source=source,
        usage=Usage(input_tokens=1000, output_tokens=50, calls=1),
        finish="fence",
    )
    yield TurnDecided(turn=number, action="run", by="policy")
    yield TurnExecuting(turn=number, source=source, cell_id="c1")
    yield TurnExecuted(
        turn=number,
        result=CellResult(
            ok=ok, execution_count=number, outputs=[Stream("stdout", "out\n")], seconds=0.5
        ),
        cell_id="c1",
    )
    yield TurnObserved(turn=number, observation="out")


def ended(response: str = "48213", **fields: Any) -> RunEnded:
    return RunEnded(
        **{
            "state": "answered",
            "answer": Value(type="int", text=response, data=48213),
            "response": response,
            "usage": Usage(input_tokens=1200, output_tokens=70, calls=3),
            "subcalls": 2,
            "turns": 1,
            **fields,
        }
    )


def whole_run(prompt: str = LONG) -> list[Event]:
    """One turn with two sub-calls, one of which failed."""
    before, after = list(turn())[:4], list(turn())[4:]
    return [
        started(prompt),
        *before,
        *subcall("call-1"),
        *subcall("call-2", ok=False),
        *after,
        ended(),
    ]


def one_of_each() -> list[Event]:
    """Every kind of event, with values of every kind that a cell can bring up."""
    result = CellResult(
        ok=True,
        execution_count=3,
        outputs=[
            Stream("stdout", LONG),
            Display({"text/plain": "x", "application/json": {"n": [1, None, 2.5]}}, display_id="d"),
            Result(3, {"text/plain": "48213"}),
        ],
        variables=[Variable("codes", "list", 8, "new")],
        answer=AnswerSet("Final", Value("float", "nan", float("nan"))),
        seconds=0.5,
    )
    return [
        *whole_run(),
        ReplyStreamed(turn=2, offset=0, text="I loo"),
        ReplyWithoutCode(turn=2, reply="No code.", usage=Usage(output_tokens=3)),
        TurnDecided(turn=2, action="edit", by="alice", source="rlm:blob:is no reference"),
        TurnExecuted(turn=2, result=result),
        AnswerRejected(turn=2, reason="the cell raised"),
        Compacted(turn=2, dropped=4, summary="null and rlm: are words"),
        RunPaused(turn=2, reason="asked to"),
        RunResumed(turn=2),
        WorkerLost(reason="killed", lost=["codes"]),
        SubcallStarted(call_id="s", kind="rlm", prompt="lone \ud800", model="", index=7),
        SubcallJudged(call_id="s", task="label", ok=False, reason="'maybe' is no choice"),
        ToolCalled(call_id="s", name="search", arguments='{"q": "gate"}', text=LONG, seconds=0.1),
    ]
