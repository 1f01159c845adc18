"""Rows of an environment as tasks: what the policy is told, and where the environment begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rayapp.core.errors import InputError
from rayapp.core.files import json_lines
from rayapp.core.protocols import SandboxSource, Tokenizer
from rayapp.core.types import Prompt, Reward
from rayapp.tasks.environments.files import AnyEnvironment, OpenEnvEnvironment, TrlEnvironment

Message = Mapping[str, Any]
Columns = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTask:
    """One row. It is played in its environment, which also gives the verdict (`rayapp.rollout.environments`)."""

    environment: AnyEnvironment
    index: int
    messages: tuple[Message, ...]
    columns: Columns = field(default_factory=dict)
    """Arguments of `reset`."""

    @property
    def name(self) -> str:
        return self.environment.name

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Raises InputError."""
        self._refuse()

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Raises InputError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"task {self.name} is an environment: its verdict is on what is done in it, and there is none on a text. "
            "Train or evaluate with it alone in `tasks`, or in a source of its own (docs/environments.md)"
        )


def row_tasks(environment: TrlEnvironment | OpenEnvEnvironment) -> tuple[EnvironmentTask, ...]:
    """The rows of an environment whose prompts are known here.

    Raises:
        InputError: its file of rows can't be used.
    """
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
        raise InputError(f"task {environment.name}, row {index}: prompt has to be a text, or messages of text")
    return EnvironmentTask(environment=environment, index=index, messages=messages, columns=columns)


def _read_rows(path: Path) -> list[Columns]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows: list[Columns] = pq.read_table(path).to_pylist()
        else:
            with path.open(encoding="utf-8") as lines:
                rows = [row for _, row in json_lines(lines, path.name)]
    except (OSError, ValueError) as error:  # pyarrow's errors are of these
        raise InputError(f"rows {path} can't be read: {' '.join(str(error).split())[:200]}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(
            f"rows {path}: a JSON object a line (.jsonl) or a .parquet file was expected, and at least one"
        )
    return rows
