"""``python -m tests.vllm``: installs vLLM where it is not there, and runs the tests against it.

Where it cannot be installed they are skipped aloud: this says why, pytest counts them as skipped,
and the exit code is 0. Arguments go to pytest.
"""

from __future__ import annotations

import os
import sys

from rlm_kernel.subcalls.vllm.interpreter import PYTHON_VARIABLE
from tests.vllm.install import NotInstalled, vllm_python


def main() -> None:
    try:
        os.environ[PYTHON_VARIABLE] = str(vllm_python())
    except NotInstalled as error:
        print(f"SKIPPED: no tests against vLLM, since it is not here: {error}", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/vllm", *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
