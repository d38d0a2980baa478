"""Prompts: what may be one, its description, and reading it from files.

A prompt is a ``str``, or a list of ``str``, or a dict of ``str`` to ``str``. It
may have a gigabyte, so nothing here makes a whole copy that it can avoid.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlm_kernel.cells import PromptInfo
from rlm_kernel.errors import PromptError
from rlm_kernel.text import escape_surrogates

__all__ = [
    "PREVIEW",
    "FilePrompt",
    "Prompt",
    "PromptKind",
    "check_prompt",
    "describe",
    "encoded",
    "read_prompt",
    "read_text",
]

PromptKind = Literal["str", "list", "dict"]
Prompt = str | list[str] | dict[str, str]

PREVIEW = 1000
"""Characters in `PromptInfo.preview`."""

_SLICE = 1 << 18
"""Characters encoded at once."""

_SAMPLE = 1 << 16
"""Bytes looked at to tell text from binary, and one encoding from another."""


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt that was read from files."""

    value: Prompt
    source: str
    """What was asked for."""

    files: int
    """Read."""

    skipped: int = 0
    """Left out, since they are binary, empty or cannot be read."""


def check_prompt(value: object) -> Prompt:
    """*value*, if it can be a prompt.

    Raises
    ------
    PromptError
        It is of another type, or holds items that are no ``str``.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        _check_items(value, "an item of the list")
        return value
    if isinstance(value, dict):
        _check_items(value.keys(), "a key of the dict")
        _check_items(value.values(), "an item of the dict")
        return value
    raise PromptError(
        f"a prompt is a str, or a list or dict of str, not {type(value).__name__}; "
        "convert it, such as with str() or json.dumps()"
    )


def _check_items(items: Iterable[object], what: str) -> None:
    for item in items:
        if not isinstance(item, str):
            raise PromptError(f"{what} is of type {type(item).__name__}; in a prompt all are str")


def kind_of(prompt: Prompt) -> PromptKind:
    """Which of the three a prompt is."""
    if isinstance(prompt, str):
        return "str"
    return "list" if isinstance(prompt, list) else "dict"


def encoded(prompt: Prompt) -> Iterator[bytes]:
    """A prompt as bytes, in pieces of about 1 MiB.

    A ``str`` as UTF-8, a list or dict as JSON in its own order with ``,`` and ``:``
    as separators and no escapes for non-ASCII characters. Lone surrogates pass
    through both. `PromptInfo.sha256` is the hash of these bytes.
    """
    if isinstance(prompt, str):
        yield from _slices(prompt)
    elif isinstance(prompt, list):
        yield from _joined("[", (_json(item) for item in prompt), "]")
    else:
        pairs = (f"{_json(key)}:{_json(item)}" for key, item in prompt.items())
        yield from _joined("{", pairs, "}")


def _slices(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _SLICE):
        yield text[start : start + _SLICE].encode("utf-8", "surrogatepass")


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _joined(opening: str, items: Iterator[str], closing: str) -> Iterator[bytes]:
    """Many small items become few pieces, and a long one several."""
    held, size, comma = [opening], 1, ""
    for item in items:
        held.append(comma + item)
        size += len(item) + 1
        comma = ","
        if size >= _SLICE:
            yield from _slices("".join(held))
            held, size = [], 0
    yield from _slices("".join([*held, closing]))


def describe(prompt: Prompt, source: str = "") -> PromptInfo:
    """What can be told of *prompt* without showing it; takes one pass over it."""
    digest = hashlib.sha256()
    for piece in encoded(prompt):
        digest.update(piece)
    if isinstance(prompt, str):
        items, chars, first = 1, len(prompt), prompt
    else:
        parts = prompt if isinstance(prompt, list) else list(prompt.values())
        items, chars, first = len(parts), sum(map(len, parts)), parts[0] if parts else ""
    return PromptInfo(
        kind=kind_of(prompt),
        chars=chars,
        items=items,
        sha256=digest.hexdigest(),
        preview=escape_surrogates(first[:PREVIEW]),
        source=source,
    )


# --- files ------------------------------------------------------------------------------------


def read_prompt(spec: str) -> FilePrompt:
    """The prompt in a file, a folder or the files that a glob matches.

    A folder or glob becomes one text, each file under a line
    ``===== path =====``; hidden files and folders are left out, and so are
    files that are no text. A ``.json`` file that holds a list or dict of ``str``
    becomes that; any other file is text.

    Raises
    ------
    PromptError
        There is no such file, it cannot be read, or there is no text in it.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return _read_many(spec, path, _walk(path))
    if not path.exists() and glob.has_magic(spec):
        names = sorted(glob.glob(str(path), recursive=True))
        found = [Path(name) for name in names if not _hidden(Path(name), path)]
        return _read_many(spec, None, (name for name in found if name.is_file()))
    text = read_text(path)
    if path.suffix.lower() == ".json":
        return FilePrompt(_from_json(text), spec, 1)
    return FilePrompt(text, spec, 1)


def _hidden(path: Path, pattern: Path) -> bool:
    asked = set(pattern.parts)
    return any(part.startswith(".") and part not in asked for part in path.parts)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name != "__pycache__"
        )
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(place, name)


def _read_many(spec: str, folder: Path | None, paths: Iterator[Path]) -> FilePrompt:
    parts: list[str] = []
    files = skipped = 0
    for path in paths:
        try:
            text = read_text(path)
        except PromptError:
            skipped += 1
            continue
        name = path.relative_to(folder) if folder else path
        parts += (f"===== {name} =====\n", text, "" if text.endswith("\n") else "\n")
        files += 1
    if not files:
        found = f"of the {skipped} files in it none is text" if skipped else "no file is there"
        raise PromptError(f"no prompt could be read from {spec}: {found}; give another path")
    return FilePrompt("".join(parts), spec, files, skipped)


def _from_json(text: str) -> Prompt:
    try:
        return check_prompt(json.loads(text))
    except (ValueError, RecursionError):  # a PromptError is a ValueError too
        return text


def read_text(path: str | Path) -> str:
    """The text of a file, line ends as they are.

    UTF-8 is tried first, then what a byte order mark says, then UTF-16 and the
    one-byte encoding Windows-1252 where the bytes look like it. Stray bytes in
    what else is UTF-8 are kept as ``\\xNN``.

    Raises
    ------
    PromptError
        The file is missing, unreadable, empty, binary, or in an encoding that
        cannot be told.
    """
    path = Path(path).expanduser()
    try:
        if os.fspath(path) != "/dev/stdin":
            _check_kind(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size and path.is_file():
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as held:
                    text = _decode(held, path)
            else:
                # Standard input, or a file of /proc: its size is only known at its end.
                text = _decode(file.read(), path)
    except FileNotFoundError:
        raise PromptError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        raise PromptError(f"{path} is a folder where a file was expected") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PromptError(f"the file {path} cannot be read: {reason}") from None
    if not text:
        raise PromptError(f"the file {path} is empty; give one with text")
    return text


def _check_kind(path: Path) -> None:
    if path.is_char_device():
        raise PromptError(f"{path} is a device, not a file; give a file with text")
    if path.is_fifo():  # to open it would wait for somebody who writes, for ever
        raise PromptError(f"{path} is a pipe, not a file; write its content to a file first")


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as that of UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

_NO_TEXT = bytes(range(9)) + b"\x7f"

_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\f\b\x1b\x1a") + b"\x7f"


def _decode(data: mmap.mmap | bytes, path: Path) -> str:
    head = data[:_SAMPLE]
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return _decode_marked(data, len(mark), encoding, path)
    if b"\0" in head:
        encoding = _utf16_kind(head)
        if not encoding:
            raise PromptError(f"the file {path} is binary, not text; convert it to text first")
        return _decode_marked(data, 0, encoding, path)
    if len(head.translate(None, _CONTROL)) < 0.99 * len(head):
        raise PromptError(f"the file {path} is binary, not text; convert it to text first")
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        return _decode_other(data, error.start, path)


def _decode_marked(data: mmap.mmap | bytes, skip: int, encoding: str, path: Path) -> str:
    try:
        with memoryview(data) as view, view[skip:] as rest:
            return str(rest, encoding)
    except UnicodeDecodeError:
        raise PromptError(
            f"the file {path} begins as {encoding.upper()} but is not; "
            "convert it to UTF-8 with iconv"
        ) from None


def _utf16_kind(head: bytes) -> str:
    """UTF-16 without a mark: every other byte of Western text is zero."""
    even, odd = head[::2], head[1::2]
    for encoding, high, low in (("utf-16-le", odd, even), ("utf-16-be", even, odd)):
        if high.count(0) > 0.5 * len(high) and len(low.translate(None, _NO_TEXT)) == len(low):
            return encoding
    return ""


def _decode_other(data: mmap.mmap | bytes, bad: int, path: Path) -> str:
    """Not UTF-8 throughout. Decided by what stands around the first byte that is wrong."""
    start = max(0, bad - _SAMPLE)
    sample = data[start : bad + _SAMPLE]
    if _mostly_utf8(sample):
        return str(data, "utf-8", "backslashreplace")
    high = sum(byte >= 0x80 for byte in sample)
    if len(sample.translate(None, _CONTROL)) < len(sample) or high > 0.35 * len(sample):
        raise PromptError(
            f"the encoding of {path} cannot be told; convert it to UTF-8, "
            "such as with iconv -f ENCODING -t UTF-8"
        )
    try:
        return str(data, "cp1252")
    except UnicodeDecodeError:
        return str(data, "latin-1")


def _mostly_utf8(sample: bytes) -> bool:
    text = sample.decode("utf-8", "replace")
    bad = text.count("\N{REPLACEMENT CHARACTER}")
    good = sum(character >= "\x80" for character in text) - bad
    return good > 10 * bad
