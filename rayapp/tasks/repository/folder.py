"""Reads a task folder in Harbor's layout, whole and checked.

instruction.md      what the agent is told
task.toml           limits, and `[metadata.rayapp]`: which files count, and how they pay
environment/        the repository as the agent finds it; a Dockerfile, see `image.py`
tests/test_*.py     hidden tests, see `hidden_tests.py`; or tests/test.sh, where the user trusts it, see `scripts.py`
solution/           the solution's files, in place of the repository's; or solve.sh, which makes them
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayapp.core.errors import InputError
from rayapp.core.validation import explain
from rayapp.tasks.repository.hidden_tests import HiddenTest, read_hidden_tests
from rayapp.tasks.repository.image import why_an_image, workdir_of
from rayapp.tasks.repository.scripts import SOLVE, WORKDIR, TestScript, interpreter_of, why_a_script_needs_an_image

MAX_FILE_BYTES = 1 << 18
_LARGEST_DISK_MIB = 4096
TRUST = "trust_test_scripts=true"
_SCRIPT_TIMEOUT_S, _TESTS_TIMEOUT_S = 600.0, 120.0
"""Harbor's own, and of tests that are taken apart."""
_UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
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


class _Environment(_Section):
    docker_image: str = ""
    workdir: str = Field("", pattern="^(/.*)?$")
    memory_mb: int = Field(512, ge=64)
    storage_mb: int = Field(64, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: dict[str, object]) -> dict[str, object]:
        """`memory = "2G"`, as in tasks of Harbor's first version."""
        return {f"{name}_mb": _mebibytes(values[name]) for name in ("memory", "storage") if name in values} | values


class _Verifier(_Section):
    timeout_sec: float | None = Field(None, gt=0, le=3600)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Environment | None = None


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
    script: TestScript | None
    """Judges in place of the tests."""
    solution: Mapping[str, str]
    """Empty where the folder has none."""
    own: Own
    image: str
    """Image or template that the sandboxes need; empty: any with Python."""
    images: Mapping[str, str]
    """By image that its sandboxes or those of its verdict need: why."""
    workdir: str
    """Where the repository has to lie for a script of Harbor's; empty: there is none."""
    timeout_s: float
    memory_mib: int
    disk_mib: int


def read_folder(folder: Traversable, name: str, *, trusts_script: bool = False) -> TaskFolder:
    """A task folder.

    Args:
        trusts_script: its `tests/test.sh`, where it has one, may judge.
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
    tests = dict(_files(folder.joinpath("tests"), where))
    solution = dict(_texts(folder.joinpath("solution"), where)) if folder.joinpath("solution").is_dir() else {}
    instruction = _text(folder.joinpath("instruction.md"), where).strip()
    if not instruction:
        raise InputError(f"{where}: its instruction.md is empty")
    dockerfile = environment.get("Dockerfile", "")
    is_script = trusts_script and "test.sh" in tests
    workdir = toml.environment.workdir or workdir_of(dockerfile) or WORKDIR
    has_workdir = is_script or SOLVE in solution
    image, why = _image(toml.environment, environment, name)
    if has_workdir and workdir != WORKDIR and not image:
        image, why = name, f"its folder is {workdir}, which only an image has"
    script, script_why = _script(tests, toml.verifier, (image, why), name, where) if is_script else (None, "")
    images = {image: why} | ({script.image: script_why} if script else {})
    return TaskFolder(
        name=name,
        instruction=instruction,
        repository={path: text for path, text in environment.items() if path not in _DOCKER},
        tests=() if is_script else _tests(tests, where),
        script=script,
        solution=solution,
        own=toml.metadata.rayapp,
        image=image,
        images={each: why for each, why in images.items() if each},
        workdir=workdir if has_workdir else "",
        timeout_s=toml.verifier.timeout_sec or (_SCRIPT_TIMEOUT_S if is_script else _TESTS_TIMEOUT_S),
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


def _image(section: _Environment, environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """What sandboxes the task needs, empty for any with Python, and why."""
    if section.docker_image:
        return section.docker_image, "task.toml names it"
    compose = next((file for file in environment if file.startswith("docker-compose")), "")
    why = why_an_image(environment.get("Dockerfile", ""))
    why = f"its Dockerfile, {why}" if why else compose and f"it has a {compose}"
    return (name if why else ""), why


def _script(
    files: Mapping[str, bytes], verifier: _Verifier, agents: tuple[str, str], name: str, where: str
) -> tuple[TestScript, str]:
    """With why it needs its image. That is the agent's, unless Harbor would build another from the folder `tests`."""
    if secret := next((key for key, value in verifier.env.items() if "${" in value), ""):
        raise InputError(f"{where}: its verifier.env.{secret} is a variable of this machine's: none enters a sandbox")
    texts = {path: files.get(path, b"").decode(errors="replace") for path in ("Dockerfile", "test.sh")}
    if not interpreter_of(texts["test.sh"].partition("\n")[0]):
        raise InputError(f"{where}: tests/test.sh can't start: its first line names no program, as `#!/bin/bash` does")
    image, why = agents
    if verifier.environment_mode == "separate" or verifier.environment:
        section = verifier.environment or _Environment()
        image, why = _image(section, texts, f"{name}-tests") if texts["Dockerfile"] or section.docker_image else agents
    if not image and (why := why_a_script_needs_an_image(texts["test.sh"])):
        image = name
    return TestScript(files=files, env=tuple(verifier.env.items()), image=image), why


def _tests(files: Mapping[str, bytes], where: str) -> tuple[HiddenTest, ...]:
    trust = f"To let it judge all the same name the folder FOLDER?{TRUST}, and audit it first"
    script = f"tests/test.sh would run beside the code that it judges, which could forge its reward. {trust}. "
    told = script if "test.sh" in files else ""
    try:
        tests = [
            test
            for path, data in files.items()
            if path.startswith("test") and path.endswith(".py")
            for test in read_hidden_tests(path, data.decode(errors="replace"))
        ]
    except InputError as error:
        raise InputError(f"{where}: tests/{error}{'. ' if told else ''}{told.strip()}") from error
    if not tests:
        raise InputError(
            f"{where}: it has no hidden tests: {told}Write them as asserts in tests/test_*.py (docs/environments.md)"
        )
    return tuple(tests)


def _mebibytes(size: object) -> object:
    """Of `2G`, `512M`, `64K`; anything else as it is, to be refused."""
    text = str(size).upper()
    try:
        return int(float(text[:-1]) * _UNITS[text[-1:]])
    except (KeyError, ValueError):
        return size


def _texts(folder: Traversable, where: str) -> Iterator[tuple[str, str]]:
    """Relative path and text of every file, in order."""
    for path, data in _files(folder, where):
        yield path, _decoded(path, data, where)


def _files(folder: Traversable, where: str, above: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name in _SKIPPED:
            continue
        if entry.is_dir():
            yield from _files(entry, where, f"{above}{entry.name}/")
        else:
            yield above + entry.name, _read(entry, where)


def _text(file: Traversable, where: str) -> str:
    return _decoded(file.name, _read(file, where), where)


def _decoded(name: str, data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: {name} can't be read as text: {error}") from error


def _read(file: Traversable, where: str) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{where}: {file.name} can't be read: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{where}: {file.name} is larger than {MAX_FILE_BYTES >> 10} KiB")
    return data
