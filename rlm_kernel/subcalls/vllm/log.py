"""What the log of a starting vLLM server tells: how far it is, and why it failed.

The lines are vLLM's own and not promised by it. So a phase that is not known is left out, and
the reason of a failure is looked for in several shapes.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["LogReader", "failure_in"]

_TAIL_BYTES = 256 << 10
_MOST_CHARS = 300

# The first that fits counts: the line of the first one tells the whole configuration too.
_PHASES = (
    (re.compile(r"Initializing a \S+ LLM engine"), "starting its engine"),
    (re.compile(r"Starting vLLM|Application startup"), "opening its port"),
    (re.compile(r"[Cc]aptur\w* CUDA ?graph|Graph capturing", re.IGNORECASE), "capturing graphs"),
    (re.compile(r"KV cache size|init engine"), "setting up its cache"),
    (
        re.compile(r"[Ww]arming up model|Dynamo bytecode|Compiling a graph|AOT compiled"),
        "compiling",
    ),
    (re.compile(r"Loading weights|Loading \w+ checkpoint|Starting to load"), "loading weights"),
    (re.compile(r"Fetching \d+ files|Downloading|download weights"), "downloading"),
    (re.compile(r"Resolved architecture|non-default args"), "reading the model"),
)

_PERCENT = re.compile(r"(\d{1,3})% Completed")

_PREFIX = re.compile(
    r"^(?:\(\w[^)]*\)\s*)*"  # which process
    r"(?:(?:ERROR|CRITICAL|WARNING|INFO)\s+(?:[\d:. -]+)?(?:\[[^\]]*\])?:?\s*)?"
)
_RAISED = re.compile(
    r"(?:[a-zA-Z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|NotFound|Interrupt|Exit)(?:: .*)?"
)
_ARGPARSE = re.compile(r"[\w. -]*: error: .*")
_OTHER = re.compile(r"(?:No module named|Killed|Segmentation fault|Fatal Python error).*")
_NO_REASON = re.compile(
    r"See root cause|root cause above|Engine core initialization failed|"
    r"EngineCore encountered an issue|WorkerProc initialization failed|KeyboardInterrupt|SystemExit"
)
"""Lines that only point to others."""

_PYDANTIC = re.compile(r"\d+ validation errors? for ")


class LogReader:
    """Follows the log at *path*."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.phase = "starting"

    def read(self) -> str:
        """The phase that the server is in, by what it has written up to now."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_TAIL_BYTES)
        except OSError:
            return self.phase
        whole = data.rpartition(b"\n")[0] if len(data) < _TAIL_BYTES else data
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._see(line)
        return self.phase

    def _see(self, line: str) -> None:
        for pattern, phase in _PHASES:
            if pattern.search(line):
                percent = _PERCENT.search(line)
                self.phase = f"{phase} ({percent[1]} %)" if percent else phase
                return


def failure_in(path: Path) -> str:
    """The last line of the log that names a reason; empty where none does."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    bare = [_PREFIX.sub("", line).strip() for line in lines]
    found = [at for at, line in enumerate(bare) if _is_reason(line)]
    telling = [at for at in found if not _NO_REASON.search(bare[at])]
    if not telling:
        return ""
    return _cut(_whole(bare, telling[-1]))


def _is_reason(line: str) -> bool:
    return any(pattern.fullmatch(line) for pattern in (_RAISED, _ARGPARSE, _OTHER))


def _whole(lines: list[str], at: int) -> str:
    """The reason at *at*; pydantic's stands in the lines below."""
    if not _PYDANTIC.search(lines[at]):
        return lines[at]
    below = next((line for line in lines[at + 1 : at + 4] if " " in line), "")
    return below.partition(" [type=")[0] or lines[at]


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"
