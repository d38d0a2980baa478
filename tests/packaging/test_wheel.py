"""The wheel is all that a person needs who has no clone: kernel, command and demo are in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    subprocess.run(command, check=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a prefix of its own; its dependencies are those of this interpreter."""
    prefix = tmp_path_factory.mktemp("prefix")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--prefix", prefix]
    subprocess.run([*command, "--ignore-installed", wheel], check=True, timeout=100)
    return prefix


def run(prefix: Path, *command: str | Path) -> str:
    """Output of *command*, with the installed wheel first on every path."""
    (packages,) = prefix.glob("lib/python*/site-packages")
    environ = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "JUPYTER_PATH": str(prefix / "share" / "jupyter"),
        "PATH": f"{prefix / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        command, check=True, env=environ, cwd=prefix, capture_output=True, text=True, timeout=100
    )
    return done.stdout


def test_the_kernelspec_and_the_demo_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (spec,) = [name for name in names if name.endswith("share/jupyter/kernels/rlm/kernel.json")]
        kernel = json.loads(archive.read(spec))
    assert kernel["display_name"] == "RLM (Python)"
    assert kernel["interrupt_mode"] == "message"
    assert any(name.endswith("/needle.py") for name in names)
    assert "rlm_kernel/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_jupyter_lists_the_kernel_and_runs_the_command(installed: Path) -> None:
    listed = json.loads(run(installed, "jupyter", "kernelspec", "list", "--json"))
    where = Path(listed["kernelspecs"]["rlm"]["resource_dir"])
    assert where == installed / "share" / "jupyter" / "kernels" / "rlm"
    assert run(installed, "jupyter", "rlm", "--version").strip().endswith("0.1.0")


def test_the_installed_package_runs_a_cell(installed: Path) -> None:
    code = (
        "import rlm_kernel, asyncio\n"
        "from rlm_kernel.repl import Repl\n"
        "async def main():\n"
        "    async with await Repl.start() as repl:\n"
        "        result = (await repl.execute('import rlm_kernel; rlm_kernel.__file__')).result\n"
        "        print(result.outputs[0].data['text/plain'])\n"
        "asyncio.run(main())"
    )
    assert str(installed) in run(installed, sys.executable, "-c", code)
