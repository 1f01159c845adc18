"""Makes a `Config` from verl's keys, and a table with the outcome of each key, without importing verl or Hydra."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.config.foreign_keys import (
    KeyRow,
    Landing,
    Rule,
    Values,
    landing_of,
    load_settings,
    no_effect,
    settings_of,
)
from rayapp.core.errors import ConfigError
from rayapp.extras.verl.arithmetic import STEPS
from rayapp.extras.verl.keys import COUNTERPARTS, DEFAULTS, RENAMED, TABLE

_HYDRA = ("hydra", "defaults")
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_BASES = ("ppo_trainer", "_self_")
_HYDRA_OPTIONS = {
    "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path", "--config-name": "name",
    "-cn": "name",
}  # fmt: skip


def read_verl(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return every key that the user set, in order, e.g. {"data.train_batch_size": 16}.

    Args:
        path: the file that `--config-name` names.
        overrides: as on verl's command line: key=value, +key=value, ++key=value or ~key.
    Raises ConfigError: the file is not based on ppo_trainer, or an override is malformed.
    """
    if path is not None and _is_script(Path(path)):
        path, overrides = _of_script(Path(path), overrides)
    values = dict(_flat(_load(Path(path)))) if path is not None else {}
    for override in overrides:
        if override.startswith("~"):  # Hydra's way to delete a key, or a whole section
            deleted = override[1:].partition("=")[0]
            known = [key for key in (*TABLE, *RENAMED, *values) if f"{key}.".startswith(f"{deleted}.")]
            if not known and _rule(deleted) is None:
                raise ConfigError(f"~{_unknown(deleted)}")
            values = {key: value for key, value in values.items() if not f"{key}.".startswith(f"{deleted}.")}
            continue
        key, value = _parse_override(override)
        # An override of a whole section replaces the keys that the file has in that section.
        for below in [name for name in values if name.startswith(f"{key}.")]:
            del values[below]
        values |= dict(_flat({key: value}))
    return _interpolated(values, path or "of the overrides")


def _is_script(path: Path) -> bool:
    if path.suffix in (".sh", ".bash"):
        return True
    try:
        with path.open("rb") as file:
            return path.suffix not in (".yaml", ".yml") and file.read(2) == b"#!"
    except OSError:
        return False


