"""Which GPUs there are, asked of NVIDIA's management library without importing anything large.

NVML (libnvidia-ml.so.1) comes with the driver, so it is there wherever a CUDA program runs. Its
documentation: docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

from rlm_kernel.errors import UsageError

__all__ = ["choose_gpus", "visible_gpus"]

_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that a CUDA program would see, in the words of CUDA_VISIBLE_DEVICES.

    That variable, where it is set, says which and in which order: a batch system sets it.
    """
    count = _nvml_count()
    if count is None:
        count = len(list(Path("/dev").glob("nvidia[0-9]*")))  # a container without the library
    given = environ.get(_DEVICES_VARIABLE)
    if given is None or count == 0:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in given.split(",")]
    # CUDA takes the names up to the first that is none, such as -1.
    end = next((at for at, name in enumerate(names) if not name or name == "-1"), len(names))
    return names[:end]


def choose_gpus(given: str, visible: list[str]) -> list[str]:
    """Those of *visible* that *given* names by their place: ``0-3``, ``0,2``, ``all``.

    Raises
    ------
    UsageError
        It names one that is not there, or is no such list.
    """
    if given == "all":
        return visible
    chosen: list[int] = []
    for part in given.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--gpus takes numbers as in 0-3 or 0,2, or none: {given[:60]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--gpus has a range that ends before it begins: {part.strip()}")
        chosen += range(first, last + 1)
    missing = sorted({index for index in chosen if index >= len(visible)})
    if missing:
        there = f"0-{len(visible) - 1}" if len(visible) > 1 else "0"
        raise UsageError(f"there is no GPU {missing[0]}: this machine has {there}")
    return [visible[index] for index in dict.fromkeys(chosen)]


def _nvml_count() -> int | None:
    """How many GPUs the driver has; ``None`` where its library is not there or does not work."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            count = ctypes.c_uint()
            return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
