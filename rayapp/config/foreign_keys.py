"""Translates keys of other frameworks (verl, TRL): rules from a key and its value to settings of rayapp.

A rule takes a key's value and all values, and returns rayapp's settings, or the reason why the key has no effect. For
an unsupported value it raises: nothing that changes the training is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.config.sections import TRACKERS
from rayapp.core.errors import ConfigError

Values = Mapping[str, Any]  # all keys of the other framework: the user's, or the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The outcome of one foreign key."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # empty if the key has no effect
    note: str = ""  # why the key has no effect, or the difference in meaning
    into: str = ""  # other foreign key whose rule reads this key's value


Rule = Callable[[str, Any, Values], Landing]
Convert = Callable[[Any], Any]


def to(target: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(settings={target: convert(value)}, note=note)

    return rule


def optional(target: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    """Return a rule like that of `to`, except that null keeps rayapp's default."""
    given = to(target, convert, note=note)

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note="our default stays") if value is None else given(key, value, values)

    return rule


def no_effect(why: str) -> Rule:
    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(note=why)

    return rule


def folded(into: str) -> Rule:
    """Return a rule for a key that the rule of another key reads."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        return Landing(into=into)

    return rule


def only(*allowed: Any, why: str) -> Rule:
    """Return a rule that accepts only these values, which mean what rayapp does anyway."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in allowed:
            shown = " or ".join(str(item) for item in allowed)
            raise ConfigError(f"{key} = {value!r} can't be imported: {why}. It must be {shown}.")
        return Landing(note=why)

    return rule


def choice(target: str, names: Mapping[Any, Any], *, note: str = "") -> Rule:
    """Return a rule that maps verl's names of choices to rayapp's, and refuses others."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value not in names:
            known = ", ".join(str(name) for name in names)
            raise ConfigError(f"{key} = {value!r} can't be imported; supported values are {known}")
        return Landing(settings={target: names[value]}, note=note)

    return rule


def choice_without_effect(names: Mapping[Any, Any], *, note: str) -> Rule:
    """Return a rule that accepts these values, which have no effect in rayapp, and refuses all others."""
    chosen = choice("", names)

    def rule(key: str, value: Any, values: Values) -> Landing:
        chosen(key, value, values)
        return Landing(note=note)

    return rule


def refused(section: str, *, why: str) -> Rule:
    """Return a rule for a section that can't be imported at all: all of its keys give one message."""

    def rule(key: str, value: Any, values: Values) -> Landing:
        if value is None:
            return Landing(note=why)
        raise ConfigError(f"{section}.* can't be imported: {why}.")

    return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One row of the table that the import prints: a key, its value and its outcome."""

    key: str
    value: Any
    landing: Landing
    is_default: bool  # the user did not set the key

    @property
    def outcome(self) -> str:
        """`train.num_steps = 1`, `folded into KEY`, or `ignored`."""
        set_here = ", ".join(f"{key} = {shown(value)}" for key, value in self.landing.settings.items())
        return set_here or (f"folded into {self.landing.into}" if self.landing.into else "ignored")

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Sort key: the keys that set something first, those of the user before defaults."""
        return not self.landing.settings, not self.landing.into, self.is_default


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun:
    """A run's config and the Python objects that it names."""

    config: Config
    # Name in the config -> the program's task or reward function.
    objects: Mapping[str, object] = field(default_factory=dict)
    rows: tuple[KeyRow, ...] = ()  # fields of TRL's configuration, each with the keys that it sets

    def __str__(self) -> str:
        """Return `rows` as text: fields with the same effect, or without effect for the same reason, together."""
        lines: dict[str, list[str]] = {}
        for row in sorted(self.rows, key=lambda row: row.rank):
            effect = row.outcome + (f" ({note})" if (note := row.landing.note) else "")
            lines.setdefault(effect, []).append(f"{row.key} = {row.value!r}" if row.landing.settings else row.key)
        return "\n".join(
            fill(f"{', '.join(fields)}: {effect}", 120, subsequent_indent="    ") for effect, fields in lines.items()
        )


def landing_of(rule: Rule, key: str, value: Any, values: Values) -> Landing:
    """Apply a rule to a verl key. A ConfigError names the key and the value."""
    try:
        return rule(key, value, values)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, OSError) as error:
        raise ConfigError(f"{key} = {value!r} can't be imported: {error}") from error


def settings_of(rows: Sequence[KeyRow]) -> dict[str, Any]:
    """Return all settings. A value from the user takes precedence over a default of another verl key."""
    ordered = sorted(rows, key=lambda row: not row.is_default)
    return {key: value for row in ordered for key, value in row.landing.settings.items()}


def load_settings(settings: Mapping[str, Any], rows: Sequence[KeyRow], overrides: Sequence[str] = ()) -> Config:
    """Load a configuration from imported settings and overrides. A ConfigError names the verl keys of the values."""
    try:
        return load_config(None, [*(f"{key}={shown(value)}" for key, value in settings.items()), *overrides])
    except ConfigError as error:
        said = [
            f"{key} comes from {row.key} = {row.value}"
            for row in rows
            for key in row.landing.settings
            if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", str(error))
        ]
        raise ConfigError("\n  ".join([str(error), *dict.fromkeys(said)])) from error


def rules_of(lines: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Rule]]:
    """Yield keys of a data file, each with its rule. A line has one or more keys, and what becomes of them."""
    for keys, said in lines.items():
        for key in keys.split():
            name = f"{section}.{key}" if section else key
            match said:
                case {"set": target}:
                    yield name, optional(target, note=said.get("note", ""))
                case {"into": other}:
                    yield name, folded(other)
                case {"only": values, "why": why}:
                    yield name, only(*values, why=why)
                case {"refused": why}:
                    yield name, refused(name.removesuffix(".*"), why=why)
                case _:
                    yield name, no_effect(said)


def shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).strip().removesuffix("\n...").strip()


def tracked(*names: str) -> Landing:
    """Return the trackers of these names, and metrics.jsonl; the note lists names without a tracker in rayapp."""
    kept = [name for name in names if name in TRACKERS]
    missing = [name for name in names if name not in TRACKERS]
    note = f"rayapp has no {', '.join(missing)}; the same metrics are in metrics.jsonl" if missing else ""
    return Landing(settings={"tracking.trackers": list(dict.fromkeys([*kept, "jsonl"]))}, note=note)


def as_list(value: Any) -> list[Any]:
    """Return the value as a list: many of verl's keys take one value, several or null."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
