"""Reads and checks a task folder in Harbor's layout.

    instruction.md      the agent's instruction
    task.toml           limits; `[metadata.rayapp]` says which files belong to an answer, and how it is scored
    environment/        the repository at the start; or a Dockerfile, which copies this folder
    tests/test_*.py     hidden tests (`hidden_tests.py`); or tests/test.sh, if the user trusts it (`scripts.py`)
    solution/           the solution's files, which replace the repository's; or solve.sh, which makes them

A Dockerfile that only copies its folder into an image needs that image, or none if it is one of Python, Debian or
Ubuntu. Any other has to be built (docs/environments.md): then the image has the repository.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayapp.config.agent import TRUST
from rayapp.core.errors import InputError
from rayapp.core.validation import explain
from rayapp.extras.repositories.hidden_tests import HiddenTest, read_hidden_tests
from rayapp.extras.repositories.named_tests import NamedTests
from rayapp.extras.repositories.scripts import SOLVE, WORKDIR, TestScript, interpreter_of, why_a_script_needs_an_image
from rayapp.sandbox.images import PREFIX

_PYTHON = re.compile(r"(?:docker\.io/)?(?:library/)?python:(\d+\.\d+)[\w.-]*")
_BARE = re.compile(r"(?:docker\.io/)?(?:library/)?(?:debian|ubuntu|python)(?::[\w.-]*)?")
_HARMLESS = frozenset({"WORKDIR", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "USER", "SHELL"})
_HERE = frozenset({".", "./"})


def why_an_image(dockerfile: str, workdir: str = "") -> str:
    """Return a Dockerfile's first line that needs more than a plain Python sandbox, and why; empty without one.

    Args:
        workdir: folder to which the Dockerfile must copy its files; empty for any.
    """
    for number, words, why in _needs(dockerfile, workdir):
        return f"line {number}, `{' '.join(words)[:80]}`: {why}"
    return ""


def base_image(dockerfile: str, workdir: str = "") -> str:
    """Return the image of a Dockerfile that otherwise only copies its folder and sets variables; else an empty text."""
    bases = [words for _, words in _instructions(dockerfile) if words[0].upper() == "FROM"]
    only_base = all(words in bases for _, words, _ in _needs(dockerfile, workdir))
    return bases[0][1] if only_base and [len(words) for words in bases] == [2] and "$" not in dockerfile else ""


def _needs(dockerfile: str, workdir: str) -> Iterator[tuple[int, list[str], str]]:
    at = PurePosixPath(workdir)
    for number, words in _instructions(dockerfile):
        name, rest = words[0].upper(), words[1:]
        why = ""
        if name == "FROM":
            why = _of_base(rest[0] if rest else "")
        elif name == "WORKDIR":
            at /= rest[-1] if rest else ""
        elif name == "COPY":
            why = _of_copy(rest, at, workdir)
        elif name not in _HARMLESS:
            why = "rayapp builds no images"
        if why:
            yield number, words, why


def _of_copy(words: Sequence[str], at: PurePosixPath, workdir: str) -> str:
    if len(words) != 2 or words[0] not in _HERE:
        return "it copies more than its own folder"
    is_there = not workdir or posixpath.normpath(at / words[1]) == workdir
    return "" if is_there else f"it copies to another folder than {workdir}, the working folder"


def _copies_its_folder(dockerfile: str) -> bool:
    return any(words[0].upper() == "COPY" and _HERE & {*words[1:2]} for _, words in _instructions(dockerfile))


def variables_of(dockerfile: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for _, words in _instructions(dockerfile):
        if words[0].upper() != "ENV" or len(words) < 2:
            continue
        try:
            parts = shlex.split(" ".join(words[1:]))
        except ValueError:
            parts = words[1:]
        is_old_form = "=" not in parts[0]
        found |= {parts[0]: " ".join(parts[1:])} if is_old_form else dict(_pair(part) for part in parts)
    return found


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name, value


def _built(name: str) -> str:
    return f"{PREFIX}build:{re.sub(r'[^A-Za-z0-9._-]', '-', name)}"


def workdir_of(dockerfile: str) -> str:
    return next((words[-1] for _, words in reversed(_instructions(dockerfile)) if words[0].upper() == "WORKDIR"), "")


def _of_base(image: str) -> str:
    if (found := _PYTHON.fullmatch(image)) is not None:
        have = f"{sys.version_info.major}.{sys.version_info.minor}"
        return "" if found[1] == have else f"this node has Python {have}"
    return "" if _BARE.fullmatch(image) else "it is not plain Python, Debian or Ubuntu"


def _instructions(dockerfile: str) -> list[tuple[int, list[str]]]:
    """Return a Dockerfile's instructions as (number of the first line, words)."""
    found: list[tuple[int, list[str]]] = []
    begun, words = 0, list[str]()
    for number, line in enumerate(dockerfile.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        begun = begun or number
        words += text.removesuffix("\\").split()
        if not text.endswith("\\"):
            found.append((begun, words))
            begun, words = 0, []
    return [*found, *([(begun, words)] if words else [])]


MAX_FILE_BYTES = 1 << 18
_LARGEST_DISK_MIB = 4096
_SCRIPT_TIMEOUT_S, _TESTS_TIMEOUT_S = 600.0, 120.0  # Harbor's limit for test.sh, and rayapp's for hidden tests.
_UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_DOCKER = frozenset({"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"})
_SKIPPED = frozenset({"__pycache__", ".git", ".pytest_cache", ".DS_Store"})


class _Section(BaseModel):
    """Section of task.toml; unknown keys belong to Harbor."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Own(BaseModel):
    """Section `[metadata.rayapp]` of task.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    answer: tuple[str, ...] = ("*",)  # Patterns of paths that belong to an answer; changes to other files are ignored.
    # all: 1 if every test passes, else 0; share: the fraction of tests that pass.
    score: Literal["all", "share"] = "all"
    # Largest number of additional runs of a trusted test.sh, each with one wrong expectation, to find forged verdicts.
    sentinels: int = Field(12, ge=0, le=64)


class _Metadata(_Section):
    rayapp: Own = Own()


class _TaskEnvironment(_Section):
    docker_image: str = ""
    workdir: str = Field("", pattern="^(/.*)?$")
    memory_mb: int = Field(512, ge=64)
    storage_mb: int = Field(64, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: dict[str, object]) -> dict[str, object]:
        """Accept `memory = "2G"`, as in Harbor's first version."""
        return {f"{name}_mb": _mebibytes(values[name]) for name in ("memory", "storage") if name in values} | values


class _Verifier(_Section):
    timeout_sec: float | None = Field(None, gt=0, le=3600)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _TaskEnvironment | None = None


class _Toml(_Section):
    metadata: _Metadata = _Metadata()
    verifier: _Verifier = _Verifier()
    environment: _TaskEnvironment = _TaskEnvironment()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    name: str
    instruction: str
    repository: Mapping[str, str]  # Path -> text of the repository's files; empty if the image has them.
    is_in_image: bool = False  # True if workspaces and verdicts use the files of an image that the Dockerfile built.
    tests: tuple[HiddenTest, ...]
    script: TestScript | None  # Script that judges instead of `tests`; None without a trusted one.
    # Repository's own tests that judge instead of `tests` and `script`, for rows in SWE-bench's form.
    named: NamedTests | None = None
    solution: Mapping[str, str]  # Path -> text; empty without a solution.
    own: Own
    image: str  # Image or template that the sandboxes need; empty if any sandbox with Python is enough.
    images: Mapping[str, str]  # Image that workspaces or verdicts need -> the reason for it.
    # Folder at which Harbor's scripts expect the repository, or in which an image has it; empty without both.
    workdir: str
    image_workdir: str  # Repository's folder in the image; empty for the image's working folder.
    env: tuple[tuple[str, str], ...]  # Variables that the Dockerfile adds to those of its image.
    timeout_s: float
    memory_mib: int
    disk_mib: int


def read_folder(folder: Traversable, name: str, *, trusts_script: bool = False) -> TaskFolder:
    """Read a task folder and check its contents. With `trusts_script`, its `tests/test.sh` judges, if there is one.

    Raises InputError: a part is missing or can't be used; the message names the way out.
    """
    where = f"task {name}"
    for part in ("instruction.md", "task.toml", "environment", "tests"):
        found = folder.joinpath(part)
        if not (found.is_file() or found.is_dir()):
            raise InputError(f"{where}: it has no {part} (docs/environments.md)")
    toml = _read_toml(folder.joinpath("task.toml"), where)
    beside = folder.joinpath("environment")
    recipe = {name: _text(file, where) for name in sorted(_DOCKER) if (file := beside.joinpath(name)).is_file()}
    tests = dict(_files(folder.joinpath("tests"), where))
    solution = dict(_texts(folder.joinpath("solution"), where)) if folder.joinpath("solution").is_dir() else {}
    instruction = _text(folder.joinpath("instruction.md"), where).strip()
    if not instruction:
        raise InputError(f"{where}: its instruction.md is empty")
    dockerfile = recipe.get("Dockerfile", "")
    is_script = trusts_script and "test.sh" in tests
    workdir = toml.environment.workdir or workdir_of(dockerfile) or WORKDIR
    image, why = _image(toml.environment, recipe, name, workdir)
    has_scripts = is_script or SOLVE in solution
    if has_scripts and workdir != WORKDIR and not image:
        base = base_image(dockerfile, workdir)
        image, why = (
            f"{PREFIX}{base}" if base else _built(name),
            f"its working folder is {workdir}, which exists only in an image",
        )
    is_in_image = bool(dockerfile and (toml.environment.docker_image or image == _built(name)))
    has_files = not is_in_image and (not dockerfile or _copies_its_folder(dockerfile))
    files = {path: text for path, text in _texts(beside, where) if path not in _DOCKER} if has_files else {}
    script, script_why = _script(tests, toml.verifier, (image, why), name, where) if is_script else (None, "")
    images = {image: why} | ({script.image: script_why} if script else {})
    return TaskFolder(
        name=name,
        instruction=instruction,
        repository=files,
        is_in_image=is_in_image,
        tests=() if is_script else _tests(tests, where),
        script=script,
        solution=solution,
        own=toml.metadata.rayapp,
        image=image,
        images={each: why for each, why in images.items() if each},
        workdir=workdir if has_scripts or is_in_image else "",
        image_workdir=(toml.environment.workdir or workdir_of(dockerfile)) if image else "",
        env=tuple(variables_of(dockerfile).items()) if image else (),
        timeout_s=toml.verifier.timeout_sec or (_SCRIPT_TIMEOUT_S if is_script else _TESTS_TIMEOUT_S),
        memory_mib=toml.environment.memory_mb,
        disk_mib=min(toml.environment.storage_mb, _LARGEST_DISK_MIB),
    )


def _read_toml(file: Traversable, where: str) -> _Toml:
    try:
        return _Toml.model_validate(tomllib.loads(_text(file, where)))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: its task.toml is not TOML: {error}") from error
    except ValidationError as error:
        raise InputError(f"{where}: its task.toml: {explain(error, _Toml)}") from error


def _image(section: _TaskEnvironment, recipe: Mapping[str, str], name: str, workdir: str = "") -> tuple[str, str]:
    """Return the image that the task needs, and why; two empty texts if any sandbox with Python is enough.

    Args:
        recipe: name -> text of the files that say how the image is built.
        workdir: folder to which the Dockerfile must copy its files, or else an image has to be built; empty for any.
    """
    if section.docker_image:
        return f"{PREFIX}{section.docker_image}", "task.toml names it"
    dockerfile = recipe.get("Dockerfile", "")
    other = next((file for file in sorted(recipe) if file in _DOCKER - {"Dockerfile"}), "")
    why = why_an_image(dockerfile, workdir)
    if why and not other and (base := base_image(dockerfile, workdir)):
        return f"{PREFIX}{base}", f"its Dockerfile, {why}"
    why = f"its Dockerfile, {why}" if why else other and f"it has a {other}"
    return (_built(name) if why else ""), why


def _script(
    files: Mapping[str, bytes], verifier: _Verifier, agents: tuple[str, str], name: str, where: str
) -> tuple[TestScript, str]:
    """Return the script, and why it needs its image: the agents', or one that Harbor would build from `tests`."""
    if secret := next((key for key, value in verifier.env.items() if "${" in value), ""):
        raise InputError(
            f"{where}: its verifier.env.{secret} takes its value from an environment variable of this machine, which "
            "may not enter a sandbox. Leave this key out"
        )
    texts = {path: files.get(path, b"").decode(errors="replace") for path in ("Dockerfile", "test.sh")}
    if not interpreter_of(texts["test.sh"].partition("\n")[0]):
        raise InputError(
            f"{where}: tests/test.sh can't start: its first line names no program. Begin it with `#!/bin/bash`"
        )
    image, why = agents
    if verifier.environment_mode == "separate" or verifier.environment:
        section = verifier.environment or _TaskEnvironment()
        image, why = _image(section, texts, f"{name}-tests") if texts["Dockerfile"] or section.docker_image else agents
    if not image and (why := why_a_script_needs_an_image(texts["test.sh"])):
        image = _built(name)
    return TestScript(files=files, env=tuple(verifier.env.items()), image=image), why


def _tests(files: Mapping[str, bytes], where: str) -> tuple[HiddenTest, ...]:
    trust = f"To use the script nevertheless, write the task's name as FOLDER?{TRUST}; audit the task first"
    script = f"tests/test.sh is not used: the code under test runs beside it and could forge the reward. {trust}. "
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
            f"{where}: it has no hidden tests. {told}{'Or write' if told else 'Write'} hidden tests as asserts in "
            "tests/test_*.py (docs/environments.md)"
        )
    return tuple(tests)


def _mebibytes(size: object) -> object:
    """Convert `2G`, `512M` or `64K` to MiB. Any other value stays, so that pydantic refuses it."""
    text = str(size).upper()
    try:
        return int(float(text[:-1]) * _UNITS[text[-1:]])
    except (KeyError, ValueError):
        return size


def _texts(folder: Traversable, where: str) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every file, in order."""
    for path, entry in _entries(folder):
        yield path, _decoded(path, _read(entry, where), where)


def _files(folder: Traversable, where: str) -> Iterator[tuple[str, bytes]]:
    for path, entry in _entries(folder):
        yield path, _read(entry, where)


def _entries(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name in _SKIPPED:
            continue
        if entry.is_dir():
            yield from _entries(entry, f"{above}{entry.name}/")
        else:
            yield above + entry.name, entry


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
