"""Turns arguments of the library's functions into a checked configuration. Nothing is started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names import PREFIX
from rayapp.core.protocols import Task

if TYPE_CHECKING:
    from rayapp.config.foreign_keys import GivenRun

ConfigLike = Config | str | os.PathLike[str] | Mapping[str, Any] | None  # YAML file, settings, or None for all defaults
# Settings that replace the config's: `["train.num_steps=5"]` or `{"train": {"num_steps": 5}}`.
Overrides = Sequence[str] | Mapping[str, Any]
TaskLike = str | os.PathLike[str] | Task  # name of a task, a .yaml or .py file, or the task itself
RewardLike = str | Callable[..., Any]  # function with verl's signature (docs/data.md), or its name


def make_job(
    config: ConfigLike | GivenRun,
    overrides: Overrides = (),
    *,
    tasks: Sequence[TaskLike] | TaskLike | None = None,
    reward: RewardLike | None = None,
    agent: str | None = None,
) -> GivenRun:
    from rayapp.config.foreign_keys import GivenRun

    objects: dict[str, object] = {}
    if isinstance(config, GivenRun):
        objects, config = dict(config.objects), config.config
    settings = list(as_settings(overrides))
    if tasks is not None:
        each = [tasks] if isinstance(tasks, str | os.PathLike) or not isinstance(tasks, Sequence) else tasks
        settings.append(f"tasks={json.dumps([_task_name(task, objects) for task in each])}")
    if reward is not None:
        name = reward if isinstance(reward, str) else _noted(objects, _name_of(reward), reward)
        settings.append(f"reward.custom={json.dumps(name)}")
    if agent is not None:
        settings.append(f"agent.name={agent}")
    return GivenRun(config=load(config, settings), objects=objects)


def load(config: ConfigLike, overrides: Overrides = ()) -> Config:
    settings = list(as_settings(overrides))
    if config is None and not settings:
        return Config()
    from rayapp.config.loading import load_config  # behind the defaults, which need no OmegaConf

    if isinstance(config, Config):
        if not settings:
            return config
        config = config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, Mapping):
        return load_config(None, [*as_settings(config), *settings])
    return load_config(Path(config) if config is not None else None, settings)


def as_settings(given: Overrides, prefix: str = "") -> Iterator[str]:
    """Yield overrides in the form of the command line: `{"train": {"num_steps": 5}}` -> `train.num_steps=5`."""
    if isinstance(given, str):
        raise ConfigError(f"overrides must be a list or a mapping, not the string {given!r}: write [{given!r}]")
    if not isinstance(given, Mapping):
        yield from given
        return
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from as_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value, default=str)}"


def _task_name(task: TaskLike, objects: dict[str, object]) -> str:
    if isinstance(task, str | os.PathLike):
        return str(task)
    if not all(hasattr(task, name) for name in ("name", "render", "score")):
        raise InputError(
            f"an object of type {type(task).__name__} is not a task: a task must have the attributes `name`, `render` "
            "and `score`, like rayapp.CodingTask"
        )
    return _noted(objects, task.name, task)


def _noted(objects: dict[str, object], name: str, given: object) -> str:
    key = f"{PREFIX}{name}"
    if objects.setdefault(key, given) is not given:
        raise ConfigError(f"two different objects have the name {name!r}: give one of them another name")
    return key


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name
