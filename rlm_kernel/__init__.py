"""A Jupyter kernel in which a language model works on a prompt too long to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlm_kernel.lazy import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlm_kernel.engine.budget import Budget, Usage
    from rlm_kernel.engine.roots import ChatRoot, HumanRoot, PlaybookRoot
    from rlm_kernel.errors import RLMError, SubcallError
    from rlm_kernel.record import load_record
    from rlm_kernel.rlm import RLM, Completion

__all__ = [
    "RLM",
    "Budget",
    "ChatRoot",
    "Completion",
    "HumanRoot",
    "PlaybookRoot",
    "RLMError",
    "SubcallError",
    "Usage",
    "load_record",
]

_HOMES = {
    "RLM": "rlm_kernel.rlm",
    "Budget": "rlm_kernel.engine.budget",
    "ChatRoot": "rlm_kernel.engine.roots",
    "Completion": "rlm_kernel.rlm",
    "HumanRoot": "rlm_kernel.engine.roots",
    "PlaybookRoot": "rlm_kernel.engine.roots",
    "RLMError": "rlm_kernel.errors",
    "SubcallError": "rlm_kernel.errors",
    "Usage": "rlm_kernel.engine.budget",
    "load_record": "rlm_kernel.record",
}

# The worker and the kernel's start import this package and must not pay for openai.
__getattr__ = lazily(__name__, _HOMES)
