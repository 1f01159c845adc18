"""Finds tasks by name or file, and checks them before a run starts.

| source | task |
|---|---|
| `sort_numbers` | a shipped task |
| a YAML file | the fields of `CodingTask`; with `based_on: TASK`, only the fields that differ from this shipped task |
| a Python file | its name `TASK`: a `CodingTask`, or any object of the `Task` protocol. Trusted, runs in this process |
| a folder | one task in Harbor's layout |
| `benchmark:humaneval`, `reasoning_gym:chain_sum`, `repositories` | all tasks of this benchmark or generator |
| `swe:rows.parquet?mirrors=FOLDER` | all tasks of a file in SWE-bench's form |
| a folder of task folders, an environment's YAML file | all tasks in it |

The driver, the rollout workers and `rayapp score` call this module. The module of a kind of task is imported when a
source names such a task: all of them take longer than the rest of `rayapp score`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import ValidationError

from rayapp.config.agent import BENCHMARK, GENERATED, SWE, TRUST
from rayapp.core.errors import InputError
from rayapp.core.names import did_you_mean, given, is_given, load_extra
from rayapp.core.protocols import Task
from rayapp.core.validation import explain
from rayapp.tasks.coding import CodingTask

_YAML = (".yaml", ".yml")
REPOSITORIES = "repositories"
# Kind of task -> its loader in `rayapp.extras`.
EXTRAS = {
    "repository": "repositories.task:load_repository",
    "swe": "repositories.swe:load_swe",
    "generated": "generators.reasoning_gym:load_generated",
    "environment": "environments.verifiers:environment_tasks",
}


def shipped_tasks() -> list[str]:
    return sorted(Path(entry.name).stem for entry in _library().iterdir() if Path(entry.name).suffix in _YAML)


def shipped_repositories() -> list[str]:
    return sorted(entry.name for entry in _library().joinpath(REPOSITORIES).iterdir() if entry.is_dir())


def _library() -> Traversable:
    return resources.files("rayapp.tasks").joinpath("library")


def load_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """Return the tasks of a run, in order; one that is named twice is sampled twice as often. InputError: a task can't
    be used, or two have one name."""
    if not names:
        raise InputError(f"tasks is empty: name at least one of {', '.join(shipped_tasks())}, or a .yaml or .py file")
    loaded = {source: load_source(source) for source in dict.fromkeys(names)}
    seen: dict[str, str] = {}
    for source, tasks in loaded.items():
        for task in tasks:
            if seen.setdefault(task.name, source) != source:
                raise InputError(
                    f"two tasks have the name {task.name}: {seen[task.name]} and {source}. Rename one: metrics are "
                    "recorded by name"
                )
    return tuple(task for source in names for task in loaded[source])


def load_source(source: str) -> Sequence[Task]:
    """Return the tasks of one source. All tasks of a benchmark have the same name."""
    if source.startswith(BENCHMARK):
        from rayapp.tasks.code.benchmarks import load_benchmark

        return load_benchmark(source)
    if source.startswith(GENERATED):
        return _loaded("generated", source)
    if source.startswith(SWE):
        return _loaded("swe", source)
    folder, _ = _folder_of(source)
    if folder.suffix in _YAML and "environment" in (data := _yaml(_read(folder), source)):
        return _loaded("environment", data, folder)
    return [load_task(single) for single in single_tasks(source)]


def _loaded(kind: str, *arguments: object) -> Sequence[Task]:
    tasks: Sequence[Task] = load_extra(EXTRAS[kind])(*arguments)
    return tasks


def single_tasks(source: str) -> list[str]:
    """Return one source for each task in a folder of tasks or in `repositories`; return any other source unchanged."""
    if source == REPOSITORIES:
        return shipped_repositories()
    folder, trusts_script = _folder_of(source)
    if not folder.is_dir() or (folder / "instruction.md").exists():
        return [source]
    found = sorted(entry for entry in folder.iterdir() if (entry / "instruction.md").is_file())
    if not found:
        raise InputError(f"folder {source} holds no task: neither it nor a folder in it has an instruction.md")
    return [f"{entry}?{TRUST}" if trusts_script else str(entry) for entry in found]


def _folder_of(source: str) -> tuple[Path, bool]:
    """Split `terminal-bench?trust_test_scripts=true` into path, and True if a folder's `test.sh` may judge. The user
    who runs a task decides whether to trust it, not its author: this is no key of task.toml."""
    folder, _, option = source.rpartition("?")
    if not folder or not Path(folder).is_dir():
        return Path(source), False
    if option != TRUST:
        raise InputError(f"{source}: unknown option {option!r}: a task folder has only {TRUST} (docs/environments.md)")
    return Path(folder), True


def load_task(source: str) -> Task:
    """Return the task of this name, file or folder, after its reference has run on the tests of a few seeds."""
    path, trusts_script = _folder_of(source)
    if path.is_dir():
        return _repository_task(path, path.resolve().name, trusts_script=trusts_script)
    if source in shipped_repositories():
        return _repository_task(_library().joinpath(REPOSITORIES, source), source)
    if is_given(source):
        task = _checked_task(given(source), f"{source} must be")
    elif path.suffix == ".py":
        task = _from_python(path)
    elif path.suffix in _YAML:
        task = _from_yaml(_read(path), source)
    elif source in shipped_tasks():
        task = _from_yaml(_shipped_text(source), source)
    else:
        raise InputError(_unknown(source))
    if isinstance(task, CodingTask):
        task.check()
    return task


def _repository_task(folder: Traversable, name: str, *, trusts_script: bool = False) -> Task:
    task: Task = load_extra(EXTRAS["repository"])(folder, name, trusts_script=trusts_script)
    return task


def _unknown(source: str) -> str:
    names = [*shipped_tasks(), *shipped_repositories()]
    paths = "the path of a .yaml or .py file, of a task folder, or, in a configuration, of a .parquet or .jsonl file"
    return f"there is no task {source!r}{did_you_mean(source, names)} Name one of {', '.join(names)}, or {paths}."


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no task file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"task file {path} can't be read: {error}") from error


def _shipped_text(name: str) -> str:
    return _library().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _fields_of(base: object, source: str) -> dict[str, object]:
    if base not in shipped_tasks():
        raise InputError(f"task {source}: based_on is {base!r}: it must be one of {', '.join(shipped_tasks())}")
    fields: dict[str, object] = yaml.safe_load(_shipped_text(str(base)))
    fields.pop("name", None)
    return _fields_of(fields.pop("based_on"), source) | fields if "based_on" in fields else fields


def _yaml(text: str, source: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"task {source} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"task {source}: it must be a mapping with prompt, func_name, tests and reference")
    return data


def _from_yaml(text: str, source: str) -> CodingTask:
    data = _yaml(text, source)
    if "environment" in data:
        raise InputError(
            f"task {source} is an environment: it scores only trajectories that it plays itself. Name it as the only "
            "entry of `tasks`, or as a source of its own in `sources` (docs/environments.md)"
        )
    if "based_on" in data:
        data = _fields_of(data.pop("based_on"), source) | data
    data.setdefault("name", Path(source).stem)
    try:
        return CodingTask.model_validate(data)
    except ValidationError as error:
        raise InputError(f"task {source}: {explain(error, CodingTask)}") from error


def _from_python(path: Path) -> Task:
    code = _read(path)
    module = ModuleType(f"rayapp_task_{path.stem}")
    module.__file__ = str(path)
    # Register the module while its code runs, because dataclasses look it up. Remove it afterwards: otherwise Ray would
    # pickle the task's class by the module's name, which other processes can't import. Without the module, Ray pickles
    # the class itself.
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except ValidationError as error:
        raise InputError(f"task {path}: {explain(error, CodingTask)}") from error
    except InputError:
        raise
    except Exception as error:  # boundary: the user's file may raise anything
        raise InputError(f"task file {path} can't be imported: {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[module.__name__]
    return _checked_task(getattr(module, "TASK", None), f"task file {path} must bind TASK to")


def _checked_task(task: object, where: str) -> Task:
    if not all(hasattr(task, name) for name in ("name", "render", "score")):
        raise InputError(f"{where} a CodingTask, or an object with name, render and score")
    return task  # type: ignore[return-value]
