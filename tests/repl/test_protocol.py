"""What a worker may not do to the link, and what then happens."""

from __future__ import annotations

import asyncio

import pytest

from rlm_kernel.cells import AnswerSet, Display, Value
from rlm_kernel.repl import Nobody, Repl
from rlm_kernel.repl.messages import (
    CommFromWorker,
    CommToWorker,
    SendSubcalls,
    SubcallResult,
)
from tests.repl.conftest import text_of, until

FRAME = """import msgspec, pickle, struct
def frame(data): raw(struct.pack("<I", len(data)) + data)
def display(data): send(Emit(id=request.id, output=Display({"a": data})))
"""

VIOLATIONS = {
    "garbage": (r"frame(b'\xc1\xc1')", "no message"),
    "pickle": ("frame(pickle.dumps(os.getcwd))", "no message"),
    "empty frame": ("frame(b'')", "no message"),
    "oversize": (r"raw(b'\xff\xff\xff\xff')", "4,294,967,295 bytes"),
    "unknown tag": ("send(['exec', 1])", "no message"),
    "wrong type": ("send(['emit', 'one', ['stream', 'stdout', 'x']])", "no message"),
    "kernel's message": ("send(['execute', 1, 'code'])", "no message"),
    "huge id": ("send(['emit', 2**63, ['stream', 'stdout', 'x']])", "no message"),
    "negative id": ("send(['emit', -1, ['stream', 'stdout', 'x']])", "no message"),
    "extension type": ("display(msgspec.msgpack.Ext(1, b''))", "no message"),
    "bad UTF-8": (r"frame(b'\x93\xa4emit\x01\x93\xa6stream\xa6stdout\xa1\xff')", "no message"),
    "deep nesting": (
        r"frame(b'\x93\xa4emit\x01\x92\xa7display\x81\xa1a' + b'\x91' * 50_000 + b'\xc0')",
        "no message",
    ),
    "millions of values": (
        r"frame(b'\x93\xa4emit\x01\x93\xa7display\x81\xa1a\xdd\0\x10\0\0' + b'\x80' * 0x100001)",
        "more than 1,000,000 values",
    ),
    "second hello": ("send(Hello(pid=1, python='3'))", "said hello twice"),
    "reply to nothing": ("send(Pong(id=request.id + 1))", "not asked"),
    "end of another cell": (
        "send(Done(id=request.id + 1, ok=True, execution_count=1))",
        "does not run",
    ),
    "chunk of no prompt": ("send(PromptChunk(id=1, data=b'x', last=True))", "not asked"),
    "same id twice": (
        "for _ in range(2): send(GetInput(id=5, cell=request.id))",
        "asked twice",
    ),
}


class Silent(Nobody):
    """Never answers."""

    async def get_input(self, cell: int, prompt: str, password: bool) -> str | None:
        await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_violation_ends_the_worker_and_says_what_it_was(standin: Repl, name: str) -> None:
    code, reason = VIOLATIONS[name]
    standin.handler = Silent()

    result = (await standin.execute(FRAME + code, allow_stdin=True)).result

    assert result.error is not None
    assert result.error.ename == "WorkerDied"
    assert reason in result.worker_lost
    assert result.error.evalue.startswith("The worker was stopped: it ")
    assert ".;" not in result.error.evalue
    again = (await standin.execute("os.write(1, b'again')")).result
    assert text_of(again) == "again"


DEEP = "d = 1\nfor _ in range(200): d = [d]\n"

LEFT_OUT = {
    "display": "for _ in range(3): display(d)",
    "widget": "send(CommFromWorker(kind='comm_msg', cell=request.id, comm_id='c', data=d))",
}


@pytest.mark.parametrize("name", LEFT_OUT)
async def test_data_too_deep_for_a_front_end_is_left_out_and_that_is_said_once(
    standin: Repl, name: str
) -> None:
    worker = standin.worker_pid

    result = (await standin.execute(FRAME + DEEP + LEFT_OUT[name])).result

    assert result.ok
    assert text_of(result, "stderr").count("nested more than 100 deep") == 1
    assert standin.worker_pid == worker


async def test_request_beyond_those_that_may_be_open_fails_and_the_worker_lives(
    standin: Repl,
) -> None:
    standin.handler = Silent()
    worker = standin.worker_pid
    code = """for i in range(10_000): send(GetInput(id=i, cell=request.id))
for i in range(10_000, 10_002):
    send(SendSubcalls(id=i, cell=request.id, kind="llm", prompts=["x"]))
    failed = receive()
    os.write(1, f"{failed.id} {failed.ename} {failed.reason}\\n".encode())"""

    result = (await standin.execute(code, allow_stdin=True)).result

    lines = text_of(result).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["10000", "SubcallError"],
        ["10001", "SubcallError"],
    ]
    assert all("give sub_RLM a list of prompts" in line for line in lines)
    assert standin.worker_pid == worker


async def test_cut_frame_is_no_message(standin: Repl) -> None:
    """A worker that ends in the middle of a frame ends as one that ends between two."""
    result = (await standin.execute(r"raw(b'\xff\0\0\0\x93\xa4emit'); os._exit(5)")).result

    assert result.worker_lost == "exited with code 5"
    assert result.outputs == [result.error]


