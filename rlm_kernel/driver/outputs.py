"""The outputs of executed cells, kept as a front end would store them.

Adjacent texts of one stream are one output, overwritten text (``\\r``, ``\\b``)
is gone, an updated display is changed wherever it was shown, and a cleared
output is empty. What comes out is valid nbformat 4.5.
"""

from __future__ import annotations

import re
from typing import Any

from nbformat import NotebookNode

__all__ = ["CellOutputs", "Displays", "StreamText"]

_CONTROL = re.compile(r"([\r\n\b])")


class StreamText:
    """Text of one stream, as a terminal would show it after carriage returns and backspaces.

    Appending costs the length of what is appended: a cell may print for hours.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line = ""
        self._cursor = 0

    def write(self, text: str) -> None:
        """Append *text*."""
        if self._cursor == len(self._line) and "\r" not in text and "\b" not in text:
            head, newline, rest = text.rpartition("\n")
            if newline:
                self._lines.append(self._line + head + newline)
                self._line = rest
            else:
                self._line += text
            self._cursor = len(self._line)
            return
        for part in _CONTROL.split(text):
            self._write_part(part)

    def _write_part(self, part: str) -> None:
        if part == "\n":
            self._lines.append(self._line + "\n")
            self._line, self._cursor = "", 0
        elif part == "\r":
            self._cursor = 0
        elif part == "\b":
            self._cursor = max(self._cursor - 1, 0)
        else:
            end = self._cursor + len(part)
            self._line = self._line[: self._cursor] + part + self._line[end:]
            self._cursor = end

    def text(self) -> str:
        """All of it."""
        return "".join(self._lines) + self._line


class Displays:
    """Which outputs of the notebook show which display id."""

    def __init__(self) -> None:
        self._shown: dict[str, list[dict[str, Any]]] = {}

    def add(self, display_id: str, output: dict[str, Any]) -> None:
        """*output* shows *display_id* from now on."""
        self._shown.setdefault(display_id, []).append(output)

    def update(self, display_id: str, content: dict[str, Any]) -> None:
        """Change every output that shows *display_id*; none is no error."""
        for output in self._shown.get(display_id, []):
            output["data"] = content.get("data", {})
            output["metadata"] = content.get("metadata", {})


class CellOutputs:
    """Outputs of one execution of one cell, in order."""

    def __init__(self, displays: Displays) -> None:
        self.execution_count: int | None = None
        self.error: dict[str, Any] | None = None
        """Content of the error message, where the cell ended with one."""

        self._displays = displays
        self._outputs: list[dict[str, Any]] = []
        self._stream: StreamText | None = None
        self._clear_next = False

    def message(self, kind: str, content: dict[str, Any]) -> None:
        """Take one iopub message of this cell; kinds that are no output are ignored."""
        if kind == "execute_input":
            self.execution_count = content.get("execution_count")
        elif kind == "clear_output":
            self._clear(wait=bool(content.get("wait")))
        elif kind == "update_display_data":
            self._displays.update(_display_id(content), content)
        elif kind == "stream":
            self._clear_if_asked()
            self._append_stream(content.get("name", "stdout"), content.get("text", ""))
        elif kind in ("display_data", "execute_result", "error"):
            self._clear_if_asked()
            self._append(kind, content)

    def nodes(self) -> list[dict[str, Any]]:
        """The outputs as nbformat output nodes."""
        self._settle_stream()
        return list(self._outputs)

    def _clear(self, *, wait: bool) -> None:
        self._clear_next = wait
        if not wait:
            self._outputs.clear()
            self._stream = None

    def _clear_if_asked(self) -> None:
        if self._clear_next:
            self._clear(wait=False)

    def _append_stream(self, name: str, text: str) -> None:
        last = self._outputs[-1] if self._outputs else None
        if self._stream is None or last is None or last.get("name") != name:
            self._settle_stream()
            self._stream = StreamText()
            self._outputs.append(_node("stream", name=name, text=""))
        self._stream.write(text)

    def _settle_stream(self) -> None:
        """Put the text of the stream into its output, which is the last."""
        if self._stream is not None:
            self._outputs[-1]["text"] = self._stream.text()

    def _append(self, kind: str, content: dict[str, Any]) -> None:
        self._settle_stream()
        self._stream = None
        if kind == "error":
            self.error = content
            fields = {key: content.get(key, "") for key in ("ename", "evalue")}
            output = _node("error", traceback=content.get("traceback", []), **fields)
        else:
            fields = {key: content.get(key, {}) for key in ("data", "metadata")}
            if kind == "execute_result":
                fields["execution_count"] = content.get("execution_count")
            output = _node(kind, **fields)
        if display_id := _display_id(content):
            self._displays.add(display_id, output)
        self._outputs.append(output)


def _node(kind: str, **fields: Any) -> dict[str, Any]:
    """An output of a notebook. Checked when the notebook is written, all at once."""
    return NotebookNode(output_type=kind, **fields)  # type: ignore[no-untyped-call]


def _display_id(content: dict[str, Any]) -> str:
    transient = content.get("transient") or {}
    return str(transient.get("display_id") or "")
