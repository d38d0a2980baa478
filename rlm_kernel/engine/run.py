"""A run: one root working on one query, as a state machine.

    idle → proposing → proposed → executing → observing → proposing …
    and the ends  answered │ stopped(reason) │ failed(error)

`proposed` is the only pause point. Every fact is emitted as an event before
anything else depends on it, and `RunEnded` is emitted exactly once, whichever
way the run ends.

All of a `Run` happens on one event loop; its methods are not for other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

from rlm_kernel import __version__
from rlm_kernel.cells import AnswerSet, CellResult, PromptInfo, Value
from rlm_kernel.engine.budget import Ledger
from rlm_kernel.engine.conversation import Conversation
from rlm_kernel.engine.decisions import Decision, Policy, Proposal, automatic
from rlm_kernel.engine.dialects import Dialect, RunFacts
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
    RunState,
    TurnDecided,
    TurnExecuted,
    TurnExecuting,
    TurnObserved,
    TurnProposed,
    TurnStarted,
)
from rlm_kernel.engine.observation import observe
from rlm_kernel.engine.replies import Reply
from rlm_kernel.engine.root_protocol import Message, Root
from rlm_kernel.engine.stopping import EndingError, StopSignal, abandon
from rlm_kernel.errors import BudgetExceeded, NoAnswer, RLMError, UsageError

__all__ = ["Executor", "Interruptible", "Run", "cell_id"]

MAX_ATTEMPTS = 20
"""Proposals for one turn."""

INTERRUPT_PATIENCE = 15.0
"""Seconds that a cell has to end after its interrupt; the REPL's own ladder takes under 5."""


class Executor(Protocol):
    """What runs cells."""

    async def execute(self, turn: int, source: str, history: Sequence[Message]) -> CellResult:
        """Run *source*. *history* are the messages since the last turn's, for the REPL.

        Whatever the cell does is a `CellResult`; raising `RLMError` fails the run.
        """


@runtime_checkable
class Interruptible(Protocol):
    """An executor that can interrupt the cell that it runs; `execute` then returns."""

    async def interrupt(self) -> None: ...


def cell_id(run_id: str, turn: int) -> str:
    """Id of the cell of *turn* in a notebook."""
    return f"{run_id}-{turn}"


