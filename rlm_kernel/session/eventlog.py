"""Records every event, then tells the listeners: the one way by which a fact becomes visible.

Events are appended as they happen and committed once per turn of the event
loop, those of sub-calls once in `GROUP_S`; only after the commit do listeners
(driver, inline view, terminal) hear of them, in order. Who waits for a
sub-call commits before it shows the reply, and so need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from rlm_kernel.engine.events import (
    Event,
    RunStarted,
    Stored,
    SubcallEnded,
    SubcallStarted,
    TurnExecuting,
    TurnStarted,
)
from rlm_kernel.errors import RecordError
from rlm_kernel.record import Record

__all__ = ["EventLog"]

Listener = Callable[[Stored], None]

log = logging.getLogger(__name__)

GROUP_S = 0.05
"""Events of sub-calls are committed this long after the first of them, if nobody needs them before:
longer than replies wait to be handed out, or there would be two commits for each time."""

_LAZY = (SubcallStarted, SubcallEnded)
_BEGINNINGS = (RunStarted, TurnStarted, TurnExecuting, SubcallStarted)


class EventLog:
    """Events of one REPL and of all runs below it.

    Parameters
    ----------
    open_record
        Called at the first event, so that a notebook that makes no run leaves no file.
    on_broken
        Called once when the record cannot be written any more. Listeners are still told of
        the events that end the run; nothing else may be started.
    """

    def __init__(
        self,
        open_record: Callable[[], Record],
        on_broken: Callable[[RecordError], None] = lambda error: None,
    ) -> None:
        self._open_record = open_record
        self._record: Record | None = None
        self._listeners: list[Listener] = []
        self._pending: list[Stored] = []
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._unrecorded = 0
        self.broken: RecordError | None = None
        self.on_broken = on_broken

    @property
    def record(self) -> Record:
        """The record, opened at the first use. Raises `RecordError`."""
        if self._record is None:
            self._record = self._open_record()
        return self._record

    @property
    def path(self) -> str:
        """Where the record lies; empty while nothing was recorded."""
        return "" if self._record is None else str(self._record.path)

    # --- replies that may be served again (`subcalls.scheduling.cache.Replies`) -------------------

    def mark(self) -> int:
        """The number of the last event so far; 0 where no reply can be served."""
        self.flush()
        return self.record.index_replies()

    def reply(self, key: str, after_seq: int, until_seq: int) -> tuple[int, SubcallEnded] | None:
        """See `rlm_kernel.record.Record.reply`."""
        return self.record.reply(key, after_seq, until_seq)

    # --- events ---------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call *listener* with every event from now on; returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def emit(self, run_id: str, event: Event) -> None:
        """Append *event*; listeners hear of it after the commit.

        Raises
        ------
        RecordError
            It says that something begins, and nothing can be recorded: it is not to begin.
        """
        if self.broken is not None and isinstance(event, _BEGINNINGS):
            raise self.broken
        self._pending.append(self._append(run_id, event))
        self._schedule(lazily=isinstance(event, _LAZY))

    def _schedule(self, *, lazily: bool) -> None:
        if self._soon:
            return
        if not lazily:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.flush)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GROUP_S, self.flush)

    def settle(self) -> None:
        """`flush`, for who shows something next.

        Raises
        ------
        RecordError
            It could not be recorded: it is not to be shown.
        """
        self.flush()
        if self.broken is not None:
            raise self.broken

    def flush(self) -> None:
        """Commit what was appended and tell the listeners."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._pending:
            return
        self._commit()
        events, self._pending = self._pending, []
        for stored in events:
            for listener in tuple(self._listeners):
                self._tell(listener, stored)

    def _tell(self, listener: Listener, stored: Stored) -> None:
        try:
            listener(stored)
        except Exception:  # it is somebody's code, and the others have to hear
            log.exception("a listener failed at event %d of run %s", stored.seq, stored.run_id)

    def close(self) -> None:
        """Commit and close the record."""
        self.flush()
        record, self._record = self._record, None
        if record is not None:
            try:
                record.close()
            except RecordError as error:
                if self.broken is None:  # told already otherwise
                    raise error

    def retry(self) -> None:
        """Write what a failure kept from being written. Raises `RecordError` where it lasts."""
        if self.broken is not None and self._record is None:
            self._record, self.broken = self._open_record(), None
        self._commit()
        if self.broken is not None:
            raise self.broken

    def _commit(self) -> None:
        if self._record is None:
            return
        try:
            self._record.commit()  # also after a failure: it keeps what it could not write
            self.broken = None
        except RecordError as error:
            self._break(error)

    def _append(self, run_id: str, event: Event) -> Stored:
        try:
            return self.record.append(run_id, event)
        except RecordError as error:
            self._break(error)
            if isinstance(event, _BEGINNINGS):
                raise
        self._unrecorded -= 1
        return Stored(self._unrecorded, run_id, time.time(), event)

    def _break(self, error: RecordError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        # Not from within emit(): the run that emits is in the middle of a step.
        asyncio.get_running_loop().call_soon(self.on_broken, error)
