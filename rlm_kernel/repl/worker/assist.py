"""Completion, inspection and completeness of code that is being typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from rlm_kernel.repl import messages

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["complete", "inspect", "is_complete"]

_TYPES = "_jupyter_types_experimental"


def complete(shell: InteractiveShell, request: messages.Complete) -> messages.Completions:
    """Matches of IPython's completer: names, attributes, keys, files, magics and jedi's."""
    from IPython.core.completer import provisionalcompleter, rectify_completions

    code, position = request.code, request.cursor_pos
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, position)))
    types = [
        {
            "start": match.start,
            "end": match.end,
            "text": match.text,
            "type": match.type,
            "signature": match.signature,
        }
        for match in found
    ]
    return messages.Completions(
        id=request.id,
        matches=[match.text for match in found],
        cursor_start=found[0].start if found else position,
        cursor_end=found[0].end if found else position,
        metadata={_TYPES: types},
    )


def inspect(shell: InteractiveShell, request: messages.Inspect) -> messages.Inspection:
    """What IPython's ``?`` (and ``??``) shows of the name under the cursor."""
    from IPython.utils.tokenutil import token_at_cursor

    name = token_at_cursor(request.code, request.cursor_pos)
    try:
        data = shell.object_inspect_mime(  # type: ignore[no-untyped-call]
            name, detail_level=request.detail_level
        )
    except KeyError:
        return messages.Inspection(id=request.id, found=False)
    data.pop("text/html", None)
    return messages.Inspection(id=request.id, found=True, data=data)


def is_complete(shell: InteractiveShell, request: messages.IsComplete) -> messages.Completeness:
    """Whether Enter should run the code or begin another line."""
    status, indent = shell.check_complete(request.code)
    known = cast("Literal['complete', 'incomplete', 'invalid', 'unknown']", status)
    return messages.Completeness(id=request.id, status=known, indent=indent)
