"""``jupyter rlm servers``: what it lists, and what it makes of entries that are not right."""

from __future__ import annotations

import os
import signal

import msgspec

from rlm_kernel.subcalls.vllm.processes import end_sessions
from tests.host.conftest import until
from tests.servers_vllm.conftest import Bench, one_line


def test_servers_tells_how_busy_each_is(bench: Bench) -> None:
    """From ``/metrics``; `--json` has the same in figures."""
    (entry,) = bench.serve("org/m")
    done = bench.run("servers")
    (listed,) = bench.servers()
    titles, row = done.stdout.splitlines()

    assert titles.split()[:5] == ["NAME", "MODEL", "URL", "GPU", "PID"]
    assert row.split()[:5] == ["m", "org/m", entry.url, "CPU", str(entry.pid)]
    assert "ready" in row
    assert row.endswith("80.0% of 2,000")
    assert (listed["running"], listed["waiting"], listed["kv_cache_used"]) == (3, 5, 0.25)
    assert (listed["prefix_hit_tokens"], listed["prefix_query_tokens"]) == (1600, 2000)
    assert listed["log"] == entry.log


def test_a_server_that_still_starts_is_listed_as_such(bench: Bench) -> None:
    """And is not found by kernels."""
    process = bench.start("serve", "late/m", "--gpus", "none")
    until(lambda: bool(bench.look()), "nothing was started")
    (listed,) = bench.servers()
    assert listed["state"] == "starting"
    assert bench.registry.models() == []
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)


def test_a_server_whose_command_was_killed_is_taken_for_ready(bench: Bench) -> None:
    """The list finds out what the command could not write down any more."""
    process = bench.start("serve", "late/m", "--gpus", "none")
    until(lambda: bool(bench.look()), "nothing was started")
    process.kill()
    process.communicate(timeout=100)
    bench.gate.touch()
    until(lambda: bench.servers()[0]["state"] == "ready", "the server does not get ready")

    assert bench.registry.models() == ["late/m"]


def test_a_server_that_does_not_answer_is_silent(bench: Bench) -> None:
    """Its figures are left out; the list does not wait for ever."""
    (entry,) = bench.serve("org/m")
    os.kill(entry.pid, signal.SIGSTOP)
    (listed,) = bench.servers()

    assert listed["state"] == "silent"
    assert listed["running"] is None


def test_servers_that_ended_are_told_once_and_dropped(bench: Bench) -> None:
    (entry,) = bench.serve("org/m")
    end_sessions([entry.pid])
    first, second = bench.run("servers"), bench.run("servers")

    assert f"m (org/m) has ended and is taken from the list; its log is {entry.log}" in first.stderr
    assert "no server is running" in one_line(second.stderr)


def test_files_that_are_no_entries_are_passed_over(bench: Bench) -> None:
    """Code in a cell can write into the folder: neither pipes nor other hosts are followed."""
    (entry,) = bench.serve("org/m")
    folder = bench.registry.folder
    good = msgspec.json.encode(msgspec.structs.replace(entry, name="evil", url="http://evil/v1"))
    (folder / "evil.json").write_bytes(good)
    port = msgspec.structs.replace(entry, name="port", url="http://127.0.0.1:99999/v1")
    (folder / "port.json").write_bytes(msgspec.json.encode(port))
    (folder / "other.json").write_bytes(msgspec.json.encode(entry))
    (folder / "garbage.json").write_bytes(b"\xff{")
    (folder / "deep.json").write_text('{"x":' + "[" * 100_000 + "]" * 100_000 + "}")
    (folder / "link.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.json")

    assert [listed["name"] for listed in bench.servers()] == ["m"]
    assert bench.registry.models() == ["org/m"]
