"""A verl configuration as flat keys: the YAML file and Hydra's overrides, without verl or Hydra. Reads one file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayapp.core.errors import ConfigError

_HYDRA = ("hydra", "defaults")
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_BASES = ("ppo_trainer", "_self_")


def read_verl(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Every key that the user set, in order, e.g. {"data.train_batch_size": 16}.

    Args:
        path: the file that `--config-name` names.
        overrides: as on verl's command line: key=value, +key=value or ++key=value.
    Raises:
        ConfigError: the file can't be read, rests on another base than ppo_trainer, or an override is malformed.
    """
    values = dict(_flat(_load(Path(path))))
    for override in overrides:
        key, value = _parse_override(override)
        # An override of a whole section replaces what the file says below it.
        for below in [name for name in values if name.startswith(f"{key}.")]:
            del values[below]
        values |= dict(_flat({key: value}))
    return _interpolated(values, path)


def _interpolated(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """`${data.max_prompt_length}` and the like, as Hydra fills them in."""
    if not any(isinstance(value, str) and "${" in value for value in values.values()):
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(tree, key, value, force_add=True)
    try:
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl config {path}: {str(error).splitlines()[0]}") from error
    assert isinstance(resolved, dict)
    return dict(_flat({str(key): value for key, value in resolved.items()}))


def _load(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"verl config {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"verl config {path} is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"verl config {path}: sections such as `data:` were expected")
    for base in data.get("defaults") or []:
        if base not in _BASES:
            raise ConfigError(
                f"verl config {path}: its defaults name {base!r}; only {', '.join(_BASES)} can be imported. Put that "
                "file's keys into this one, or give them as overrides."
            )
    return {key: value for key, value in data.items() if key not in _HYDRA}


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.lstrip("+")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value, as on verl's command line")
    if key.startswith("~"):
        raise ConfigError(f"override {override!r}: deleting keys can't be imported; leave the key out of the file")
    try:
        return key, yaml_number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is no YAML: {error}") from error


def yaml_number(value: Any) -> Any:
    """`1e-6` is a number to Hydra, and a text to YAML 1.1, which wants `1.0e-6`."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", yaml_number(value)
