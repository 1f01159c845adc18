"""Environments of others, named by YAML files: what each kind needs to be told. Each row of one is a task. Data only.

    environment: trl            # a Python class in the form of TRL's environment_factory
    factory: wordle.py:Wordle

Paths are looked up beside the file. Read by `loading.py`; docs/environments.md is for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from rayapp.config.base import FrozenModel
from rayapp.core.errors import InputError
from rayapp.core.names.near import did_you_mean
from rayapp.core.validation import explain


class _Environment(FrozenModel):
    name: str
    """For metrics; the file's name when left out."""
    folder: Path
    """Of the file; filled in."""
    prompt: str = ""
    """What the policy is told, a user's message. What the environment says first is put behind it."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Of one answer of the environment. One that takes longer is lost, and its trajectory with it."""

    def beside(self, path: str) -> str:
        """A path as the file means it: beside the file, where there is such a thing."""
        return str(self.folder / path) if (self.folder / path).exists() else path


class TrlEnvironment(_Environment):
    """A class whose public methods are tools."""

    environment: Literal["trl"]
    factory: str
    """file.py:Class or package.module:Class; a function that gives an environment does as well."""
    rows: str = ""
    """.jsonl or .parquet: each row's columns are arguments of `reset`, and `prompt` is what the policy is told."""
    size: int = Field(64, ge=1)
    """Without rows: so many prompts, which differ by the argument `seed` of `reset`."""
    reward: str = ""
    """A reward function as TRL takes it. Empty: the environment's `get_reward()`, or else its attribute `reward`."""


class OpenEnvEnvironment(_Environment):
    """A server of OpenEnv."""

    environment: Literal["openenv"]
    url: str
    """Where it listens, e.g. http://127.0.0.1:8000."""
    size: int = Field(64, ge=1)
    """So many prompts, which differ by the argument `seed` of `reset`."""
    seed: int = Field(0, ge=0)
    """Of the first prompt."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `reset`."""
    text_field: str = ""
    """Of an action: what the policy says in a turn is this field. Empty: it calls the tool `step`."""
    reward: Literal["sum", "last"] = "sum"
    """Of the rewards of a trajectory's steps."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("url begins with http:// or https://; a WebSocket is opened at its /ws")
        return value.rstrip("/")


class VerifiersEnvironment(_Environment):
    """An environment of the package verifiers, in a process of its own."""

    environment: Literal["verifiers"]
    id: str
    """What `load_environment` takes; from verifiers 0.4 on that of a taskset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `load_environment`; from verifiers 0.4 on the section `env`."""
    packages: tuple[str, ...] = ("verifiers>=0.3.1,<0.4",)
    """What pip installs for it, once for each list: verifiers, and what the environment needs."""
    python: str = ""
    """An interpreter that has them already; nothing is installed then."""
    split: Literal["train", "eval"] = "train"
    size: int = Field(0, ge=0)
    """Of its rows the first so many; 0 takes all."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the process. It sees none of the trainer's."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Of a whole trajectory."""


AnyEnvironment = TrlEnvironment | OpenEnvEnvironment | VerifiersEnvironment
KINDS: Mapping[str, type[AnyEnvironment]] = {
    "trl": TrlEnvironment,
    "openenv": OpenEnvEnvironment,
    "verifiers": VerifiersEnvironment,
}


def parse_environment(data: Mapping[str, Any], path: Path) -> AnyEnvironment:
    """The environment of a file.

    Raises:
        InputError: there is no such kind, or its keys are wrong.
    """
    kind = data["environment"]
    if kind not in KINDS:
        raise InputError(f"task {path}: there is no kind of environment {kind!r}{did_you_mean(str(kind), KINDS)} "
                         f"It is one of {', '.join(KINDS)}")  # fmt: skip
    try:
        return KINDS[kind].model_validate({"name": path.stem, **data, "folder": path.parent})
    except ValidationError as error:
        raise InputError(f"task {path}: {explain(error, KINDS[kind])}") from error
