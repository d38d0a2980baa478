"""Kernels and programs find the servers that run, and ask them without a key."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlm_kernel import RLM
from rlm_kernel.engine.chat_root import ChatRoot
from rlm_kernel.errors import UsageError
from rlm_kernel.session.models import Models, is_spec
from rlm_kernel.session.settings import Settings
from rlm_kernel.subcalls.fleet.fleet import Fleet
from rlm_kernel.subcalls.vllm.ports import PortKeeper
from tests.host.conftest import until
from tests.servers_vllm.conftest import SECRET, Bench

ASK = "# %%\nFinal = sub_RLM('Say something.')\n"


def models_of(bench: Bench, **environ: str) -> Models:
    return Models({**bench.environ, **environ})


def answer_of(bench: Bench, *, cells: str = ASK, sub: str = "vllm") -> str:
    """What a run answers whose root is a playbook of *cells*."""
    playbook = bench.folder / "cells.py"
    playbook.write_text(cells)
    rlm = RLM(
        root=f"playbook:{playbook}",
        sub=sub,
        record=bench.folder / "run.rlm.sqlite",
        environ=bench.environ,
    )
    return rlm.completion("a text", query="a question").response


def test_the_only_model_that_is_served_answers_sub_calls(bench: Bench) -> None:
    """Where nothing was chosen; and it gets no key."""
    (entry,) = bench.serve("org/m")

    assert answer_of(bench, sub="") == f"from {entry.port}"
    assert SECRET.encode() not in (bench.folder / "run.rlm.sqlite").read_bytes()


def test_a_choice_goes_before_what_is_found(bench: Bench) -> None:
    """RLM_SUB, or a root that is a chat model."""
    bench.serve("org/m")
    models = models_of(bench)

    assert models.sub_spec(Settings(sub="embedded")).kind == "embedded"
    assert str(models.sub_spec(Settings(root="openai:x@http://h"))) == "openai:x@http://h/v1"
    assert str(models.sub_spec(Settings(root="human"))) == "vllm:org/m"
    assert str(models.sub_spec(Settings())) == "vllm:org/m"


def test_several_models_are_named_and_none_is_chosen(bench: Bench) -> None:
    bench.serve("org/a")
    bench.serve("org/b")
    models = models_of(bench)

    with pytest.raises(UsageError, match=r"no model .* \(running here: vllm:org/a, vllm:org/b\)"):
        models.sub_spec(Settings())
    with pytest.raises(UsageError, match="choose one of vllm:org/a, vllm:org/b"):
        models.sub_spec(Settings(sub="vllm"))
    assert str(models.sub_spec(Settings(sub="vllm:org/b"))) == "vllm:org/b"
    assert models.sub_name(Settings()) == ""


def test_a_model_that_nobody_serves_is_told_before_a_run(bench: Bench) -> None:
    """As root and as sub, with what is served and how to serve it."""
    bench.serve("org/a")
    models = models_of(bench)

    with pytest.raises(UsageError, match=r"no server of org/z is running here \(vllm:org/a\)"):
        models.sub_spec(Settings(sub="vllm:org/z"))
    with pytest.raises(UsageError, match="jupyter rlm serve org/z"):
        models.check_root("vllm:org/z")
    with pytest.raises(UsageError, match="no server of org/z"):
        RLM(root="human", sub="vllm:org/z", environ=bench.environ)


def test_nothing_that_is_served_is_told_too(bench: Bench) -> None:
    models = models_of(bench)

    with pytest.raises(UsageError, match="no model for sub-calls is chosen: give"):
        models.sub_spec(Settings())
    with pytest.raises(UsageError, match="no server is running here: start one"):
        models.check_root("vllm")
    with pytest.raises(UsageError, match=r"no server of m is running here \(nothing is served\)"):
        models.check_root("vllm:m")


async def test_a_served_model_is_a_root_too(bench: Bench) -> None:
    """Roots take turns on the servers of a model, and name the one that they ask."""
    first = bench.serve("org/m")
    both = bench.serve("org/m")
    assert len(first) == 1
    models = models_of(bench)
    roots = [await models.root(spec, "q") for spec in ("vllm:org/m", "vllm", "vllm:org/m")]
    urls = []
    for root in roots:
        assert isinstance(root, ChatRoot)
        urls.append(root.base_url)
        assert root.name == f"vllm:org/m@{root.base_url}"
        await root.close()

    assert urls == [both[0].url, both[1].url, both[0].url]


async def test_children_of_a_root_on_local_servers_have_such_roots(bench: Bench) -> None:
    bench.serve("org/m")
    models = models_of(bench)

    assert models.child_settings(Settings(root="vllm:org/m"), None).root == "vllm:org/m"
    assert models.child_settings(Settings(root="human"), None).root == "vllm:org/m"
    assert is_spec("vllm:org/m")
    assert is_spec("vllm")
    assert is_spec("embedded")
    assert not is_spec("vllm-model")
    assert not is_spec("embedded-gemma")


def test_code_alone_may_ask_local_servers_and_no_others(bench: Bench) -> None:
    """A list of URLs is as any other: each of them has to be named by a person."""
    (entry,) = bench.serve("org/m")
    listed = f"vllm:org/m@{entry.url},http://evil.example/v1"
    answer = answer_of(
        bench,
        cells=(
            f"# %%\nok = sub_RLM('x', model='vllm:org/m')\n"
            f"try:\n    sub_RLM(['x'], model='{listed}')\n"
            f"except Exception as error:\n    Final = f'{{ok}} / {{error}}'\n"
        ),
    )

    assert answer.startswith(f"from {entry.port} / ")
    assert "was named by code alone" in answer


def test_every_server_of_a_list_gets_the_key_that_is_its_own(bench: Bench) -> None:
    """One that the environment names gets it, one that a cell names gets none."""
    models = models_of(bench, RLM_SUB="vllm:m@http://a.local,https://b.example")
    models.name("sub_RLM('x', model='openai:m@http://a.local,http://c.local')")

    models.check_root("vllm:m@https://b.example,http://c.local")
    with pytest.raises(UsageError, match=r"http://d\.example/v1 was named by code alone"):
        models.check_root("vllm:m@https://b.example,http://d.example")


def test_a_server_that_was_started_again_elsewhere_is_found_again(bench: Bench) -> None:
    """In the middle of a run, by calls that find their server gone."""
    (entry,) = bench.serve("org/m")
    asked, moved = bench.folder / "asked", bench.folder / "moved"
    cells = f"""\