def _of_script(path: Path, overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the config file of a script's command, and its overrides followed by `overrides`."""
    from rayapp.extras.verl.script import read_script  # sandboxes take a second to import

    launch = read_script(path, overridden=[override.partition("=")[0].lstrip("+") for override in overrides])
    options: dict[str, str] = {}
    found: list[str] = []
    arguments = iter(launch.arguments)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name.startswith("-"):
            found.append(argument)
        elif name in _HYDRA_OPTIONS:
            options[_HYDRA_OPTIONS[name]] = value if equals else next(arguments, "")
        else:
            raise ConfigError(f"verl script {path}: the option {argument} can't be imported; leave it out")
    name = options.get("name", "ppo_trainer").removesuffix(".yaml")
    if name in _BASES:
        return None, [*found, *overrides]
    if "megatron" in name:
        raise ConfigError(
            f"verl script {path}: {name} trains with Megatron, which rayapp doesn't have. Use ppo_trainer (FSDP)."
        )
    folders = list(_config_folders(path, options.get("path", "."), launch.module))
    file = next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if file is None:
        raise ConfigError(
            f"verl script {path}: the command's config file {folders[0] / name}.yaml does not exist. Give the "
            "config file and the overrides without the script: --verl FILE.yaml KEY=VALUE ..."
        )
    return file, [*found, *overrides]


def _config_folders(script: Path, given: str, module: str) -> Iterator[Path]:
    """Yield folders that --config-path may mean: relative to the working folder, to folders above the script, and, as
    in Hydra, to the module's file."""
    folder = Path(given)
    yield folder
    relative = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    if relative.is_absolute():
        return
    for above in script.resolve().parents:
        yield above / relative
        yield above / Path(*module.split(".")[:-1]) / relative


def _interpolated(values: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the values with interpolations such as `${data.max_prompt_length}` resolved."""
    if not any(isinstance(value, str) and "${" in value for value in values.values()):
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create(_verls_own())
    try:
        for key, value in values.items():
            OmegaConf.update(tree, key, value, force_add=True)
        resolved = {key: OmegaConf.select(tree, key) for key in values}
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl config {path}: {str(error).splitlines()[0]}") from error
    plain = {
        key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for key, value in resolved.items()
    }
    return dict(_flat(plain))


def _verls_own() -> dict[str, Any]:
    """Return verl's own defaults, which interpolations may refer to, without importing verl."""
    package = importlib.util.find_spec("verl")
    assert package is not None
    assert package.submodule_search_locations is not None
    return _yaml(Path(package.submodule_search_locations[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml")


def _load(path: Path) -> dict[str, Any]:
    data = _yaml(path)
    merged: dict[str, Any] = {}
    for entry in data.get("defaults") or []:
        merged = _merged(merged, _default(path, entry))
    return _merged(merged, {key: value for key, value in data.items() if key not in _HYDRA})


def _yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"verl config {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"verl config {path} is not YAML: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"verl config {path} must hold sections such as `data:`, not a {type(data).__name__}")
    if data and not isinstance(data.get("defaults") or [], list):
        raise ConfigError(f"verl config {path}: `defaults` must be a list, as in Hydra")
    return data or {}


def _default(path: Path, entry: Any) -> dict[str, Any]:
    """Return the sections of a file that `defaults` name. verl's own files need not exist."""
    if entry in _BASES or entry is None or (isinstance(entry, dict) and "model_engine" in entry):
        engine = entry.get("model_engine", "dp") if isinstance(entry, dict) else "dp"
        return {} if engine == "dp" else {"model_engine": engine}
    # Skip verl's own files, next to its ppo_trainer.yaml: they hold verl's defaults, which rayapp knows.
    if _is_verls_own(path):
        return {}
    file = path.parent / f"{str(entry).removesuffix('.yaml')}.yaml"
    if not file.is_file():
        raise ConfigError(
            f"verl config {path}: its `defaults` name {entry!r}, but {file} does not exist. Only {', '.join(_BASES)} "
            f"need no file. Put the keys of {entry} into this file, or give them as overrides."
        )
    if file.resolve() == path.resolve():
        raise ConfigError(f"verl config {path}: its `defaults` name the file itself. Remove this entry.")
    return _load(file)


def _is_verls_own(path: Path) -> bool:
    return any(isinstance(entry, dict) and "model_engine" in entry for entry in _yaml(path).get("defaults") or [])


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(under[key], value) if isinstance(value, dict) and isinstance(under.get(key), dict) else value
        for key, value in over.items()
    }
    return under | both


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.lstrip("+")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value or ~key, as on verl's command line")
    try:
        return key, yaml_number(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: its value is not YAML: {error}") from error


def yaml_number(value: Any) -> Any:
    """Return `1e-6` as a number, as Hydra does; YAML 1.1 reads it as a string, because it requires `1.0e-6`."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", yaml_number(value)


OURS = "rayapp."  # Prefix of an override that sets one of rayapp's keys.
# Keys of verl from which the values of other keys are computed.
COUNTS = (
    "data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "trainer.n_gpus_per_node",
    "trainer.nnodes", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    config: Config
    # Dotted keys of rayapp that differ from their defaults, or that follow from a key set by the user.
    settings: Mapping[str, Any]
    rows: tuple[KeyRow, ...]

    @property
    def uncounted(self) -> str:
        """Reason why train.num_steps is rayapp's default; empty if it is verl's number."""
        counted = "train.num_steps" in self.settings
        return "" if counted else next(row.landing.note for row in self.rows if row.key == STEPS)

    def to_yaml(self) -> str:
        head = f"# Set train.num_steps: {self.uncounted}\n" if self.uncounted else ""
        return head + yaml.safe_dump(_nested(self.settings), sort_keys=False, allow_unicode=True, width=120)


def import_verl(path: str | Path | None, overrides: Sequence[str] = ()) -> Imported:
    """Import verl's file with verl's overrides.

    Args:
        path: the file that `--config-name` names; None: verl's own ppo_trainer, as in most launch scripts.
        overrides: as on verl's command line; `rayapp.KEY=VALUE` sets one of rayapp's keys, and takes precedence.
    Raises ConfigError: keys are unknown (the message names all), not supported, or contradict each other.
    """
    ours = [override.removeprefix(OURS) for override in overrides if override.startswith(OURS)]
    given = _newer_names(read_verl(path, [override for override in overrides if not override.startswith(OURS)]))
    values = given | {key: value for key, value in DEFAULTS.items() if key not in given}
    own = dict(_our_setting(override) for override in ours)
    problems = _needed(values)
    known = values | {key: DEFAULTS[key] for key in COUNTS if key in problems}
    known |= {f"{OURS}{key}": value for key, value in own.items()}
    rows = []
    for key, value in values.items():
        try:
            landing = _landing(key, value, known) if key not in problems else Landing()
            rows.append(KeyRow(key=key, value=value, landing=landing, is_default=key not in given))
        except ConfigError as error:
            problems[key] = str(error)
    if engine := [problems[key] for key in ("model_engine", "actor_rollout_ref.actor.strategy") if key in problems]:
        # Don't list the keys of another training engine: none of them can be imported.
        raise ConfigError(f"verl keys that can't be imported:\n  {engine[0]}")
    if problems:
        # Several keys of one section may be refused for the same reason.
        raise ConfigError("verl keys that can't be imported:\n  " + "\n  ".join(dict.fromkeys(problems.values())))
    settings = settings_of(rows) | own
    return Imported(config=load_settings(settings, rows), settings=settings, rows=tuple(rows))


def _newer_names(values: Values) -> dict[str, Any]:
    newer = {RENAMED[key]: value for key, value in values.items() if key in RENAMED and value is not None}
    return {key: value for key, value in values.items() if key not in RENAMED} | newer


def _needed(values: Values) -> dict[str, str]:
    """Return key -> problem, for keys from which other keys' values are computed."""
    wrong = {
        key: f"{key} = {values[key]!r} can't be imported: it must be a whole number, at least 1"
        for key in COUNTS
        if not isinstance(values[key], int) or isinstance(values[key], bool) or values[key] < 1
    }
    if not values.get("data.train_files"):
        wrong["data.train_files"] = (
            "data.train_files is not set, neither in verl's file nor by an override: give data.train_files=FILE"
        )
    return wrong


def _landing(key: str, value: Any, values: Values) -> Landing:
    rule = _rule(key)
    if rule is None:
        raise ConfigError(_unknown(key))
    return landing_of(rule, key, value, values)


def _rule(key: str) -> Rule | None:
    if key.endswith("._target_"):
        return no_effect("names a class of verl's")
    begins = (name for name in TABLE if name.endswith("*") and f"{key}.".startswith(name[:-1]))
    return TABLE.get(key) or TABLE.get(max(begins, key=len, default=""))


_MOST_SLIPS = 3  # Letters that a misspelt key may have too many or too few.


def _unknown(key: str) -> str:
    """Return the error message for an unknown key, with a similar key of the same or a similar section."""
    if "@" in key:
        return (
            f"{key}: it selects another file of verl's configuration, which can't be imported; give that file's keys "
            "one by one"
        )
    for end, counterpart in COUNTERPARTS.items():
        if f".{key}".endswith(f".{end}"):
            return f"{key}: verl 0.9 has no such key; give {counterpart}"
    section, _, name = key.rpartition(".")
    names = [known.rpartition(".")[2] for known in TABLE if known.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    near = [f"{section}.{each}" for each in near if abs(len(each) - len(name)) <= _MOST_SLIPS]
    near = near or difflib.get_close_matches(key, TABLE, n=1, cutoff=0.95)
    return f"{key}: " + (
        f"unknown key; did you mean {near[0]}?" if near else "rayapp has no rule for this key; leave it out"
    )


def _our_setting(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {OURS + override!r} is not of the form {OURS}key.sub=value")
    return key, yaml.safe_load(text)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in sorted(flat):
        *sections, leaf = key.split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
        below[leaf] = flat[key]
    return tree
