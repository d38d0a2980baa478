"""What goes to one client: numbered updates, at most 30 a second.

The first operation after a silence is sent at once, so that a turn begins to
appear without delay; what follows is joined until the next update is due,
except for the few operations that something waits for. Front ends drop what
comes faster (a Jupyter server passes 1000 messages a
second and loses the rest), so a burst of sub-calls must never be a burst of
messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from rlm_kernel.driver.protocol import (
    Delta,
    Final,
    Node,
    Nodes,
    Operation,
    Refused,
    RunCell,
    Snapshot,
    State,
    Update,
)

__all__ = ["INTERVAL", "KEPT", "PER_SECOND", "CallLater", "Handle", "Outbox", "Send"]

PER_SECOND = 30
"""Updates in any second, at most."""

INTERVAL = 1 / 25
"""Seconds between ordinary updates: a little is left of each second for urgent ones."""

_URGENT = (RunCell, Final, Refused, Snapshot)

KEPT = 500
"""Updates that can be repeated."""

_NODES = 2000
"""Nodes in one update; a large tree takes several."""

_NODES_KEPT = 50_000
"""Nodes in the kept updates together: what bounds their memory."""


Send = Callable[[dict[str, Any]], None]
"""Sends one message on a client's comm."""


class Handle(Protocol):
    """A call that was asked for later."""

    def cancel(self) -> None:
        """Do not make it."""


CallLater = Callable[[float, Callable[[], None]], Handle]
"""Call a function after so many seconds, as ``loop.call_later`` does."""


class Outbox:
    """Queue of operations for one client.

    Parameters
    ----------
    send
        Of the client's comm.
    loop_time
        Seconds, monotonic.
    call_later
        On the same clock.
    state_of
        Gives the present `State` of a run; ``None`` where it is not known any more.
    """

    def __init__(
        self,
        send: Send,
        loop_time: Callable[[], float],
        call_later: CallLater,
        state_of: Callable[[str], State | None],
    ) -> None:
        self.seq = 0
        """Of the last update."""

        self._send = send
        self._loop_time = loop_time
        self._call_later = call_later
        self._state_of = state_of
        self._ops: list[Operation] = []
        self._nodes: dict[str, Node] = {}
        self._touched: set[str] = set()
        self._sent: deque[float] = deque(maxlen=PER_SECOND)
        self._urgent = False
        self._timer: Handle | None = None
        self._kept: deque[Update] = deque()
        self._nodes_kept = 0
        self._greeting = False
        self._closed = False

    def put(self, ops: Iterable[Operation]) -> None:
        """Queue operations, in order."""
        for op in ops:
            self._join(op)
            self._urgent = self._urgent or isinstance(op, _URGENT)
        self._schedule()

    def touch(self, run_id: str, node: Node | None = None) -> None:
        """A node, and with it the counts of a run, changed. Costs little: thousands of these
        become one operation."""
        if node is not None:
            self._nodes[node.id] = node
        self._touched.add(run_id)
        self._schedule()

    def put_nodes(self, nodes: Iterable[Node]) -> None:
        """Queue nodes that the client was not told of."""
        self._nodes.update((node.id, node) for node in nodes)
        self._schedule()

    def greet(self, ops: Iterable[Operation]) -> None:
        """Queue operations, and send an update even if there are none: the answer to a client
        that opened."""
        self._greeting = True
        self.put(ops)

    def repeat(self, from_seq: int) -> bool:
        """Send all updates from *from_seq* on again; False where they are not kept any more."""
        if not self._kept or from_seq < self._kept[0].seq:
            return False
        for update in [kept for kept in self._kept if kept.seq >= from_seq]:
            self._send(msgspec.to_builtins(update))
        return True

    def forget(self) -> None:
        """Drop what is queued: a snapshot takes its place."""
        self._ops.clear()
        self._nodes.clear()
        self._touched.clear()

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    # --- joining ------------------------------------------------------------------------------

    def _join(self, op: Operation) -> None:
        if isinstance(op, State):
            self._join_state(op)
            return
        last = self._ops[-1] if self._ops else None
        if isinstance(op, Delta) and isinstance(last, Delta) and _continues(last, op):
            op = Delta(cell_id=op.cell_id, offset=last.offset, text=last.text + op.text)
            self._ops.pop()
        self._ops.append(op)

    def _join_state(self, op: State) -> None:
        """A newer state takes the place of one that says the same of another moment. Every
        change of state is told, however fast they follow each other."""
        self._touched.discard(op.run_id)
        last = self._ops[-1] if self._ops else None
        if isinstance(last, State) and _place(last) == _place(op):
            self._ops.pop()
        self._ops.append(op)

    # --- sending ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._closed or not self._waiting:
            return
        if self._timer is not None:
            if not self._urgent:
                return
            self._timer.cancel()
            self._timer = None
        wait = self._wait()
        if wait <= 0:
            self._flush()
        else:
            self._timer = self._call_later(wait, self._due)

    def _wait(self) -> float:
        """Seconds until the next update may go."""
        if not self._sent:
            return 0.0
        pause = 0.0 if self._urgent else self._sent[-1] + INTERVAL
        full = self._sent[0] + 1.0 if len(self._sent) == PER_SECOND else 0.0
        return max(pause, full) - self._loop_time()

    @property
    def _waiting(self) -> bool:
        return bool(self._ops or self._nodes or self._touched or self._greeting)

    def _due(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        if self._closed or not self._waiting:
            return
        self._greeting = self._urgent = False
        self._sent.append(self._loop_time())
        self.seq += 1
        update = Update(self.seq, self._take())
        self._keep(update)
        self._send(msgspec.to_builtins(update))
        self._schedule()

    def _take(self) -> list[Operation]:
        """All that is queued, nodes up to a number."""
        nodes = list(self._nodes.values())[:_NODES]
        for node in nodes:
            del self._nodes[node.id]
        if nodes:
            self._ops.append(Nodes(nodes=nodes))
        for run_id in self._touched:
            state = self._state_of(run_id)
            if state is not None:
                self._ops.append(state)
        ops, self._ops = self._ops, []
        self._touched.clear()
        return ops

    def _keep(self, update: Update) -> None:
        self._kept.append(update)
        self._nodes_kept += _count(update)
        while len(self._kept) > KEPT or (self._nodes_kept > _NODES_KEPT and len(self._kept) > 1):
            self._nodes_kept -= _count(self._kept.popleft())


def _continues(last: Delta, op: Delta) -> bool:
    return last.cell_id == op.cell_id and last.offset + len(last.text) == op.offset


def _place(state: State) -> tuple[str, str, int, bool]:
    return (state.run_id, state.state, state.turn, state.awaiting)


def _count(update: Update) -> int:
    return sum(len(op.nodes) for op in update.ops if isinstance(op, Nodes))
