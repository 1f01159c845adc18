"""Reads a task folder in Harbor's layout, whole and checked.

instruction.md      what the agent is told
task.toml           limits, and `[metadata.rayapp]`: which files count, and how they pay
environment/        the repository as the agent finds it; a Dockerfile, see `image.py`
tests/test_*.py     hidden tests, see `hidden_tests.py`
solution/           the solution's files, in place of the repository's
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayapp.core.errors import InputError
from rayapp.core.validation import explain
from rayapp.tasks.repository.hidden_tests import HiddenTest, read_hidden_tests
from rayapp.tasks.repository.image import why_an_image

MAX_FILE_BYTES = 1 << 18
_LARGEST_DISK_MIB = 4096
_DOCKER = frozenset({"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"})
_SKIPPED = frozenset({"__pycache__", ".git", ".pytest_cache", ".DS_Store"})


class _Section(BaseModel):
    """Other keys are Harbor's, and nothing to us."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Own(BaseModel):
    """`[metadata.rayapp]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    answer: tuple[str, ...] = ("*",)
    """Patterns of the files that count; changes of others are left out."""
    score: Literal["all", "share"] = "all"
    """all: 1 where every test is passed, else 0. share: tests passed / tests."""


class _Metadata(_Section):
    rayapp: Own = Own()


class _Verifier(_Section):
    timeout_sec: float = Field(120.0, gt=0, le=3600)


class _Environment(_Section):
    docker_image: str = ""
    memory_mb: int = Field(512, ge=64)
    storage_mb: int = Field(64, ge=1)


class _Toml(_Section):
    metadata: _Metadata = _Metadata()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """What a folder holds."""

    name: str
    instruction: str
    repository: Mapping[str, str]
    tests: tuple[HiddenTest, ...]
    solution: Mapping[str, str]
    """Empty where the folder has none."""
    own: Own
    image: str
    """Image or template that the sandboxes need; empty: any with Python."""
    timeout_s: float
    memory_mib: int
    disk_mib: int


def read_folder(folder: Traversable, name: str) -> TaskFolder:
    """A task folder.

    Raises:
        InputError: a part is missing or can't be used; says which, and the way out.
    """
    where = f"task {name}"
    for part in ("instruction.md", "task.toml", "environment", "tests"):
        found = folder.joinpath(part)
        if not (found.is_file() or found.is_dir()):
            raise InputError(f"{where}: there is no {part} in it (docs/environments.md)")
    toml = _read_toml(folder.joinpath("task.toml"), where)
    environment = dict(_texts(folder.joinpath("environment"), where))
    image = _image(toml.environment.docker_image, environment, name)
    solution = folder.joinpath("solution")
    instruction = _text(folder.joinpath("instruction.md"), where).strip()
    if not instruction:
        raise InputError(f"{where}: its instruction.md is empty")
    return TaskFolder(
        name=name,
        instruction=instruction,
        repository={path: text for path, text in environment.items() if path not in _DOCKER},
        tests=_tests(folder.joinpath("tests"), where),
        solution=dict(_texts(solution, where)) if solution.is_dir() else {},
        own=toml.metadata.rayapp,
        image=image,
        timeout_s=toml.verifier.timeout_sec,
        memory_mib=toml.environment.memory_mb,
        disk_mib=min(toml.environment.storage_mb, _LARGEST_DISK_MIB),
    )


def _read_toml(file: Traversable, where: str) -> _Toml:
    try:
        return _Toml.model_validate(tomllib.loads(_text(file, where)))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: its task.toml is no TOML: {error}") from error
    except ValidationError as error:
        raise InputError(f"{where}: its task.toml: {explain(error, _Toml)}") from error


def _image(docker_image: str, environment: Mapping[str, str], name: str) -> str:
    """What sandboxes the task needs; empty: any with Python."""
    if docker_image:
        return docker_image
    needs_one = any(file.startswith("docker-compose") for file in environment)
    return name if needs_one or why_an_image(environment.get("Dockerfile", "")) else ""


def _tests(folder: Traversable, where: str) -> tuple[HiddenTest, ...]:
    files = [(path, text) for path, text in _texts(folder, where) if path.startswith("test") and path.endswith(".py")]
    try:
        tests = [test for path, text in files for test in read_hidden_tests(path, text)]
    except InputError as error:
        raise InputError(f"{where}: tests/{error}") from error
    if not tests:
        script = "tests/test.sh would be graded beside the code that it judges, which could forge it. "
        told = script if folder.joinpath("test.sh").is_file() else ""
        raise InputError(
            f"{where}: it has no hidden tests: {told}Write them as asserts in tests/test_*.py (docs/environments.md)"
        )
    return tuple(tests)


def _texts(folder: Traversable, where: str, above: str = "") -> Iterator[tuple[str, str]]:
    """Relative path and text of every file, in order."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name in _SKIPPED:
            continue
        if entry.is_dir():
            yield from _texts(entry, where, f"{above}{entry.name}/")
        else:
            yield above + entry.name, _text(entry, where)


def _text(file: Traversable, where: str) -> str:
    try:
        data = file.read_bytes()
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{where}: {file.name} is larger than {MAX_FILE_BYTES >> 10} KiB")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {file.name} can't be read as text: {error}") from error
