"""Processes that take long to end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rlm_kernel.subcalls.vllm.processes import end_sessions, process_at
from tests.host.conftest import until

_SLOW_TO_END = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
SEIZE, CONTINUE, TRACE_EXIT, ALL_CHILDREN = 0x4206, 7, 0x40, 0x40000000
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
refused = libc.ptrace(SEIZE, child, None, TRACE_EXIT)
while os.getsid(child) != child:
    time.sleep(0.01)
print(0 if refused else child, flush=True)
os.waitpid(child, ALL_CHILDREN)  # killed, and held on its way out
time.sleep(float(sys.argv[1]))
libc.ptrace(CONTINUE, child, None, None)
os.waitpid(child, 0)
"""

_FIRST_THREAD_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60 if __import__("platform").machine() == "x86_64" else 93, 0)
"""

Hold = Callable[[float], int]


@pytest.fixture
def held() -> Iterator[Hold]:
    """Starts the leader of a session that is gone only so many seconds after it is killed."""
    tracers: list[subprocess.Popen[str]] = []

    def start(seconds: float) -> int:
        tracer = subprocess.Popen(
            [sys.executable, "-c", _SLOW_TO_END, str(seconds)], stdout=subprocess.PIPE, text=True
        )
        tracers.append(tracer)
        assert tracer.stdout is not None
        pid = int(tracer.stdout.readline())
        if not pid:
            pytest.skip("the system lets no process hold another on its way out (ptrace)")
        return pid

    yield start
    for tracer in tracers:
        tracer.kill()  # what it holds is let go with it
        tracer.communicate()


def test_a_killed_process_that_takes_seconds_to_end_is_waited_for(held: Hold) -> None:
    """As an engine does that gives back a GPU's memory."""
    slow = held(6)

    assert end_sessions([slow]) == []
    assert process_at(slow) is None


def test_what_does_not_end_is_named(held: Hold) -> None:
    """Of all sessions at once, so that one that hangs keeps no other alive."""
    stuck = held(600)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    left = end_sessions([stuck, other.pid], patience=0.5)

    assert [process.pid for process in left] == [stuck]
    assert other.wait(30) == -9


def test_a_process_whose_first_thread_has_ended_is_there() -> None:
    """It holds its memory until the last thread is gone, though it looks like a zombie."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FIRST_THREAD_GONE], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with open(f"/proc/{process.pid}/stat") as stat:
            until(lambda: stat.seek(0) or ") Z " in stat.read(), "the first thread lives on")
        assert process_at(process.pid) is not None
        assert end_sessions([process.pid]) == []
    finally:
        process.kill()
        process.communicate()