class Run:
    """See the module. Implements `decisions.RunControl`.

    Parameters
    ----------
    run_id
        12 hex digits.
    emit
        Records an event and then shows it. What it raises ends the run.
    policy
        Decides about proposals, or leaves it to a person.
    root_spec, sub_spec
        For the record, without keys; the root's name where empty.
    sub_context
        Tokens that the model of the sub-calls takes, for the system prompt.
    parent_run_id, parent_call_id
        Of the sub-call that this run answers.
    hide_stream
        Do not emit `ReplyStreamed`: for child runs, whose replies nobody watches.
    """

    def __init__(
        self,
        *,
        run_id: str,
        query: str,
        prompt: PromptInfo,
        root: Root,
        dialect: Dialect,
        executor: Executor,
        ledger: Ledger,
        emit: Callable[[Event], None],
        policy: Policy = automatic,
        root_spec: str = "",
        sub_spec: str = "",
        sub_context: int | None = None,
        depth: int | None = None,
        parent_run_id: str = "",
        parent_call_id: str = "",
        hide_stream: bool = False,
        version: str = "",
    ) -> None:
        self.root = root
        self.ledger = ledger
        self._run_id = run_id
        self._dialect = dialect
        self._executor = executor
        self._emit = emit
        self._policy = policy
        self._hide_stream = hide_stream
        self._state: RunState = "idle"
        self._turn = 0
        self._misses = 0
        self._signal = StopSignal()
        self._conversation = Conversation(root, dialect, ledger, self._signal)
        self._asking = False
        self._waiting: asyncio.Future[Decision] | None = None
        self._proposal: Proposal | None = None
        self._deadline: asyncio.TimerHandle | None = None
        depth = ledger.depth if depth is None else depth
        facts = RunFacts(budget=ledger.budget, depth=depth, sub=sub_spec, sub_context=sub_context)
        self.started = RunStarted(
            query=query,
            prompt=prompt,
            dialect=dialect.name,
            root=root_spec or root.name,
            sub=sub_spec,
            budget=ledger.budget,
            depth=depth,
            parent_run_id=parent_run_id,
            parent_call_id=parent_call_id,
            system_prompt=dialect.system_prompt(facts),
            first_message=dialect.first_message(query, prompt),
            version=version or __version__,
        )
        """The first event, emitted by `run`."""

    # --- control ------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def state(self) -> RunState:
        return self._state

    @property
    def history(self) -> list[Message]:
        """Every message between run and root, also those that compaction replaced."""
        return self._conversation.history

    @property
    def turn(self) -> int:
        """From 1; 0 before the first."""
        return self._turn

    @property
    def proposal(self) -> Proposal | None:
        """The proposal that waits for a person's decision."""
        return self._proposal

    def decide(self, decision: Decision) -> None:
        """Decide about the waiting proposal. Raises `UsageError` where that is not possible."""
        if self._waiting is None or self._waiting.done():
            raise UsageError("no proposal waits for a decision; %rlm pause waits at the next one")
        if decision.action == "edit" and not (decision.source or "").strip():
            raise UsageError("an edit needs the new source of the cell; skip the cell to drop it")
        self._waiting.set_result(decision)
        self._proposal = None

    def pause(self) -> None:
        """Ask at the next proposal, and from then on at each."""
        self._asking = True

    def resume(self) -> None:
        """Let the policy decide again; a proposal that waits is run."""
        if self._state in ("answered", "stopped", "failed"):
            return
        waits = self._proposal is not None
        if self._asking or waits:
            self._emit(RunResumed(turn=self._turn))
        self._asking = False
        if waits:
            self.decide(Decision(action="run", by="person"))

    def stop(self, reason: str) -> None:
        """End the run as soon as possible: the stream of the root is cut, the cell interrupted,
        no other is started."""
        self._signal.set("stopped", reason)

    def fail(self, reason: str) -> None:
        """Like `stop`, where something broke outside of the run, such as the record."""
        self._signal.set("failed", reason)

    # --- the run ------------------------------------------------------------------------------

    async def run(self) -> RunEnded:
        """Work until the run ends; once. Does not raise what ends a run: the result tells.

        Raises
        ------
        asyncio.CancelledError, Exception
            After `RunEnded` was emitted, where the task was cancelled or rlm-kernel has a bug.
        """
        if self._state != "idle" or self.history:
            raise UsageError("this run was started already; a new one is needed for another try")
        self._conversation.say("system", self.started.system_prompt)
        self._conversation.say("user", self.started.first_message)
        try:
            self._emit(self.started)
            self._watch_clock()
            answer = await self._turns()
        except EndingError as ending:
            return self._end(ending.state, ending.reason)
        except (BudgetExceeded, NoAnswer) as error:
            return self._end("stopped", str(error))
        except RLMError as error:
            return self._end("failed", str(error))
        except asyncio.CancelledError:
            self._end("stopped", "the run was cancelled")
            raise
        except BaseException as error:
            self._end("failed", f"rlm-kernel has a bug: {type(error).__name__}: {error}")
            raise
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
        return self._end("answered", answer=answer)

    def _end(
        self,
        state: Literal["answered", "stopped", "failed"],
        reason: str = "",
        answer: Value | None = None,
    ) -> RunEnded:
        self._state = state
        self._proposal = None
        ended = RunEnded(
            state=state,
            reason=reason,
            answer=answer,
            response="" if answer is None else answer.text,
            usage=self.ledger.used,
            subcalls=self.ledger.subcalls,
            turns=self.ledger.turns,
        )
        self._emit(ended)
        return ended

    def _watch_clock(self) -> None:
        """Stop the run when its time, or that of a run above, is over."""
        left = self.ledger.seconds_left()
        if left is None:
            return
        if left <= 0:
            self.stop(self.ledger.exceeded())
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(left, self._watch_clock)

    async def _turns(self) -> Value:
        while True:
            self._signal.check()
            self._check_budget()
            compacted = await self._conversation.make_room()
            if compacted is not None:
                dropped, summary = compacted
                self._emit(Compacted(turn=self._turn + 1, dropped=dropped, summary=summary))
            self._turn += 1
            self.ledger.turns += 1
            answer = await self._one_turn()
            if answer is not None:
                return answer

    def _check_budget(self) -> None:
        reason = self.ledger.exceeded()
        if reason:
            raise BudgetExceeded(reason)

    async def _one_turn(self) -> Value | None:
        """Propose, decide, execute, observe. Returns the answer where the cell set it."""
        attempt, aside = 0, list[Message]()
        while True:
            attempt += 1
            reply = await self._ask(attempt, aside)
            aside = []
            if reply.cell is None:
                self._no_cell(reply, attempt)
                continue
            self._misses = 0
            proposal = self._propose(reply, attempt)
            decision = await self._decide(proposal)
            if decision.action == "regenerate":
                self._check_attempts(attempt)
                aside = self._why_again(proposal, decision.note)
                continue
            return await self._carry_out(proposal, decision)

    def _check_attempts(self, attempt: int) -> None:
        """A policy that likes no proposal would ask for ever: regenerating costs no turn."""
        if attempt >= MAX_ATTEMPTS:
            raise EndingError(
                "stopped",
                f"none of {MAX_ATTEMPTS} proposals for turn {self._turn} was accepted; "
                "edit or skip a cell, or change the policy",
            )

    async def _carry_out(self, proposal: Proposal, decision: Decision) -> Value | None:
        if decision.action == "stop":
            raise EndingError("stopped", decision.note or f"stopped by {decision.by}")
        edited = decision.source if decision.action == "edit" else None
        source = proposal.source if edited is None else edited
        # The root sees an edited cell as its own: it goes on from what was run.
        self._conversation.say("assistant", self._dialect.cell(proposal.prose, source))
        if decision.action == "skip":
            self._observed(self._dialect.skipped(decision.note))
            return None
        return self._observe(await self._execute(source))

    # --- proposing ----------------------------------------------------------------------------

    async def _ask(self, attempt: int, aside: Sequence[Message]) -> Reply:
        """Ask the root for a cell. *aside* is said to it for this attempt only."""
        self._state = "proposing"
        self._emit(TurnStarted(turn=self._turn, attempt=attempt))
        turn = self._turn

        def tell(offset: int, text: str) -> None:
            if not self._hide_stream:
                self._emit(ReplyStreamed(turn=turn, offset=offset, text=text, attempt=attempt))

        return await self._conversation.ask(attempt, aside, tell)

    def _no_cell(self, reply: Reply, attempt: int) -> None:
        self._emit(
            ReplyWithoutCode(turn=self._turn, reply=reply.text, usage=reply.usage, attempt=attempt)
        )
        self._misses += 1
        if self._misses >= 2:
            raise NoAnswer(
                "the root replied without a cell twice in a row; "
                "use a root that can write code, or say in the query what is wanted"
            )
        # Some servers refuse a message without text.
        self._conversation.say("assistant", reply.prose or "(no reply)")
        self._conversation.say("user", self._dialect.no_code(cut=reply.finish == "length"))

    def _propose(self, reply: Reply, attempt: int) -> Proposal:
        assert reply.cell is not None
        cell = reply.cell
        proposal = Proposal(turn=self._turn, source=cell.source, prose=cell.prose, attempt=attempt)
        self._state = "proposed"
        self._emit(
            TurnProposed(
                turn=self._turn,
                reply=reply.text,
                prose=cell.prose,
                source=cell.source,
                usage=reply.usage,
                attempt=attempt,
                finish=reply.finish,
                sampled=self.root.sampled,
            )
        )
        return proposal

    def _why_again(self, proposal: Proposal, note: str) -> list[Message]:
        """Said before another proposal; nothing where no reason was given."""
        if not note.strip():
            return []
        return [
            Message("assistant", self._dialect.cell(proposal.prose, proposal.source)),
            Message("user", self._dialect.regenerate(note)),
        ]

    # --- deciding -----------------------------------------------------------------------------

    async def _decide(self, proposal: Proposal) -> Decision:
        self._signal.check()
        decision = None if self._asking else self._policy(proposal)
        if decision is None:
            decision = await self._wait_for_person(proposal)
        self._emit(
            TurnDecided(
                turn=self._turn,
                action=decision.action,
                by=decision.by,
                source=decision.source,
                note=decision.note,
            )
        )
        return decision

    async def _wait_for_person(self, proposal: Proposal) -> Decision:
        waiting = asyncio.get_running_loop().create_future()
        # Before the event: whoever hears of the pause may decide at once.
        self._waiting, self._proposal = waiting, proposal
        reason = "paused by a person" if self._asking else "the policy leaves it to a person"
        try:
            self._emit(RunPaused(turn=self._turn, reason=reason))
            await self._signal.until(waiting)
            decision: Decision = waiting.result()
            return decision
        finally:
            self._waiting = self._proposal = None

    # --- executing ----------------------------------------------------------------------------

    async def _execute(self, source: str) -> CellResult:
        self._signal.check()
        self._state = "executing"
        name = cell_id(self._run_id, self._turn)
        self._emit(TurnExecuting(turn=self._turn, source=source, cell_id=name))
        news = self._conversation.news()
        cell = asyncio.ensure_future(self._executor.execute(self._turn, source, news))
        try:
            await self._signal.until(cell)
        except EndingError:
            await self._interrupt(cell)
            if not cell.done() or cell.cancelled():
                raise
        finally:
            if not cell.done():
                await abandon(cell)
        result = cell.result()
        self._emit(TurnExecuted(turn=self._turn, result=result, cell_id=name))
        return result

    async def _interrupt(self, cell: asyncio.Future[CellResult]) -> None:
        """Interrupt the cell, so that what it did so far is recorded."""
        if not isinstance(self._executor, Interruptible):
            return
        asked = asyncio.ensure_future(self._executor.interrupt())
        await asyncio.wait({cell}, timeout=INTERRUPT_PATIENCE)
        await abandon(asked)

    # --- observing ----------------------------------------------------------------------------

    def _observe(self, result: CellResult) -> Value | None:
        self._state = "observing"
        rejected = _why_rejected(result)
        answer = None if rejected else result.answer
        notes = []
        if rejected:
            self._emit(AnswerRejected(turn=self._turn, reason=rejected))
            notes.append(self._dialect.rejected(rejected))
        left = self.ledger.budget.max_turns - self.ledger.turns
        if answer is None and left > 0:
            notes.append(self._dialect.turns_left(left))
        self._observed(observe(result, self._dialect.observation_chars, notes))
        if answer is None:
            self._signal.check()
        return None if answer is None else answer.value

    def _observed(self, observation: str) -> None:
        self._emit(TurnObserved(turn=self._turn, observation=observation))
        self._conversation.say("user", observation)


def _why_rejected(result: CellResult) -> str:
    """Why the answer that a cell set does not count; empty where it does, or there is none."""
    answer = result.answer
    if answer is None:
        return ""
    if not result.ok:
        name = result.error.ename if result.error is not None else "an error"
        return f"the cell that set it ended with {name}"
    if answer.how == "answer" and _is_empty(answer):
        return 'answer["ready"] was set while answer["content"] was empty'
    return ""


def _is_empty(answer: AnswerSet) -> bool:
    return answer.value.type == "NoneType" or (
        answer.value.type == "str" and not answer.value.text.strip()
    )
