"""How a run is set up: root, sub-model, dialect, budget, policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

from rlm_kernel.engine.budget import Budget
from rlm_kernel.errors import UsageError

S = TypeVar("S", bound=msgspec.Struct)

__all__ = ["Settings", "with_options"]

_BUDGET = frozenset(Budget.__struct_fields__)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs to know beside the query and the prompt."""

    root: str = ""
    """Spec of the root, such as ``openai:MODEL@URL``; empty where none was chosen yet."""

    sub: str = ""
    """Spec of the model of sub-calls; empty: the root's where that is a chat model."""

    dialect: str = "paper"
    policy: Literal["run", "ask"] = "run"
    budget: Budget = Budget()


def with_options(settings: Settings, options: Mapping[str, str | bool | None]) -> Settings:
    """*settings* changed by options as a person wrote them.

    Raises
    ------
    UsageError
        For an unknown option or a value of the wrong type; the message names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    budget = {name: value for name, value in given.items() if name in _BUDGET}
    other = {name: value for name, value in given.items() if name not in _BUDGET}
    unknown = other.keys() - {"root", "sub", "dialect", "policy"}
    if unknown:
        raise UsageError(f"unknown option {min(unknown)!r}; see %%rlm? for the options")
    return _changed(_changed(settings, budget=_budget(settings.budget, budget)), **other)


def _budget(budget: Budget, options: Mapping[str, object]) -> Budget:
    changed = _changed(budget, **options)
    for name in options:
        value = getattr(changed, name)
        if value is not None and value < (0 if name == "max_depth" else 1e-9):
            raise UsageError(f"{_flag(name)} must be more than 0, not {value}")
    return changed


def _changed(struct: S, **changes: object) -> S:
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    try:
        return msgspec.convert(
            {**fields, **changes}, type(struct), strict=False, from_attributes=True
        )
    except msgspec.ValidationError as error:
        name = str(error).partition("$.")[2].strip("`") or "option"
        given = changes.get(name)
        raise UsageError(
            f"{_flag(name)} cannot be {given!r}: {str(error).partition(' - ')[0].lower()}"
        ) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
