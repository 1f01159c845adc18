"""Makes a `Config` of verl's keys, and a table of what became of each. Called by the CLI."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.config.verl.keys import DEFAULTS, TABLE
from rayapp.config.verl.reading import read_verl
from rayapp.config.verl.rules import Landing, Rule, Values, no_effect
from rayapp.core.errors import ConfigError

OURS = "rayapp."
"""Begins an override of one of our own keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of the table that the user reads."""

    key: str
    value: Any
    landing: Landing
    is_default: bool
    """True for what verl takes where the user says nothing."""

    @property
    def where(self) -> str:
        """`train.num_steps = 1`, or empty where the key has no effect."""
        return ", ".join(f"{key} = {_shown(value)}" for key, value in self.landing.settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A verl configuration as one of ours."""

    config: Config
    settings: Mapping[str, Any]
    """Our keys, dotted, that differ from our defaults or were named."""
    rows: tuple[Row, ...]

    def to_yaml(self) -> str:
        """A config file for `rayapp train`."""
        return yaml.safe_dump(_nested(self.settings), sort_keys=False, allow_unicode=True, width=120)


def import_verl(path: str | Path, overrides: Sequence[str] = ()) -> Imported:
    """Import verl's file with verl's overrides.

    Args:
        overrides: as on verl's command line; `rayapp.KEY=VALUE` sets a key of ours, and wins.
    Raises:
        ConfigError: keys are unknown (all of them are named), a value can't be honoured, or the result contradicts
            itself.
    """
    ours = [override.removeprefix(OURS) for override in overrides if override.startswith(OURS)]
    given = read_verl(path, [override for override in overrides if not override.startswith(OURS)])
    values = given | {key: value for key, value in DEFAULTS.items() if key not in given}
    rules = _rules_of(values)
    rows = tuple(
        Row(key=key, value=value, landing=_landing(rules[key], key, value, values), is_default=key not in given)
        for key, value in values.items()
    )
    settings = _settings(rows)
    if not settings.get("data.train_files"):
        raise ConfigError(f"verl config {path}: data.train_files is not set, by the file or by an override")
    settings |= dict(_our_setting(override) for override in ours)
    config = load_config(None, [f"{key}={_shown(value)}" for key, value in settings.items()])
    return Imported(config=config, settings=settings, rows=rows)


def _landing(rule: Rule, key: str, value: Any, values: Values) -> Landing:
    try:
        return rule(key, value, values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} = {value!r} can't be imported: {error}") from error


def _rules_of(values: Mapping[str, Any]) -> dict[str, Rule]:
    found = {key: _rule(key) for key in values}
    if unknown := [key for key, rule in found.items() if rule is None]:
        raise ConfigError("verl keys that can't be imported:\n  " + "\n  ".join(_unknown(key) for key in unknown))
    return {key: rule for key, rule in found.items() if rule is not None}


def _rule(key: str) -> Rule | None:
    if key in TABLE:
        return TABLE[key]
    if key.endswith("._target_"):
        return no_effect("names a class of verl's")
    parts = key.split(".")
    sections = (".".join([*parts[:length], "*"]) for length in range(len(parts), 0, -1))
    return next((TABLE[section] for section in sections if section in TABLE), None)


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, TABLE, n=1, cutoff=0.8)
    return f"{key}: " + (f"did you mean {near[0]}?" if near else "no rule says what it means here; leave it out")


def _settings(rows: Sequence[Row]) -> dict[str, Any]:
    """All settings; where two keys go to the same place, what the user said wins over verl's default."""
    ordered = sorted(rows, key=lambda row: not row.is_default)
    return {key: value for row in ordered for key, value in row.landing.settings.items()}


def _our_setting(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {OURS}{override!r} is not of the form {OURS}key.sub=value")
    return key, yaml.safe_load(text)


def _shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).strip().removesuffix("\n...").strip()


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in sorted(flat):
        *sections, leaf = key.split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
        below[leaf] = flat[key]
    return tree
