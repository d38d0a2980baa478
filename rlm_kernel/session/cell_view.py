"""The outputs of one cell as its front end has them, with a bar among them at times."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from rlm_kernel.cells import Clear, Display, ErrorOutput, Output, Result, Stream
from rlm_kernel.driver.progress_bar import Tally, bar_bundle, bar_metadata, is_bar

__all__ = ["CellView"]


class CellView:
    """Publishes the outputs of a cell, and the progress of its sub-calls among them.

    The bar must leave nothing behind. Where it is all that the cell shows, the output is
    cleared; where there is more, which clearing would take away too, its own output is emptied
    and used again for the next bar of the cell.

    Parameters
    ----------
    publish
        Sends an output to the front end, as one of this cell.
    """

    def __init__(self, publish: Callable[[Output], None]) -> None:
        self._publish = publish
        self._others = False
        """Whether the front end shows anything else of this cell."""

        self._clears_next = False
        """Whether it is to clear all as soon as there is something new."""

        self._line_open = False
        """Whether it ends in a line of text that may go on, or be overwritten (``\\r``)."""

        self._display_id = ""
        """Of the bar's output; empty where there is none."""

        self._shown: dict[str, str] = {}
        """What that output shows; nothing where it is empty, too."""

        self._rests = False

    # --- what the cell shows ------------------------------------------------------------------

    def output(self, output: Output) -> None:
        """Show an output of the cell's own."""
        if isinstance(output, Display | Result) and is_bar(output.metadata):
            # Who keeps notebooks leaves bars out: a cell could hide what it showed.
            output = msgspec.structs.replace(output, metadata=_without_ours(output.metadata))
        if isinstance(output, Clear):
            self._cleared(wait=output.wait)
        elif not (isinstance(output, Display) and output.update):
            self._make_way(output)
            self.touched()
            self._line_open = isinstance(output, Stream) and not output.text.endswith("\n")
        self._publish(output)

    def touched(self) -> None:
        """The front end shows something in the cell by itself, such as what a person typed."""
        if self._clears_next:
            self._cleared(wait=False)
        self._others, self._line_open = True, False

    def _cleared(self, *, wait: bool) -> None:
        self._clears_next = wait
        if not wait:
            self._others = self._line_open = False
            self._display_id, self._shown = "", {}

    def _make_way(self, output: Output) -> None:
        """Take the bar away while that leaves no trace, if it is not needed any more."""
        if not self._others and (self._rests or isinstance(output, ErrorOutput)):
            self.hide()

    # --- progress -----------------------------------------------------------------------------

    def show(self, tally: Tally) -> None:
        """Show *tally* in place; for one that is complete no bar is begun."""
        self._rests = tally.done >= tally.calls
        bundle = bar_bundle(tally)
        if bundle == self._shown or (self._rests and not self._shown):
            return
        if not (self._display_id or self._has_room()):
            return
        self._shown = bundle
        self._send(tally, bundle)

    def _has_room(self) -> bool:
        """Whether a new output leaves the others as they are: it would clear what the cell keeps
        until it has a new one itself, and end the line of somebody else's progress bar."""
        return not (self._clears_next or self._line_open)

    def rest(self) -> None:
        """No call is under way for now: the bar goes with the next output."""
        self._rests = True

    def hide(self) -> None:
        """Take the bar away."""
        if not self._shown:
            return
        self._shown = {}
        if self._others:
            self._send(None, bar_bundle(None))
        else:
            self._display_id = ""
            self._publish(Clear(wait=False))

    def _send(self, tally: Tally | None, bundle: dict[str, str]) -> None:
        update = bool(self._display_id)
        self._display_id = self._display_id or f"rlm-progress-{uuid.uuid4().hex[:12]}"
        self._publish(Display(dict(bundle), bar_metadata(tally), self._display_id, update))


def _without_ours(metadata: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in metadata.items() if name != "rlm"}
