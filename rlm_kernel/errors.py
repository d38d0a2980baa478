"""Every error that rlm-kernel raises on purpose.

    RLMError                     exit code 1
    ├── UsageError               exit code 2: what was asked for cannot be done
    │   └── PromptError          the prompt cannot be loaded
    ├── RootError                the root model could not be asked
    ├── SubcallError             one sub-call failed
    ├── BudgetExceeded           exit code 3: a limit of the tree of runs was reached
    ├── NoAnswer                 exit code 3: the run stopped before it had an answer
    ├── WorkerDied               the REPL's worker process is gone
    ├── LinkError                the worker broke the protocol of the link
    └── RecordError              the record cannot be read or written

A message is one sentence: what happened, to what, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "BudgetExceeded",
    "LinkError",
    "NoAnswer",
    "PromptError",
    "RLMError",
    "RecordError",
    "RootError",
    "SubcallError",
    "UsageError",
    "WorkerDied",
]


class RLMError(Exception):
    """Anything that rlm-kernel itself reports as wrong."""

    exit_code = 1


class UsageError(RLMError, ValueError):
    """What was asked for cannot be done: a bad option, spec or argument."""

    exit_code = 2


class PromptError(UsageError):
    """The prompt cannot be loaded: missing, unreadable, empty or not text."""


class RootError(RLMError):
    """The root model could not be asked, or its reply could not be read."""


class SubcallError(RLMError):
    """One sub-call failed. In a batch it stands in the list at its prompt's place."""


class BudgetExceeded(RLMError):
    """A call was refused before it was sent, because the tree's budget does not cover it."""

    exit_code = 3


class NoAnswer(RLMError):
    """The run was stopped, by a limit or a person, before it had an answer."""

    exit_code = 3


class WorkerDied(RLMError):
    """The worker process of the REPL ended, and with it the variables that it held."""


class LinkError(RLMError):
    """The worker sent something that the link's protocol does not allow."""


class RecordError(RLMError):
    """The record cannot be opened, read or written."""
