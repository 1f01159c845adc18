"""Rules of the import, and the four shapes that nearly all of them have. Used by the table in `keys.py`.

A rule takes a key's value and all values, and says where the value goes here, or why it has no effect. One that can't
be honoured raises: nothing that changes the training is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.errors import ConfigError

Values = Mapping[str, Any]
"""All keys with their values: verl's defaults, and over them what the user set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where one key goes, with which value and remark."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our keys with their values; empty: it has no effect here."""
    note: str = ""
    """Why it has none, or in what it differs."""


Rule = Callable[[str, Any, Values], Landing]
Convert = Callable[[Any], Any]


def to(target: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    """The value goes to one key of ours."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(settings={target: convert(value)}, note=note)

    return rule


def optional(target: str, convert: Convert = lambda value: value) -> Rule:
    """A rule like `to`, but None keeps our default."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note="our default stays") if value is None else Landing(settings={target: convert(value)})

    return rule


def no_effect(why: str) -> Rule:
    """The key means nothing here, whatever its value."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note=why)

    return rule


def only(*allowed: Any, why: str) -> Rule:
    """The key has one meaning that we share; any other value is refused.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in allowed:
            shown = " or ".join(str(item) for item in allowed)
            raise ConfigError(f"{key} = {value!r} can't be imported: {why}. It must be {shown}.")
        return Landing(note=why)

    return rule


def choice(target: str, names: Mapping[Any, Any], *, note: str = "") -> Rule:
    """A word of verl's that has another here.

    Raises (the rule): ConfigError.
    """

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in names:
            known = ", ".join(str(name) for name in names)
            raise ConfigError(f"{key} = {value!r} can't be imported; known here are: {known}")
        return Landing(settings={target: names[value]}, note=note)

    return rule
