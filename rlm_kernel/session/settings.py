"""How a run is set up: root, sub-model, dialect, budget, policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

import msgspec

from rlm_kernel.engine.budget import Budget
from rlm_kernel.errors import UsageError
from rlm_kernel.tool_function import tool_names

S = TypeVar("S", bound=msgspec.Struct)

__all__ = ["Settings", "kept", "with_options"]

PolicyName = Literal["run", "ask"]

_BUDGET = frozenset(Budget.__struct_fields__)
_OTHER = frozenset(("root", "sub", "dialect", "policy", "tools", "allow_whole_prompt", "cache"))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs to know beside the query and the prompt."""

    root: str = ""
    """Spec of the root, such as ``openai:MODEL@URL``; empty where none was chosen yet."""

    sub: str = ""
    """Spec of the model of sub-calls; empty: the root's where that is a chat model."""

    dialect: str = "paper"
    policy: PolicyName = "run"
    budget: Budget = Budget()
    tools: tuple[str, ...] = ()
    """Functions of a person's cells, or files of functions (``.py``), for the models of
    sub-calls."""

    allow_whole_prompt: bool = False
    """Whether a child run may get the whole ``P`` of a run above it."""

    cache: bool = True
    """Whether sub-calls may be given replies that were recorded before the run began."""


def kept(settings: Settings) -> Settings:
    """What the next run of a notebook takes over where its ``%%rlm`` does not say otherwise.

    Models, dialect, policy and limits; not what one run was given or allowed, which no option of
    the next could take back.
    """
    default = Settings()
    return msgspec.structs.replace(
        settings,
        tools=default.tools,
        allow_whole_prompt=default.allow_whole_prompt,
        cache=default.cache,
    )


def with_options(settings: Settings, options: Mapping[str, str | bool | None]) -> Settings:
    """*settings* changed by options as a person wrote them.

    Raises
    ------
    UsageError
        For an unknown option or a value of the wrong type; the message names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if "no_cache" in given:
        given["cache"] = not given.pop("no_cache")
    budget = {name: value for name, value in given.items() if name in _BUDGET}
    other: dict[str, object] = {name: value for name, value in given.items() if name not in _BUDGET}
    unknown = other.keys() - _OTHER
    if unknown:
        raise UsageError(f"unknown option {min(unknown)!r}; see %%rlm? for the options")
    if isinstance(tools := other.get("tools"), str):
        other["tools"] = tuple(tool_names(tools))
    return _changed(_changed(settings, budget=_changed(settings.budget, **budget)), **other)


def _changed(struct: S, **changes: object) -> S:
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    try:
        return msgspec.convert(
            {**fields, **changes}, type(struct), strict=False, from_attributes=True
        )
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):  # of the struct's own check: name and reason
            name, _, reason = str(error.__cause__).partition(" ")
            raise UsageError(f"{_flag(name)} {reason}") from None
        name = str(error).partition("$.")[2].strip("`") or "option"
        given = repr(changes.get(name))[:60]
        reason = str(error).partition(" - ")[0].lower()
        if name == "policy":
            reason = f"give {' or '.join(get_args(PolicyName))}"
        raise UsageError(f"{_flag(name)} cannot be {given}: {reason}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
