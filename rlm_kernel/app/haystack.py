"""The prompt of the demo: a haystack of real source code with eight needles in it.

The haystack is the source of the running Python's standard library, without
its tests and its programs: about 11 MB in 580 files. The needles are English
sentences; between them lie others that look like them.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rlm_kernel.errors import RLMError

__all__ = ["CODES", "DECOYS", "build", "needle", "with_needles", "write_haystack"]

CODES = {
    "north": 48213,
    "east": 77120,
    "south": 30958,
    "river": 61477,
    "garden": 90321,
    "tower": 25684,
    "harbour": 83745,
    "mill": 17069,
}
"""Access code of each gate."""

DECOYS = (
    "The access code for the north gate was changed last year.",
    "The north gate opens at 7 and closes at 21.",
    "Invoice 48931 for the paint of the north gate was paid in March.",
    "The camera at the north gate has serial number 55102.",
    "Ask the porter for the access code for the north gate before 18:00.",
    "The old access code for the north gate was 11935.",
    "Nobody wrote down the access code for the north gate in 1987.",
    "Order 70216 covers new hinges for the north gate.",
    "The access code for the northern gatehouse is 66150.",
    "The access code for the north gate has five digits.",
    "The access code for the river gate was written on page 214.",
    "The mill closed in 1962, and its gate with it.",
)

_TESTS = {"test", "tests", "idle_test"}
_PROGRAMS = {"idlelib", "lib2to3", "turtledemo", "ensurepip"}
_OF_OTHERS = {"site-packages", "dist-packages", "__pycache__"}


def needle(gate: str) -> str:
    """The sentence that says the access code of *gate*."""
    return f"The access code for the {gate} gate is {CODES[gate]}."


def _files(library: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(set(folders) - _TESTS - _PROGRAMS - _OF_OTHERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def build(library: Path) -> tuple[str, int]:
    """The source files below *library* as one text with a header for each, and their number.

    Raises
    ------
    RLMError
        There are none.
    """
    parts, count = [], 0
    for path in _files(library):
        try:
            source = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # one file that is not readable here is no reason for no demo
        count += 1
        parts.append(f"===== {path.relative_to(library).as_posix()} =====\n{source}\n")
    if not parts:
        raise RLMError(
            f"there is no Python source in {library}; install the standard library's source"
        )
    return "".join(parts), count


def with_needles(haystack: str) -> str:
    """*haystack* with needles and decoys as comments between its lines, at places that depend
    on its length alone."""
    needles = [needle(gate) for gate in CODES]
    sentences = [text for pair in zip(needles, DECOYS, strict=False) for text in pair]
    sentences += DECOYS[len(needles) :]
    parts, at = [], 0
    for number, sentence in enumerate(sentences, 1):
        # Not evenly spread: what is evenly spread could be found by counting.
        share = (number + (number * 7 % 5 - 2) / 8) / (len(sentences) + 1)
        cut = haystack.find("\n", int(len(haystack) * share)) + 1
        parts += [haystack[at:cut], f"# {sentence}\n"]
        at = cut
    return "".join([*parts, haystack[at:]])


def write_haystack(path: Path) -> int:
    """Write the demo's prompt to *path*; returns the number of source files in it.

    Raises
    ------
    RLMError
        It cannot be written, or there is no source to build it from.
    """
    haystack, count = build(Path(sysconfig.get_paths()["stdlib"]))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(with_needles(haystack), "utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RLMError(
            f"the demo's prompt cannot be written to {path} ({error.strerror}); "
            "make room there, or set XDG_CACHE_HOME to another folder"
        ) from error
    return count
