"""Reads a YAML file and `key.sub=value` overrides as a checked `Config`.

    configs/x.yaml (with the files it includes) <- overrides -> OmegaConf (parses, merges, ${…}) -> Config (validates)

Called by the CLI, tests and benchmarks. It starts nothing and imports nothing heavy. Everything wrong with a config is
one ConfigError that lists all of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, first_line
from rayapp.core.names.near import did_you_mean
from rayapp.core.names.plugins import Kind, is_plugin
from rayapp.core.validation import explain

_IN_LIST = re.compile(r"[A-Za-z_][\w.]*\[\d+\][^=]*=")
INCLUDE = "include"
"""The only key of a config file that is not a setting: files, relative to this one, that it changes."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run.

    Args:
        path: YAML file; None is all defaults.
        overrides: `key.sub=value`, the value in YAML. Later ones win, and those like `sources[0].ratio=2` last.
    Raises:
        ConfigError: a file can't be read, or keys or values are wrong: one line for each.
    """
    where = "the overrides" if path is None else str(path)
    try:
        in_lists = [override for override in overrides if _IN_LIST.match(override)]
        others = [override for override in overrides if override not in in_lists]
        merged = OmegaConf.merge(_read(Path(path)) if path is not None else {}, _parse_overrides(others))
        for override in in_lists:
            _change_in_list(merged, override)
        values = OmegaConf.to_container(merged, resolve=True)
        config = Config.model_validate(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error
    except ValidationError as error:
        raise ConfigError(f"{where}:{_indented(explain(error, Config))}") from error
    _check_names(config)
    return config


def to_yaml(config: Config) -> str:
    """The configuration with every default filled in; loading it gives an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path, parents: tuple[Path, ...] = ()) -> DictConfig:
    path = path.resolve() if parents else path
    if path.resolve() in parents:
        raise ConfigError(f"{path} includes itself, by way of {' -> '.join(str(parent) for parent in parents)}")
    loaded = _load_yaml(path)
    includes = loaded.pop(INCLUDE, [])
    chain = (*parents, path.resolve())
    below = [_read(path.parent / name, chain) for name in ([includes] if isinstance(includes, str) else includes)]
    merged = OmegaConf.merge(*below, loaded)
    assert isinstance(merged, DictConfig)
    return merged


def _load_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}. {_files_nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: sections such as `train:` were expected, not a list")
    return loaded


def _change_in_list(merged: DictConfig | ListConfig, override: str) -> None:
    key, _, text = override.partition("=")
    try:
        OmegaConf.update(merged, key, _parse_overrides([f"value={text}"])["value"])
    except (OmegaConfBaseException, IndexError) as error:
        raise ConfigError(f"override {override!r}: the configuration has no {key.rpartition('.')[0] or key}") from error


def _files_nearby(path: Path) -> str:
    names = sorted(str(file) for file in Path("configs").rglob("*.yaml"))
    near = difflib.get_close_matches(str(path), names, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    return f"There are: {', '.join(names)}." if names else "Run this in the folder that holds configs/."


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form key.sub=value, e.g. train.num_steps=50")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except yaml.YAMLError as error:
        raise ConfigError(f"overrides {' '.join(overrides)}: a value is no YAML: {error}") from error


def _check_names(config: Config) -> None:
    """Check names that live in registries, which the schema doesn't import."""
    from rayapp.config.algorithm_names import ADV_ESTIMATORS, POLICY_LOSSES

    checked: tuple[tuple[str, Kind, str, tuple[str, ...]], ...] = (
        ("algorithm.adv_estimator", "estimators", config.algorithm.adv_estimator, ADV_ESTIMATORS),
        ("algorithm.policy_loss", "losses", config.algorithm.policy_loss, POLICY_LOSSES),
    )
    for key, kind, name, known in checked:
        if name not in known and not is_plugin(kind, name):
            raise ConfigError(f"{key} = {name!r}{did_you_mean(name, known)} It must be one of {', '.join(known)}")


def _indented(lines: str) -> str:
    return f" {lines}" if "\n" not in lines else "\n  " + lines.replace("\n", "\n  ")