async def test_frame_that_comes_byte_by_byte_is_one_message(standin: Repl) -> None:
    code = """import msgspec, struct
data = msgspec.msgpack.encode(Emit(id=request.id, output=Stream("stdout", "slowly")))
for byte in struct.pack("<I", len(data)) + data: raw(bytes([byte]))"""

    assert text_of((await standin.execute(code)).result) == "slowly"


async def test_data_that_is_no_json_is_made_so(standin: Repl) -> None:
    """A front end gets JSON only; a user's mistake is not worth a worker."""
    code = "send(Emit(id=request.id, output=Display({'a': {3: b'x'}, 'b': [1.5, None, True]})))"

    result = (await standin.execute(code)).result

    assert result.outputs == [Display({"a": {"3": "eA=="}, "b": [1.5, None, True]})]


@pytest.mark.parametrize("said", ["nan", "inf", "-inf", "-5.0", "1e300"])
async def test_times_of_a_cell_are_those_that_can_be(standin: Repl, said: str) -> None:
    """They are summed up and written out as times, which no NaN and no infinity can be."""
    code = (
        f"said = float('{said}')\n"
        "send(Done(id=request.id, ok=True, execution_count=1, seconds=said, waited_s=said))"
    )
    result = (await standin.execute(code)).result

    assert 0 <= result.waited_s <= result.seconds < 1e300


async def test_worker_that_never_reads_is_given_up_before_memory_is(standin: Repl) -> None:
    cell = asyncio.ensure_future(
        standin.execute("os.write(1, b'up'); import time; time.sleep(600)")
    )
    await until(lambda: standin.busy)
    buffers = [b"x" * (16 << 20)]

    for _ in range(20):
        standin.comm(CommToWorker(kind="comm_msg", comm_id="c", buffers=buffers))

    assert "unread" in (await cell).result.worker_lost


async def test_too_large_a_cell_is_refused_and_the_worker_lives(standin: Repl) -> None:
    worker = standin.worker_pid

    result = (await standin.execute("#" * (65 << 20))).result

    assert result.error is not None
    assert result.error.ename == "UsageError"
    assert (await standin.execute("1")).result.ok
    assert standin.worker_pid == worker


async def test_answer_of_data_that_no_value_has_is_its_text(standin: Repl) -> None:
    """Seven hundred lists in one another would fail in whatever looks at the answer next."""
    code = """d = 1
for _ in range(700): d = [d]
value = Value("list", "[[…]]", d)
send(Done(id=request.id, ok=True, execution_count=1, answer=AnswerSet("Final", value)))
receive()"""

    result = (await standin.execute(code)).result

    assert result.answer == AnswerSet("Final", Value("list", "[[…]]", None, False))


class Widgets(Nobody):
    """Counts the bytes for front ends."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def comm(self, message: CommFromWorker) -> None:
        self.sizes.append(sum(map(len, message.buffers)))


FLOOD = """for kind in ["comm_open", *["comm_msg"] * 99]:
    send(CommFromWorker(kind=kind, cell=request.id, comm_id="c", buffers=[bytes(1 << 20)]))"""


async def test_widgets_may_send_so_much_for_a_cell_and_the_rest_is_left_out(standin: Repl) -> None:
    """A front end that is slow to take it would have all of it wait in the kernel's memory."""
    handler = Widgets()
    standin.handler = handler

    for _ in range(2):
        handler.sizes.clear()
        result = (await standin.execute(FLOOD)).result

        assert 60 << 20 < sum(handler.sizes) <= 64 << 20
        assert text_of(result, "stderr").count("widgets sent 64 MiB for this cell") == 1


async def test_widgets_may_send_again_once_a_front_end_writes_to_them(standin: Repl) -> None:
    handler = Widgets()
    standin.handler = handler
    await standin.execute(FLOOD)
    handler.sizes.clear()
    cell = asyncio.ensure_future(standin.execute(f"while receive().id == 0: pass\n{FLOOD}"))
    await until(lambda: standin.busy)

    standin.comm(CommToWorker(kind="comm_msg", comm_id="c"))
    await cell

    assert sum(handler.sizes) > 60 << 20


class Holding(Nobody):
    """Takes batches and answers when told."""

    def __init__(self) -> None:
        self.batches: list[tuple[SendSubcalls, object]] = []

    def subcalls(self, request, deliver, fail):  # type: ignore[no-untyped-def]
        self.batches.append((request, deliver))
        return lambda: None


async def test_prompts_beyond_what_memory_bears_wait_in_the_worker(standin: Repl) -> None:
    """Where half a GiB of prompts is under way, the link is read again only after an answer."""
    handler = Holding()
    standin.handler = handler
    code = """prompt = "x" * 40_000_000
for i in range(20): send(SendSubcalls(id=i, cell=request.id, kind="llm", prompts=[prompt]))
for i in range(20): receive()
os.write(1, b"all answered")"""
    cell = asyncio.ensure_future(standin.execute(code))
    await until(lambda: len(handler.batches) == 14)
    while not cell.done():
        await until(lambda: handler.batches or cell.done())
        assert len(handler.batches) <= 14
        while handler.batches:
            _, deliver = handler.batches.pop(0)
            deliver([SubcallResult(index=0, text="ok")])  # type: ignore[operator]

    assert text_of((await cell).result) == "all answered"
