"""A server that dies in the middle of a batch, as where memory runs out."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.conftest import RecordedKernel
from tests.vllm.servers import MODEL, Machine, Server, until

STORY = "[f'Tell a story about {n} ships.' for n in range(96)]"


def test_calls_move_to_the_other_server_and_no_engine_is_left(
    machine: Machine, server: Server, kernel_with: Callable[..., RecordedKernel]
) -> None:
    """Of two servers one is killed. A batch over both loses nothing; one that had only the dead
    one ends with an error for each call that was not answered; and ``serve --stop`` ends the engine
    that the killed API server has left behind."""
    other = machine.serve("two")
    try:
        both = kernel_with(RLM_SUB=f"vllm:{MODEL}@{server.url},{other.url}")
        alone = kernel_with(RLM_SUB=other.spec)
        asked = both.send(f"r = sub_RLM({STORY}, max_tokens=16)")
        asked_alone = alone.send(f"r = sub_RLM({STORY}, max_tokens=16)")
        until(lambda: other.metric("num_requests_running") > 2, "the server is not busy")

        other.kill_api_server()
        cell = both.collect(asked)
        cell_alone = alone.collect(asked_alone)

        assert cell.status == "ok", cell.evalue
        assert both.value("[type(x).__name__ for x in r]") == repr(["str"] * 96)
        assert cell_alone.status == "ok", cell_alone.evalue
        assert alone.value("len(r), {type(x).__name__ for x in r} <= {'str', 'SubcallError'}") == (
            "(96, True)"
        )
        assert other.url in alone.value("[str(x) for x in r if isinstance(x, SubcallError)][0]")
        assert machine.left_over(other), "the engine ended by itself: nothing is shown here"
    finally:
        stopped = machine.stop(other.name)

    assert stopped.returncode == 0, stopped.stderr
    assert machine.left_over(other) == []
