"""The record: what happened in a run, so that it outlives everything that made it happen.

The contract of the file:

- It is one SQLite database in WAL mode (while it is open, with ``-wal``,
  ``-shm`` and ``-lock`` beside it). ``docs/record.md`` shows it to people.
- Events are only ever appended. They are numbered from 1 without gaps.
- What `Record.commit` returned from outlives the process, whatever kills it;
  the last commits before a power cut may be lost, never the file.
- A commit is whole or has not happened. After one that failed, such as on a
  full disk, what was committed stays readable and the next one tries again.
- Texts longer than 4,096 characters, and the prompt, are stored once each,
  compressed, under the SHA-256 of their bytes. `Record.verify` derives all
  hashes again.
- One process writes; any number read, and do not hinder it.
- A file that cannot be used is refused and left as it was.

The room depends on `rlm_kernel.engine.events` and what that is made of only.
"""

from __future__ import annotations

from pathlib import Path

from rlm_kernel.record.notebook import (
    CellMeta,
    NotebookMeta,
    check_writable,
    record_path_for,
    write_notebook,
)
from rlm_kernel.record.prompts import PromptWriter
from rlm_kernel.record.store import Record, RunSummary

__all__ = [
    "CellMeta",
    "NotebookMeta",
    "PromptWriter",
    "Record",
    "RunSummary",
    "check_writable",
    "load_record",
    "record_path_for",
    "write_notebook",
]


def load_record(path: str | Path) -> Record:
    """The record at *path* for reading only, also while its run goes on in another process.

    Close it, or use it in a ``with`` statement.

    Raises
    ------
    RecordError
        There is none, it is no record, or of a newer version.
    """
    return Record.read(Path(path))
