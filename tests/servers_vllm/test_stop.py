"""``jupyter rlm serve --stop``: the right servers, and all of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from rlm_kernel.subcalls.vllm.processes import members, process_at
from tests.servers_vllm.conftest import Bench, one_line


def test_stop_ends_server_and_engine(bench: Bench) -> None:
    (entry,) = bench.serve("org/m")
    engine = bench.engine(entry)
    done = bench.run("serve", "--stop")

    assert done.returncode == 0
    assert one_line(done.stderr) == "jupyter rlm: m (org/m) stopped"
    assert process_at(engine) is None
    assert members(entry.pid) == []
    assert bench.registry.entries() == []


def test_stop_ends_the_engine_of_a_server_that_was_killed(bench: Bench) -> None:
    """The API server is gone and its engine holds the memory: it is listed, and ended."""
    (entry,) = bench.serve("org/m")
    engine = bench.engine(entry)
    bench.kill_api_server(entry)
    assert process_at(engine) is not None
    (listed,) = bench.servers()
    table = bench.run("servers").stdout
    done = bench.run("serve", "--stop", "m")

    assert listed["state"] == "orphaned"
    assert "only the engine of m is left" in table
    assert done.returncode == 0
    assert process_at(engine) is None
    assert bench.registry.entries() == []


def test_stop_ends_a_server_that_ignores_the_request(bench: Bench) -> None:
    """As vLLM does while requests are under way: it is killed after a while."""
    (entry,) = bench.serve("stubborn/m")
    done = bench.run("serve", "--stop", "stubborn/m")

    assert done.returncode == 0
    assert members(entry.pid) == []


def test_stop_takes_a_name_a_model_a_url_or_all(bench: Bench) -> None:
    """And nothing but what was said."""
    for name in ("a", "b", "c", "d"):
        bench.serve(f"org/{name}", "--name", f"server-{name}")
    by_name = {entry.name: entry for entry in bench.look()}

    assert bench.run("serve", "--stop", "server-a").returncode == 0
    assert bench.run("serve", "--stop", "org/b").returncode == 0
    assert bench.run("serve", "--stop", by_name["server-c"].url.removesuffix("v1")).returncode == 0
    assert [entry.name for entry in bench.registry.serving()] == ["server-d"]
    assert bench.run("serve", "--stop", "all").returncode == 0
    assert bench.registry.entries() == []


def test_stop_asks_which_of_several_models(bench: Bench) -> None:
    bench.serve("org/a")
    bench.serve("org/b")
    done = bench.run("serve", "--stop")

    assert done.returncode == 2
    assert "several models are served (org/a, org/b)" in one_line(done.stderr)
    assert len(bench.registry.serving()) == 2


def test_stop_without_servers_is_no_error(bench: Bench) -> None:
    done = bench.run("serve", "--stop")

    assert done.returncode == 0
    assert one_line(done.stderr) == "jupyter rlm: no server is running"


def test_a_process_that_got_the_number_of_a_server_is_not_touched(bench: Bench) -> None:
    """A process is known by the time of its start too."""
    (entry,) = bench.serve("org/m")
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True
    )
    try:
        bench.run("serve", "--stop")
        bench.registry.add(msgspec.structs.replace(entry, pid=other.pid))
        done = bench.run("serve", "--stop", "all")

        assert "had ended before" in one_line(done.stderr)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_from_before_the_machine_was_started_again_is_dead(bench: Bench) -> None:
    """Its number may be anybody's now."""
    (entry,) = bench.serve("org/m")
    host = entry.machine.partition(" ")[0]
    bench.registry.add(msgspec.structs.replace(entry, machine=f"{host} of-another-start"))
    done = bench.run("servers")

    assert "m (org/m) has ended and is taken from the list\n" in done.stderr
    assert bench.registry.entries() == []
    assert process_at(entry.pid) is not None


def test_servers_of_another_machine_are_left_alone(bench: Bench) -> None:
    """The folder may be shared by machines."""
    (entry,) = bench.serve("org/m")
    bench.registry.add(msgspec.structs.replace(entry, name="far", machine="elsewhere x"))

    assert [listed["name"] for listed in bench.servers()] == ["m"]
    assert bench.run("serve", "--stop", "all").returncode == 0
    assert (bench.registry.folder / "far.json").exists()


def test_a_stopped_server_leaves_its_log(bench: Bench) -> None:
    """The reason of whatever was wrong is in it."""
    (entry,) = bench.serve("org/m")
    bench.run("serve", "--stop")

    assert Path(entry.log).read_text()
    assert os.listdir(bench.registry.folder) != []
