"""Finds tasks by name or file and checks them before anything else starts.

A task is given as the name of a shipped one (`sort_numbers`), a YAML file with the fields of `CodingTask` (with
`based_on`, a shipped task, only those that differ from its), a Python file that binds `TASK` to a `CodingTask` or
any object of the `Task` protocol, or a folder in Harbor's layout. Many tasks are `benchmark:humaneval`,
`reasoning_gym:chain_sum`, a folder of such folders, `repositories`, the shipped ones, and a YAML file of an
environment. Used by the driver, the rollout workers and `rayapp score`. A Python file is run in this process: it is the
user's own.
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

from rayapp.core.errors import InputError
from rayapp.core.names.given import given, is_given
from rayapp.core.names.near import did_you_mean
from rayapp.core.names.plugins import is_plugin, load_plugin, plugin_names
from rayapp.core.protocols import Task
from rayapp.core.validation import explain
from rayapp.tasks.code.benchmarks import PREFIX, load_benchmark
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.environments.files import VerifiersEnvironment, parse_environment
from rayapp.tasks.environments.task import row_tasks
from rayapp.tasks.environments.verifiers import verifiers_tasks
from rayapp.tasks.generators import GENERATED, load_generated
from rayapp.tasks.repository.folder import TRUST
from rayapp.tasks.repository.task import load_repository

_YAML = (".yaml", ".yml")
REPOSITORIES = "repositories"


def shipped_tasks() -> list[str]:
    """Names of the tasks that come with the package."""
    return sorted(Path(entry.name).stem for entry in _library().iterdir() if Path(entry.name).suffix in _YAML)


def shipped_repositories() -> list[str]:
    """Names of the tasks over repositories that come with the package."""
    return sorted(entry.name for entry in _library().joinpath(REPOSITORIES).iterdir() if entry.is_dir())


def _library() -> Traversable:
    return resources.files("rayapp.tasks").joinpath("library")


def load_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks of a run, in order. One that is named twice is there twice, and asked twice as often.

    Raises:
        InputError: there is none, one can't be used, or two have the same name.
    """
    if not names:
        raise InputError(f"tasks is empty: name at least one of {', '.join(shipped_tasks())}, or a .yaml or .py file")
    loaded = {source: load_source(source) for source in dict.fromkeys(names)}
    seen: dict[str, str] = {}
    for source, tasks in loaded.items():
        for task in tasks:
            if seen.setdefault(task.name, source) != source:
                raise InputError(
                    f"two tasks are called {task.name}: {seen[task.name]} and {source}. Metrics go by name."
                )
    return tuple(task for source in names for task in loaded[source])


def load_source(source: str) -> Sequence[Task]:
    """The tasks that one name stands for: of a benchmark they have one name.

    Raises:
        InputError: as `load_task`.
    """
    if source.startswith(PREFIX):
        return load_benchmark(source)
    if source.startswith(GENERATED):
        return load_generated(source)
    if source == REPOSITORIES:
        return [load_task(name) for name in shipped_repositories()]
    folder, trusts_script = _folder_of(source)
    if folder.suffix in _YAML and "environment" in (data := _yaml(_read(folder), source)):
        environment = parse_environment(data, folder)
        return verifiers_tasks(environment) if isinstance(environment, VerifiersEnvironment) else row_tasks(environment)
    if folder.is_dir() and not (folder / "instruction.md").exists():
        found = sorted(entry for entry in folder.iterdir() if (entry / "instruction.md").is_file())
        if not found:
            raise InputError(
                f"folder {source} is no task, and holds none: there is no instruction.md in it or one below"
            )
        return [load_task(f"{entry}?{TRUST}" if trusts_script else str(entry)) for entry in found]
    return (load_task(source),)


def _folder_of(source: str) -> tuple[Path, bool]:
    """A path, and whether the `test.sh` of a task folder there may judge: `terminal-bench?trust_test_scripts=true`.

    Not a key of task.toml: it is for who runs a task to trust it, not for who wrote it.
    """
    folder, _, option = source.rpartition("?")
    if not folder or not Path(folder).is_dir():
        return Path(source), False
    if option != TRUST:
        raise InputError(f"{source}: a task folder has the option {TRUST}, not {option!r} (docs/environments.md)")
    return Path(folder), True


def load_task(source: str) -> Task:
    """One task, checked: its reference has run on the tests of a few seeds.

    Args:
        source: name of a shipped task, or path of a .yaml or .py file or of a task folder.
    Raises:
        InputError: it says what to change, and where.
    """
    path, trusts_script = _folder_of(source)
    if path.is_dir():
        return load_repository(path, path.resolve().name, trusts_script=trusts_script)
    if source in shipped_repositories():
        return load_repository(_library().joinpath(REPOSITORIES, source), source)
    if is_given(source):
        task = _checked_task(given(source), f"{source} has to be")
    elif path.suffix == ".py":
        task = _from_python(path)
    elif path.suffix in _YAML:
        task = _from_yaml(_read(path), source)
    elif source in shipped_tasks():
        task = _from_yaml(_shipped_text(source), source)
    elif is_plugin("tasks", source):
        task = _of_plugin(source)
    else:
        raise InputError(_unknown(source))
    if isinstance(task, CodingTask):
        task.check()
    return task


def _of_plugin(name: str) -> Task:
    """A plug-in is a task, or what makes one when it is called."""
    found = load_plugin("tasks", name)
    made = found() if isinstance(found, type) or not hasattr(found, "score") else found
    return _checked_task(made, f"plug-in {name} has to be, or to give,")


def _unknown(source: str) -> str:
    names = [*shipped_tasks(), *shipped_repositories(), *plugin_names("tasks")]
    paths = "the path of a .yaml or .py file, or of a task folder"
    return f"no task {source!r}{did_you_mean(source, names)} It is one of {', '.join(names)}, or {paths}."


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
    """Fields of the shipped task that another one changes."""
    if base not in shipped_tasks():
        raise InputError(f"task {source}: based_on is {base!r}; it is one of {', '.join(shipped_tasks())}")
    fields: dict[str, object] = yaml.safe_load(_shipped_text(str(base)))
    fields.pop("name", None)
    return _fields_of(fields.pop("based_on"), source) | fields if "based_on" in fields else fields


def _yaml(text: str, source: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"task {source} is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"task {source}: a mapping with prompt, func_name, tests and reference was expected")
    return data


def _from_yaml(text: str, source: str) -> CodingTask:
    data = _yaml(text, source)
    if "environment" in data:
        raise InputError(f"task {source} is an environment: its verdict is on what is done in it, not on a text")
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
    # Dataclasses look their module up while it runs; left there, Ray would pickle the task's class by that name, which
    # no other process can import. Without it the class itself travels.
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except ValidationError as error:
        raise InputError(f"task {path}: {explain(error, CodingTask)}") from error
    except InputError:
        raise
    except Exception as error:  # boundary: the user's file
        raise InputError(f"task file {path} can't run: {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[module.__name__]
    return _checked_task(getattr(module, "TASK", None), f"task file {path} has to bind TASK to")


def _checked_task(task: object, where: str) -> Task:
    if not all(hasattr(task, name) for name in ("name", "render", "score")):
        raise InputError(f"{where} a CodingTask, or an object with name, render and score")
    return task  # type: ignore[return-value]
