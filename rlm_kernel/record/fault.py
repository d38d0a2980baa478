"""What the parts of this room raise before it is known of which record they speak."""

from __future__ import annotations

from rlm_kernel.errors import RecordError

__all__ = ["Fault"]


class Fault(RecordError):
    """The end of a sentence, "what is wrong; what to do"; `reporting` puts the record's name
    before it."""
