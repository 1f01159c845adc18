"""Third-party environments, described by YAML files: the settings of each kind, and the rows of an environment as
tasks. This module holds only data.

    environment: trl            # a Python class in the form of TRL's environment_factory
    factory: wordle.py:Wordle

Relative paths start at the file's folder. Each row of an environment is a task. `loading.py` reads these files;
docs/environments.md is the guide for users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field, ValidationError

from rayapp.config.base import FrozenModel
from rayapp.core.errors import InputError, one_line
from rayapp.core.files import json_lines
from rayapp.core.names import did_you_mean
from rayapp.core.protocols import SandboxSource, Tokenizer
from rayapp.core.types import Prompt, Reward
from rayapp.core.validation import explain


class _Environment(FrozenModel):
    name: str
    """Name of the environment in metrics; by default the file's name."""
    folder: Path
    """Folder of the YAML file. `parse_environment` fills it in."""
    prompt: str = ""
    """User message to the policy, to which the environment's first observation is appended."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Deadline in seconds for each reply of the environment. If it passes, the trajectory fails."""

    def beside(self, path: str) -> str:
        """Return the path within the YAML file's folder if it exists there, otherwise the path unchanged."""
        return str(self.folder / path) if (self.folder / path).exists() else path


class TrlEnvironment(_Environment):
    """An environment in the form of TRL's `environment_factory`: a class whose public methods are tools."""

    environment: Literal["trl"]
    factory: str
    """The class, or a function that returns an environment, as file.py:NAME or package.module:NAME."""
    rows: str = ""
    """.jsonl or .parquet file. The columns of a row are arguments of `reset`; the column `prompt` is the policy's
    prompt."""
    size: int = Field(64, ge=1)
    """Number of tasks if `rows` is empty. Each task calls `reset` with another `seed`."""
    reward: str = ""
    """Reward function in TRL's form, as file.py:NAME or package.module:NAME. If empty, the reward is the environment's
    `get_reward()`, or else its attribute `reward`."""


class OpenEnvEnvironment(_Environment):
    """An environment that a server of OpenEnv runs."""

    environment: Literal["openenv"]
    url: str = Field(pattern="^https?://.*[^/]$")
    """Address of the server, e.g. http://127.0.0.1:8000. Its WebSocket has the path /ws."""
    size: int = Field(64, ge=1)
    """Number of tasks. Each task calls `reset` with another `seed`."""
    seed: int = Field(0, ge=0)
    """Seed of the first task; the following tasks count up from it."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `reset`, in addition to the seed."""
    text_field: str = ""
    """Field of the action that takes the policy's text of a turn. If empty, the policy calls the tool `step` instead of
    writing text."""
    reward: Literal["sum", "last"] = "sum"
    """Rule that makes the trajectory's reward from the rewards of the environment's steps: their sum, or the last
    one."""


class VerifiersEnvironment(_Environment):
    """An environment of the package verifiers, which runs in its own process."""

    environment: Literal["verifiers"]
    id: str
    """Id of the environment for `load_environment`; from verifiers 0.4 on, the id of a taskset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `load_environment`; from verifiers 0.4 on, the config section `env`."""
    packages: tuple[str, ...] = ("verifiers>=0.3.1,<0.4",)
    """Packages that are installed: verifiers and the environment's requirements. Environments with the same list share
    one installation."""
    python: str = ""
    """Path of a Python interpreter that already has the packages. If set, nothing is installed."""
    split: Literal["train", "eval"] = "train"
    size: int = Field(0, ge=0)
    """Number of rows to take, from the first row on; 0 takes all rows."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the environment's process, which does not inherit the trainer's variables."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Deadline in seconds for a whole trajectory."""


AnyEnvironment = TrlEnvironment | OpenEnvEnvironment | VerifiersEnvironment
KINDS: Mapping[str, type[AnyEnvironment]] = {
    "trl": TrlEnvironment,
    "openenv": OpenEnvEnvironment,
    "verifiers": VerifiersEnvironment,
}


def parse_environment(data: Mapping[str, Any], path: Path) -> AnyEnvironment:
    """Return the environment that a file describes. Raises InputError: its kind or keys are wrong."""
    kind = data["environment"]
    if kind not in KINDS:
        raise InputError(f"task {path}: unknown kind of environment {kind!r}{did_you_mean(str(kind), KINDS)} "
                         f"It is one of {', '.join(KINDS)}")  # fmt: skip
    try:
        return KINDS[kind].model_validate({"name": path.stem, **data, "folder": path.parent})
    except ValidationError as error:
        raise InputError(f"task {path}: {explain(error, KINDS[kind])}") from error


Message = Mapping[str, Any]
Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTask:
    """One row of an environment. The environment plays and scores its rows (`rayapp.extras.environments`)."""

    environment: AnyEnvironment
    index: int
    messages: tuple[Message, ...]
    columns: Columns = field(default_factory=dict)
    """Arguments with which the environment is reset."""

    @property
    def name(self) -> str:
        return self.environment.name

    def render(self, tokenizer: Tokenizer) -> Prompt:
        self.refuse()

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise InputError: only the environment can play and score this task."""
        raise InputError(
            f"task {self.name} is an environment: it scores only trajectories that it plays itself. Name it as the "
            "only entry of `tasks`, or as a source of its own in `sources` (docs/environments.md)"
        )


def row_tasks(environment: TrlEnvironment | OpenEnvEnvironment) -> tuple[EnvironmentTask, ...]:
    """Return the rows of an environment whose prompts are known without starting it. Raises InputError."""
    columns: Iterable[Columns]
    if isinstance(environment, OpenEnvEnvironment):
        columns = ({"seed": environment.seed + index, **environment.reset} for index in range(environment.size))
    elif environment.rows:
        columns = _read_rows(Path(environment.beside(environment.rows)))
    else:
        columns = ({"seed": index} for index in range(environment.size))
    return tuple(_task(environment, index, row) for index, row in enumerate(columns))


def _task(environment: AnyEnvironment, index: int, columns: Columns) -> EnvironmentTask:
    prompt = columns.get("prompt", environment.prompt)
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(map(dict, prompt))
    if not messages or not all(isinstance(message.get("content"), str) for message in messages):
        raise InputError(
            f"task {environment.name}, row {index}: prompt must be a text, or a list of messages whose `content` is "
            "text"
        )
    return EnvironmentTask(environment=environment, index=index, messages=messages, columns=columns)


def _read_rows(path: Path) -> list[Columns]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows: list[Columns] = pq.read_table(path).to_pylist()
        else:
            with path.open(encoding="utf-8") as lines:
                rows = [row for _, row in json_lines(lines, path.name)]
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise InputError(f"rows {path} can't be read: {one_line(error)}") from error
    if not rows:
        raise InputError(f"rows {path}: the file has no rows")
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"rows {path}: each line must be a JSON object")
    return rows
