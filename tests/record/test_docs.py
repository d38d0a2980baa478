"""What docs/record.md says is so: its queries run and its columns are the columns."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from rlm_kernel.engine.events import SubcallJudged, TurnDecided, TurnExecuting
from rlm_kernel.record import Record
from rlm_kernel.record.schema import APPLICATION_ID, VERSION
from tests.record import samples
from tests.record.test_crash import ROOT

DOCUMENT = (ROOT / "docs" / "record.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record in which each of the questions has an answer."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.rlm.sqlite"
    with Record.open(path) as record:
        with record.prompt_writer(samples.prompt_info(samples.LONG)) as writer:
            writer.write(samples.prompt_bytes(samples.LONG))
        for event in samples.whole_run():
            record.append(samples.RUN, event)
        judged = SubcallJudged(call_id="call-1", task="label", ok=False, reason="no choice")
        record.append(samples.RUN, judged)
        record.append("second", samples.started())
        for event in list(samples.turn())[:2]:
            record.append("second", event)
        record.append("second", TurnDecided(turn=1, action="edit", by="alice", source="x = 1"))
        record.append("second", TurnExecuting(turn=1, source="x = 1"))
        record.append("second", next(samples.subcall("under way")))
    return path


def test_there_are_queries_to_try() -> None:
    assert len(blocks("sql")) >= 8


@pytest.mark.parametrize("query", blocks("sql"), ids=lambda q: " ".join(q.split())[:40])
def test_every_query_of_the_document_has_an_answer(filled: Path, query: str) -> None:
    raw = sqlite3.connect(f"{filled.as_uri()}?mode=ro", uri=True)
    cursor = raw.execute(query)
    rows = cursor.fetchall()
    raw.close()

    assert rows
    for n, column in enumerate(cursor.description):
        assert any(row[n] is not None for row in rows), f"{column[0]} is NULL in every row"


def test_the_python_of_the_document_runs(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks("python")
    exec(program, {})

    said = capsys.readouterr().out
    assert f"{samples.RUN} answered 48213" in said
    assert "1 RunStarted" in said
    assert "run second is under way: executing" in said


def test_every_table_view_and_column_is_in_the_document_and_no_other(filled: Path) -> None:
    raw = sqlite3.connect(filled)
    schema = {
        name: [column[1] for column in raw.execute(f"PRAGMA table_info({name})")]
        for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    }
    raw.close()
    sections = DOCUMENT.partition("## What is in the file")[2].partition("## What it promises")[0]
    of_columns = set(re.findall(r"^\| (`[a-z`, _0-9]+`) \|", sections, re.MULTILINE))
    told = {name for cell in of_columns for name in re.findall(r"`(\w+)`", cell)} - schema.keys()
    tables = {name: columns for name, columns in schema.items() if name not in VIEWS}

    assert told == {column for columns in tables.values() for column in columns}
    for name in VIEWS:
        (row,) = re.findall(rf"^\| `{name}` \|[^|]*\|(.*)\|$", sections, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row) == schema[name]


VIEWS = ("runs", "trajectory", "subcalls")


def test_the_document_names_the_version_and_the_application() -> None:
    assert f"version {VERSION} (" in DOCUMENT
    assert f"0x{APPLICATION_ID:08X}" in DOCUMENT
