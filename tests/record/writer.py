"""A process that writes a record until it is killed, and prints what it may show.

``python -m tests.record.writer PATH [events|prompt|hold|fork]``
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

from rlm_kernel.engine.events import Event, ReplyStreamed, SubcallEnded
from rlm_kernel.record import Record
from tests.record import samples


def event(seq: int) -> Event:
    """What is written as number *seq*: small and large texts, so that a kill hits both."""
    if seq % 7 == 0:
        return SubcallEnded(call_id=f"c{seq}", ok=True, response=f"{seq} " * 5_000)
    return ReplyStreamed(turn=1, offset=seq, text=f"text {seq}")


def write_events(record: Record) -> None:
    seqs = itertools.count(record.last_seq() + 1)
    while True:
        for seq in itertools.islice(seqs, 20):
            stored = record.append(samples.RUN, event(seq))
        record.commit()
        print(stored.seq, flush=True)


def write_prompt(record: Record) -> None:
    info = samples.prompt_info("", sha256="0" * 64, chars=0)
    with record.prompt_writer(info) as writer:
        for n in itertools.count():
            writer.write(os.urandom(1 << 20))
            print(n, flush=True)


def hold(record: Record) -> None:
    print("open", flush=True)
    signal.pause()


def fork(record: Record) -> None:
    """Hold the record; a child without exec goes on when this process is killed."""
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    signal.pause()


if __name__ == "__main__":
    path, what = sys.argv[1:]
    work = {"events": write_events, "prompt": write_prompt, "hold": hold, "fork": fork}[what]
    with Record.open(Path(path)) as opened:
        work(opened)
