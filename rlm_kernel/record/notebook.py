"""A run in a notebook file: the metadata of notebook and cells, and writing it whole or not at all.

What is under ``metadata.rlm`` is enough to show a trajectory without its
record, and to find the record. nbformat is imported only where a notebook is
checked: it costs more than everything else here together.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from rlm_kernel.cells import PromptInfo
from rlm_kernel.engine.budget import Usage
from rlm_kernel.engine.events import Action, RunState
from rlm_kernel.errors import RecordError

if TYPE_CHECKING:
    from nbformat import NotebookNode

__all__ = [
    "KEY",
    "META_SCHEMA",
    "CellMeta",
    "CellState",
    "NotebookMeta",
    "check_writable",
    "record_path_for",
    "write_notebook",
]

KEY = "rlm"
"""Where our metadata lies in that of a notebook or cell."""

META_SCHEMA = 1
"""Version of the structs below. Fields are only ever added, so older readers go on working."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

CellState = Literal["open", "proposed", "running", "done", "failed", "skipped"]
"""``open``: the root still writes it. ``failed``: it ran and raised."""


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept under `KEY`."""

    def to_dict(self) -> dict[str, Any]:
        """The metadata as JSON has it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_dict(cls, found: object) -> Self:
        """What *found* in a notebook says.

        Raises
        ------
        RecordError
            It is of a newer version, or was changed so that it cannot be read.
        """
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise RecordError(
                f"metadata.{KEY} of the notebook cannot be read ({error}); "
                "remove it there to go on without"
            ) from None


class NotebookMeta(_Meta, frozen=True, kw_only=True):
    """What a notebook says about the runs in it; the state is that of the last one."""

    schema: int = META_SCHEMA
    version: str = ""
    """Of rlm-kernel."""

    runs: list[str] = []
    """Ids, oldest first; child runs are found in the record only."""

    record: str = ""
    """Path of the record, relative to the notebook's folder where it lies beside it."""

    query: str = ""
    dialect: str = ""
    root: str = ""
    """Spec, without its key."""

    sub: str = ""
    """Spec, without its key."""

    state: RunState = "idle"
    reason: str = ""
    """Why the run stopped or failed."""

    response: str = ""
    """The answer as text."""

    turns: int = 0
    subcalls: int = 0
    usage: Usage = Usage()
    prompt: PromptInfo | None = None

    @classmethod
    def from_dict(cls, found: object) -> Self:
        """As `_Meta.from_dict`, and refused where a newer rlm-kernel wrote it."""
        meta = super().from_dict(found)
        if meta.schema > META_SCHEMA:
            raise RecordError(
                f"metadata.{KEY} of the notebook is of version {meta.schema} and this rlm-kernel "
                f"reads up to {META_SCHEMA}; update rlm-kernel"
            )
        return meta


class CellMeta(_Meta, frozen=True, kw_only=True, omit_defaults=True):
    """What a cell says about the turn that it belongs to."""

    run_id: str
    turn: int
    kind: Literal["prose", "cell", "answer"]
    state: CellState = "done"
    sha: str = ""
    """SHA-256 of the UTF-8 of the source, as hex, when the run last wrote or ran it."""

    sampled: bool = True
    """False where a person or a playbook wrote the source."""

    decision: Action | None = None
    by: str = ""
    """Who decided: ``policy`` or the name of a client."""

    attempt: int = 1
    seconds: float = 0.0
    """From handing the cell to the REPL to its end."""

    tokens: int = 0
    """Of the root, for this turn: input and output."""

    subcalls: int = 0


def record_path_for(notebook: Path) -> Path:
    """Where the record of *notebook* lies: ``run.rlm.sqlite`` beside ``run.ipynb``."""
    name = notebook.stem if notebook.suffix == ".ipynb" else notebook.name
    return notebook.with_name(f"{name}.rlm.sqlite")


def check_writable(path: Path) -> None:
    """Find out, before a run is paid for, whether a notebook can be written to *path*.

    Raises
    ------
    RecordError
        It cannot; the message says why and what to do. Nothing is left behind.
    """
    with _reporting(path):
        target = _target(path)
        descriptor, temporary = _open_temporary(target)
        os.close(descriptor)
        temporary.unlink()


def write_notebook(nb: NotebookNode, path: Path) -> None:
    """Write *nb* to *path*, all of it or nothing: a reader finds the old file or the new one.

    The mode of an existing file is kept, and a symbolic link stays one: its
    target is replaced.

    Raises
    ------
    RecordError
        *nb* is no valid notebook, or *path* cannot be written. The old file is as it was.
    """
    body = _serialised(nb)
    with _reporting(path):
        target = _target(path)
        descriptor, temporary = _open_temporary(target)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                _keep_mode(file.fileno(), target)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(target.parent)


def _serialised(nb: NotebookNode) -> bytes:
    from nbformat import ValidationError, validate
    from nbformat.v4 import writes

    try:
        validate(nb)
    except ValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise RecordError(
            f"the notebook was not written because it is not valid ({reason}); "
            "correct or remove the cell that it names"
        ) from None
    # Lone surrogates have no UTF-8; their backslash form happens to be JSON's own escape.
    text: str = writes(nb)  # type: ignore[no-untyped-call]
    return (text if text.endswith("\n") else text + "\n").encode("utf-8", "backslashreplace")


def _target(path: Path) -> Path:
    """The file to replace, symbolic links followed. Raises `OSError` where it must not be."""
    target = Path(os.path.realpath(path))
    try:
        found = target.stat()
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(None, "it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(None, "it is not an ordinary file")
    # Replacing a file needs rights in its folder only: a read-only file would go without a word.
    if not os.access(target, os.W_OK):
        raise PermissionError(None, "it is read-only")
    return target


def _open_temporary(target: Path) -> tuple[int, Path]:
    """A new empty file in the folder of *target*, on the same file system so as to be renamed.

    Its name is short and does not contain the target's, which may be as long as names can be.
    """
    temporary = target.with_name(f".rlm-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.open(temporary, flags, 0o666), temporary


def _keep_mode(descriptor: int, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = "make room there" if error.errno in _FULL else "choose another path"
        raise RecordError(f"cannot write the notebook {path}: {reason}; {remedy}") from error
