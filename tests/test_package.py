"""What the package offers by name, and what merely importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rlm_kernel


@pytest.mark.parametrize("name", rlm_kernel.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(rlm_kernel, name)
    assert found.__name__ == name
    assert found.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rlm_kernel' has no attribute 'Nothing'"):
        rlm_kernel.Nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    """The worker and the kernel's start import it."""
    code = "import sys, rlm_kernel; print(sorted(sys.modules.keys() & set(sys.argv[1:])))"
    heavy = ["openai", "aiohttp", "IPython", "rich", "sqlite3", "msgspec"]
    ran = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr
