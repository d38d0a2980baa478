"""Prompts are read from files in whatever encoding, and bad files are told in one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlm_kernel.errors import PromptError
from rlm_kernel.prompts import (
    Prompt,
    check_prompt,
    describe,
    encoded,
    read_prompt,
    read_text,
)

TEXT = "Zürich, 10 €: “naïve” café\r\nsecond line\n"

any_text = st.text(st.characters(exclude_categories=()))


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "cp1252"],
)
def test_encodings_that_are_told_apart(tmp_path: Path, encoding: str) -> None:
    """With and without a byte order mark; line ends stay as they are."""
    path = tmp_path / "text"
    path.write_bytes(TEXT.encode(encoding))
    assert read_text(path) == TEXT


def test_marks_of_big_endian_files(tmp_path: Path) -> None:
    """The byte order that the mark tells is used."""
    for encoding in ("utf-16-be", "utf-32-be"):
        path = tmp_path / encoding
        path.write_bytes(("\ufeff" + TEXT).encode(encoding))
        assert read_text(path) == TEXT


def test_stray_bytes_in_utf8_are_kept_visible(tmp_path: Path) -> None:
    """One bad byte in a long text does not turn the rest into another encoding."""
    path = tmp_path / "log"
    path.write_bytes(("漢字 und Öl\n" * 100_000).encode() + b"\xff\n" + "é".encode() * 10)
    text = read_text(path)
    assert "\\xff\n" in text
    assert text.startswith("漢字 und Öl\n")
    assert text.endswith("é" * 10)


@pytest.mark.parametrize(
    "data",
    [
        b"\x7fELF\x02\x01\x01\x00\x00",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
        os.urandom(20_000).replace(b"\0", b"\1"),
        bytes(range(1, 32)) * 50,
        "漢字かな交じり文".encode("shift_jis") * 50,
        b"\xff\xfe\x00\xd8",
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    """In one line that names the file and says what to do."""
    path = tmp_path / "data"
    path.write_bytes(data)
    with pytest.raises(PromptError) as caught:
        read_text(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert "convert" in message


def test_missing_empty_unreadable_and_no_file(tmp_path: Path) -> None:
    """Each is told as what it is."""
    empty = tmp_path / "empty"
    empty.touch()
    for path, word in [
        (tmp_path / "nothing", "no file"),
        (empty, "empty"),
        (Path("/dev/zero"), "device"),
        (empty / "below", "cannot be read"),
    ]:
        with pytest.raises(PromptError, match=word):
            read_text(path)
    with pytest.raises(PromptError, match="folder"):
        read_text(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Nobody writes to it: to open it would wait for ever. Among other files it is left out."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PromptError, match="is a pipe"):
        read_text(tmp_path / "pipe")
    (tmp_path / "text").write_text("x\n")
    found = read_prompt(str(tmp_path))
    assert (found.files, found.skipped) == (1, 1)


def test_standard_input_may_be_a_pipe() -> None:
    """It has somebody who writes, or is at its end."""
    code = "from rlm_kernel.prompts import read_text; print(read_text('/dev/stdin'))"
    ran = subprocess.run(
        [sys.executable, "-c", code], input="piped", capture_output=True, text=True
    )
    assert ran.stdout == "piped\n", ran.stderr


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    """The reason of the system is in the message; root, who may read anything, steps down."""
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with as_ordinary_user(), pytest.raises(PromptError, match="permission denied"):
        read_text(path)


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """The effective user of this process is not root meanwhile."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


def test_files_without_a_size(tmp_path: Path) -> None:
    """As those of /proc, are read to their end."""
    assert "VmPeak" in read_text("/proc/self/status")


@pytest.mark.parametrize(
    "value", [["a", "b"], {"a": "1", "b": "2"}, "a JSON string", ["a", 1], {"a": {"b": 1}}, 5]
)
def test_json_files(tmp_path: Path, value: object) -> None:
    """A list or dict of str becomes that, a str too; any other JSON stays text."""
    path = tmp_path / "data.JSON"
    path.write_text(json.dumps(value))
    got = read_prompt(str(path)).value
    is_prompt = value in (["a", "b"], {"a": "1", "b": "2"}, "a JSON string")
    assert got == (value if is_prompt else json.dumps(value))


def test_a_folder_becomes_one_text(tmp_path: Path) -> None:
    """In order, with a header for each file; hidden and binary files are left out."""
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.md").write_text("one\n")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    found = read_prompt(str(tmp_path))
    assert found.value == "===== a.md =====\none\n===== b/2.txt =====\ntwo\n"
    assert (found.files, found.skipped, found.source) == (2, 1, str(tmp_path))


def test_a_glob(tmp_path: Path) -> None:
    """`**` goes into folders; a file whose very name looks like a glob is that file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.py").write_text("x = 1\n")
    (tmp_path / "y.py").write_text("y = 1\n")
    (tmp_path / "z.txt").write_text("z")
    found = read_prompt(f"{tmp_path}/**/*.py")
    assert found.files == 2
    assert isinstance(found.value, str)
    assert "x.py =====\nx = 1\n" in found.value
    assert "z" not in found.value.replace(str(tmp_path), "")
    (tmp_path / "odd[1].txt").write_text("odd")
    assert read_prompt(f"{tmp_path}/odd[1].txt").value == "odd"


def test_nothing_to_read(tmp_path: Path) -> None:
    """An empty folder, a glob that matches nothing, and a folder of binary files."""
    for spec in (str(tmp_path), f"{tmp_path}/*.txt"):
        with pytest.raises(PromptError, match="no file"):
            read_prompt(spec)
    (tmp_path / "b").write_bytes(b"\0\1")
    with pytest.raises(PromptError, match="none is text"):
        read_prompt(str(tmp_path))


@given(any_text | st.lists(any_text, max_size=5) | st.dictionaries(any_text, any_text, max_size=5))
def test_a_prompt_as_bytes_is_whole(prompt: Prompt) -> None:
    """What goes over the link, and is hashed, can be read back exactly."""
    data = b"".join(encoded(prompt))
    text = data.decode("utf-8", "surrogatepass")
    back = text if isinstance(prompt, str) else json.loads(text)
    assert back == prompt
    if isinstance(prompt, dict):
        assert list(back) == list(prompt)
    info = describe(prompt, "here")
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert info.source == "here"
    parts = (
        [prompt]
        if isinstance(prompt, str)
        else list(prompt.values() if isinstance(prompt, dict) else prompt)
    )
    assert (info.items, info.chars) == (len(parts), sum(map(len, parts)))


@pytest.mark.parametrize(
    "value", [5, None, b"bytes", ["a", 1], {"a": 1}, {1: "a"}, ("a",), [["a"]]]
)
def test_what_is_no_prompt(value: object) -> None:
    """The message names the type that is wrong."""
    with pytest.raises(PromptError, match=r"type|not "):
        check_prompt(value)
