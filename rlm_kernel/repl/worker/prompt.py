"""The prompt ``P`` in the worker."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from typing import Any

from rlm_kernel.cells import PromptInfo
from rlm_kernel.errors import PromptError
from rlm_kernel.prompts import Prompt, check_prompt, describe, encoded
from rlm_kernel.repl import messages

__all__ = ["PromptHolder", "from_memfd"]


class PromptHolder:
    """``P`` and what is known of it."""

    def __init__(self) -> None:
        self.value: Any = None
        self.loaded = False
        self._source = ""
        self._info: PromptInfo | None = None
        self._copy: Any = None

    def set(self, value: Prompt, source: str = "") -> None:
        """Take *value*, which was checked, as ``P``."""
        self.value, self.loaded, self._source, self._info = value, True, source, None
        # Shallow: the items are str and cannot change.
        self._copy = value if isinstance(value, str) else value.copy()

    def info(self) -> PromptInfo:
        """Its description; hashed at most once as long as it does not change.

        Raises
        ------
        PromptError
            A cell made something else of the list or dict.
        """
        if self._info is None or not self._same():
            self.set(check_prompt(self.value), self._source)
            self._info = describe(self.value, self._source)
        return self._info

    def _same(self) -> bool:
        # Fast, since equal items are mostly identical, which `==` looks at first.
        if self.value is self._copy:
            return True
        if type(self.value) is not type(self._copy) or self.value != self._copy:
            return False
        return not isinstance(self.value, dict) or list(self.value) == list(self._copy)

    def restore(self) -> bool:
        """Undo what a turn did to the list or dict in place; whether it did."""
        if self._same():
            return False
        if isinstance(self.value, list):
            self.value[:] = self._copy
        else:
            self.value.clear()
            self.value.update(self._copy)
        return True

    def pieces(self) -> Iterator[bytes]:
        """``P`` as UTF-8 or JSON, in pieces of at most 1 MiB."""
        if self.loaded:
            for piece in encoded(self.value):
                for start in range(0, len(piece), 1 << 20):
                    yield piece[start : start + (1 << 20)]


def from_memfd(fd: int, message: messages.LoadPrompt) -> Prompt:
    """The prompt in a memfd, which is closed.

    Decoded where it lies: at its peak this takes the size of the prompt beside
    that of the memfd.

    Raises
    ------
    PromptError
        The memfd does not hold what *message* says.
    """
    try:
        size = os.fstat(fd).st_size
        if not size:
            raise PromptError("the prompt is empty; give one with text")
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as held:
            text = str(held, "utf-8", "surrogatepass")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompt could not be handed to the REPL: {error}") from None
    finally:
        os.close(fd)
    if message.kind == "str":
        return text
    try:
        return check_prompt(json.loads(text))
    except json.JSONDecodeError as error:
        raise PromptError(f"the prompt is not JSON, as it was said to be: {error}") from None