# %%
import pathlib, time
before = sub_RLM("one")
pathlib.Path({str(asked)!r}).touch()
while not pathlib.Path({str(moved)!r}).exists():
    time.sleep(0.05)
Final = before + ", " + sub_RLM("two")
"""
    with ThreadPoolExecutor() as threads, PortKeeper() as ports:
        answer = threads.submit(answer_of, bench, cells=cells, sub="vllm:org/m")
        until(lambda: asked.exists() or answer.done(), "the first call was not made")
        bench.finish(bench.start("serve", "--stop"))
        ports.keep(1, entry.port)
        (again,) = bench.serve("org/m")
        moved.touch()

        assert answer.result() == f"from {entry.port}, from {again.port}"
        assert again.port != entry.port


def test_a_fleet_of_servers_answers_a_batch(bench: Bench) -> None:
    """All servers of a model work."""
    entries = [*bench.serve("org/m", "--name", "a"), *bench.serve("org/m", "--name", "b")]
    cells = "# %%\nFinal = ' '.join(sorted(set(sub_RLM([f'{i} prompt' for i in range(64)]))))\n"

    assert answer_of(bench, cells=cells) == " ".join(
        sorted({f"from {entry.port}" for entry in entries})
    )


async def test_servers_that_come_later_take_part(bench: Bench) -> None:
    """In the next batch; and where all are gone the calls still have somewhere to wait."""
    models, settings = models_of(bench), Settings(sub="vllm:org/m")
    first = [entry.url for entry in bench.serve("org/m")]
    one = models.sub(settings, None)
    assert isinstance(one, Fleet)
    assert one.urls == first
    assert models.sub(settings, None) is one

    urls = [entry.url for entry in bench.serve("org/m")]
    both = models.sub(settings, None)
    assert isinstance(both, Fleet)
    assert sorted(both.urls) == sorted(urls)
    assert len(urls) == 2

    bench.run("serve", "--stop")
    assert models.sub(settings, None) is both
    await models.close()


def test_dead_servers_are_not_found(bench: Bench) -> None:
    (entry,) = bench.serve("org/m")
    os.kill(entry.pid, signal.SIGKILL)
    until(lambda: not entry.alive, "the server lives on")

    assert bench.registry.models() == []
    with pytest.raises(UsageError, match="nothing is served"):
        models_of(bench).check_root("vllm:org/m")


def test_looking_for_servers_makes_nothing(bench: Bench) -> None:
    """A kernel leaves no folder behind where none was served."""
    assert models_of(bench).sub_name(Settings()) == ""
    assert not Path(bench.environ["RLM_RUNTIME_DIR"]).exists()
