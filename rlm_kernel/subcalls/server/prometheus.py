"""What servers tell on ``/metrics``, as far as it is of use here.

A parser of a dozen lines: the library for the format (prometheus_client) brings the exporting half
too, and with it a registry and collectors of this process's own figures. Source:
github.com/prometheus/docs, "Text-based format".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Sample", "samples"]

_LABELS = r'(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*'
_LABEL = re.compile(r'(\w+)="([^"\\]*)"')


class Sample(NamedTuple):
    """One line."""

    name: str
    value: float
    """Finite."""

    written_labels: str

    @property
    def labels(self) -> dict[str, str]:
        """Without those that have a quote or a backslash in them."""
        return dict(_LABEL.findall(self.written_labels))


def samples(text: str, *names: str) -> Iterator[Sample]:
    """The samples of *text* that have one of the *names*; lines of other shapes are left out."""
    for name, labels, written in _pattern(names).findall(text):
        try:
            value = float(written)
        except ValueError:
            continue
        if math.isfinite(value):
            yield Sample(name, value, labels)


@functools.lru_cache(8)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    # Only what is asked for is matched, of the thousands of lines that there may be.
    name = "|".join(map(re.escape, names))
    return re.compile(
        rf"^({name})(?:\{{({_LABELS})\}})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t\r]*$", re.MULTILINE
    )
