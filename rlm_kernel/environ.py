"""What a worker may see of our environment: none of our processes shows it a key.

Code in cells is hostile until shown otherwise, and models read ``os.environ``
when they look for help; ``/proc`` shows it the environment of every other
process of the same user. So nothing whose name or value looks like a
credential goes down to a worker or a process that needs none, and those that
hold keys are undumpable. A variable too many that is left out does little
harm; one too few does much. The rules look at shapes only and cannot know
every secret: `protect` and the sandbox launchers are the boundary.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

__all__ = ["looks_secret", "protect", "scrub"]

_PR_SET_DUMPABLE = 4

_SECRET_NAME = re.compile(
    r"""
      key(?!board|map|word)
    | token | secret | pass | pwd | cred | cookie | bearer | jwt | signature | webhook
    | auth (?!or(?!i))                  # GIT_AUTHOR_NAME is none, AUTHORIZATION is one
    | sess(?:ion)?_?id
    | (?:^|_)(?:pat|otp|pin|salt|sas|dsn)(?:_|$)
    """,
    re.IGNORECASE | re.VERBOSE,
)

_PLAIN_NAMES = frozenset({"PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"})
"""Names that match the rule above and are known to hold no secret."""

_SECRET_VALUE = re.compile(
    r"""
      \b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{8,}               # OpenAI, Anthropic, Stripe …
    | \bgh[pousr]_[A-Za-z0-9]{8,} | github_pat_ | \bglpat-
    | \bhf_[A-Za-z0-9]{8,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,}
    | \bxox[a-z]-|\bxapp-
    | \bAIza[A-Za-z0-9_-]{16,} | \bya29\.
    | \b(?:gsk|r8|npm|nvapi|pplx|xai|tvly|lsv2|dckr_pat|dop_v1|shpat|pypi)[-_][A-Za-z0-9_-]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+            # JWT (RFC 7519)
    | -----BEGIN
    | ://[^/\s@]+@                                      # user or user:password before a host
    | \b(?:bearer|basic)\s+[A-Za-z0-9+/._=-]{8,}
    | (?:key|password|passwd|pwd|secret|token|sig|signature)=[^\s;&]{4,}
    """,
    re.IGNORECASE | re.VERBOSE,
)

_PLAIN_VALUE_NAME = re.compile(
    r"(?:PATH|HOME|USER|LOGNAME|SHELL|HOSTNAME|TERM|TZ|PWD|OLDPWD|VIRTUAL_ENV|LS_COLORS|MPLBACKEND"
    r"|LANG|LANGUAGE|LC_\w+|PYTHON\w*|LD_\w+|CUDA_\w+|NVIDIA_\w+|OMP_\w+|MKL_\w+|OPENBLAS_\w+"
    r"|CONDA_\w+|XDG_\w+)"
)
"""Names whose values are not judged by how random they look: GPU ids, hashed paths, host names."""

_PIECE = re.compile(r"[A-Za-z0-9+/_.-]{20,}")
_RANDOM_BITS = 3.0
"""Shannon entropy per character; 32 random hex digits have about 3.6, repeated text far less."""

_RANDOM_MIX = 0.15
"""Share of neighbours of different kinds (lower, upper, digit): 0.45 in random hex, 0.6 in base64,
0.3 in base32, but less than 0.1 in words with a version or a date."""


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """*environ* without what looks like a credential."""
    return {name: value for name, value in environ.items() if not looks_secret(name, value)}


def protect() -> None:
    """Make the calling process undumpable (prctl(2), ``PR_SET_DUMPABLE``).

    Without it a worker of the same user reads this process's memory and its
    environment, keys included, from ``/proc`` and attaches to it with ptrace,
    whatever its own environment holds. It does not pass on to programs that
    the process starts. The price: no core dumps, no debugger and no profiler of
    another process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)


def looks_secret(name: str, value: str) -> bool:
    """Whether an environment variable looks like a credential, by its name or by its value."""
    if name not in _PLAIN_NAMES and _SECRET_NAME.search(name):
        return True
    if _SECRET_VALUE.search(value):
        return True
    return not _PLAIN_VALUE_NAME.fullmatch(name) and _has_random_piece(value)


def _has_random_piece(value: str) -> bool:
    return any(_is_random(piece) for piece in _PIECE.findall(value))


def _is_random(piece: str) -> bool:
    if piece.startswith(("/", "./", "../")):
        return False  # a path; of base64 texts one in 64 begins so, seldom without a telling name
    kinds = [_kind(c) for c in piece if c.isalnum()]
    if "digit" not in kinds or len(set(kinds)) == 1:
        return False
    mix = sum(a != b for a, b in pairwise(kinds)) / len(kinds)
    counts = Counter(piece)
    entropy = -sum(n / len(piece) * math.log2(n / len(piece)) for n in counts.values())
    return mix >= _RANDOM_MIX and entropy >= _RANDOM_BITS


def _kind(char: str) -> str:
    if char.isdigit():
        return "digit"
    return "upper" if char.isupper() else "lower"
