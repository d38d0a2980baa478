"""A notebook says what its runs did, and its file is whole at every moment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rlm_kernel.engine.budget import Usage
from rlm_kernel.errors import RecordError
from rlm_kernel.record import (
    CellMeta,
    NotebookMeta,
    check_writable,
    record_path_for,
    write_notebook,
)
from rlm_kernel.record.notebook import META_SCHEMA
from tests.record import samples
from tests.record.test_crash import ROOT

META = NotebookMeta(
    version="0.1.0",
    runs=[samples.RUN],
    record="run.rlm.sqlite",
    query="What is the code?",
    dialect="paper",
    root="playbook:needle.py",
    sub="embedded",
    state="answered",
    response="48213",
    turns=1,
    subcalls=2,
    usage=Usage(input_tokens=1200, output_tokens=70, calls=3),
    prompt=samples.prompt_info(samples.LONG),
)
CELL = CellMeta(
    run_id=samples.RUN,
    turn=1,
    kind="cell",
    state="failed",
    sha="0" * 64,
    sampled=False,
    decision="edit",
    by="alice",
    attempt=2,
    seconds=0.5,
    tokens=1050,
    subcalls=2,
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "run.ipynb"


def notebook(text: str = "48213\n") -> Any:
    cell = new_code_cell("print(code)", outputs=[new_output("stream", name="stdout", text=text)])
    cell.metadata["rlm"] = CELL.to_dict()
    made = new_notebook(cells=[new_markdown_cell("I look."), cell])
    made.metadata["rlm"] = META.to_dict()
    return made


def test_metadata_comes_back_from_a_file_as_it_was(target: Path) -> None:
    write_notebook(notebook(), target)
    found = nbformat.read(target, 4)
    nbformat.validate(found)

    assert NotebookMeta.from_dict(found.metadata["rlm"]) == META
    assert CellMeta.from_dict(found.cells[1].metadata["rlm"]) == CELL
    assert found.cells[1].outputs[0].text == "48213\n"


def test_metadata_is_plain_json_and_names_its_version() -> None:
    assert json.loads(json.dumps(META.to_dict())) == META.to_dict()
    assert META.to_dict()["schema"] == META_SCHEMA


def test_a_field_of_a_later_rlm_kernel_is_passed_over() -> None:
    assert CellMeta.from_dict({**CELL.to_dict(), "later": 1}) == CELL


@pytest.mark.parametrize(
    "found",
    [None, [], "run", {"kind": "cell", "turn": 1}, {**CELL.to_dict(), "turn": "one"}],
)
def test_metadata_that_somebody_broke_is_refused_in_a_sentence(found: Any) -> None:
    with pytest.raises(RecordError, match=r"metadata.rlm of the notebook cannot be read"):
        CellMeta.from_dict(found)


def test_metadata_of_a_newer_version_is_refused() -> None:
    with pytest.raises(RecordError, match="update rlm-kernel"):
        NotebookMeta.from_dict({"schema": META_SCHEMA + 1})


@pytest.mark.parametrize(
    ("notebook_name", "record_name"),
    [
        ("run.ipynb", "run.rlm.sqlite"),
        ("a.b.ipynb", "a.b.rlm.sqlite"),
        ("notes", "notes.rlm.sqlite"),
        ("notes.md", "notes.md.rlm.sqlite"),
    ],
)
def test_the_record_lies_beside_its_notebook(notebook_name: str, record_name: str) -> None:
    assert record_path_for(Path("folder") / notebook_name) == Path("folder") / record_name


def test_any_text_is_written_so_that_it_is_read_as_it_was(target: Path) -> None:
    write_notebook(notebook("é😀\ud800\x1b[31m\u2028\n"), target)

    assert nbformat.read(target, 4).cells[1].outputs[0].text == "é😀\ud800\x1b[31m\u2028\n"


def test_a_notebook_that_is_not_valid_is_not_written(target: Path) -> None:
    write_notebook(notebook(), target)
    before = target.read_bytes()
    broken = notebook()
    broken.cells[1].outputs.append({"output_type": "nonsense"})

    with pytest.raises(RecordError, match="not valid") as refusal:
        write_notebook(broken, target)
    assert "\n" not in str(refusal.value)
    assert target.read_bytes() == before
    assert os.listdir(target.parent) == [target.name]


def test_an_existing_file_keeps_its_mode_and_a_new_one_gets_the_usual(target: Path) -> None:
    usual = target.with_name("usual")
    usual.touch()
    write_notebook(notebook(), target)
    assert target.stat().st_mode == usual.stat().st_mode

    target.chmod(0o640)
    write_notebook(notebook(), target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_symbolic_link_stays_one_and_its_target_is_written(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name, exists in (("there.ipynb", True), ("not yet.ipynb", False)):
        real = folder / name
        if exists:
            real.write_text("old")
        target.unlink(missing_ok=True)
        target.symlink_to(real)

        write_notebook(notebook(), target)

        assert target.is_symlink()
        assert nbformat.read(real, 4).cells


def test_the_longest_name_will_do(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 249 + ".ipynb")
    write_notebook(notebook(), target)

    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p.mkdir(), "it is a folder; choose another path"),
        (os.mkfifo, "it is not an ordinary file; choose another path"),
        (lambda p: p.symlink_to(p.parent / "missing" / "x"), "no such file or directory"),
        (lambda p: p.symlink_to(p), "choose another path"),
    ],
    ids=["folder", "pipe", "link to a missing folder", "link to itself"],
)
def test_a_path_that_cannot_be_written_is_refused_before_and_when_writing(
    target: Path, make: Any, said: str
) -> None:
    make(target)
    for attempt in (lambda: check_writable(target), lambda: write_notebook(notebook(), target)):
        with pytest.raises(RecordError, match=said) as refusal:
            attempt()
        assert str(refusal.value).startswith(f"cannot write the notebook {target}: ")
        assert os.listdir(target.parent) == [target.name]


def test_finding_out_whether_a_path_can_be_written_leaves_no_trace(target: Path) -> None:
    check_writable(target)
    assert os.listdir(target.parent) == []

    target.write_text("old")
    check_writable(target)
    assert os.listdir(target.parent) == [target.name]
    assert target.read_text() == "old"


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from rlm_kernel.record import check_writable
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    check_writable(Path(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(("file", "folder"), [(0o444, 0o777), (0o666, 0o555)])
def test_a_file_or_folder_that_is_read_only_is_refused(
    tmp_path: Path, file: int, folder: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    target = place / "run.ipynb"
    target.touch()
    target.chmod(file)
    place.chmod(folder)
    for parent in place.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    place.chmod(0o755)

    assert done.stdout.startswith(f"RecordError: cannot write the notebook {target}: ")


LIMITED = """
import resource, sys
from pathlib import Path
from rlm_kernel.record import write_notebook
from tests.record.test_notebook import notebook
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    write_notebook(notebook("x" * 1_000_000), Path(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_disk_without_room_leaves_the_old_notebook_whole(target: Path) -> None:
    write_notebook(notebook(), target)
    before = target.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith(f"RecordError: cannot write the notebook {target}: ")
    assert done.stdout.endswith("make room there\n")
    assert target.read_bytes() == before
    assert os.listdir(target.parent) == [target.name]


def test_a_reader_never_finds_half_a_notebook(target: Path) -> None:
    write_notebook(notebook(), target)
    found: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found.append(len(json.loads(target.read_bytes())["cells"]))

    reader = threading.Thread(target=read)
    reader.start()
    for size in range(0, 2_000_000, 100_000):
        write_notebook(notebook("x" * size), target)
    done.set()
    reader.join()

    assert set(found) == {2}
