"""An interrupt of a cell reaches the server."""

from __future__ import annotations

from tests.vllm.conftest import RecordedKernel
from tests.vllm.servers import Server, until


def test_an_interrupt_frees_the_server_and_keeps_what_had_finished(
    kernel: RecordedKernel, server: Server
) -> None:
    """In the middle of a batch of which some were answered. The next cell is served."""
    done = server.metric("request_success_total")
    request = kernel.send(
        "r = sub_RLM([f'Tell a story about {n} ships.' for n in range(400)], max_tokens=24)"
    )
    until(lambda: server.metric("request_success_total") > done, "no call was answered")
    until(lambda: server.metric("num_requests_running") > 0, "the server is not busy")

    kernel.interrupt()
    until(lambda: server.is_idle, "the server works on", deadline_s=10)
    cell = kernel.collect(request)

    assert cell.ename == "KeyboardInterrupt"
    kept = int(kernel.value("len(sub_RLM.last.done)"))
    answered = int(kernel.value("sum(isinstance(x, str) for x in sub_RLM.last)"))
    assert 0 < answered <= kept < 400
    calls = kernel.calls()
    assert {call["state"] for call in calls} == {"done", "failed"}
    assert sum(call["state"] == "done" for call in calls) >= answered
    assert kernel.run("print(sub_RLM('Say a word.', max_tokens=2) != '')").text() == "True\n"
