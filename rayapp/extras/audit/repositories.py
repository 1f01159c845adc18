"""Makes the subject of an audit from a repository task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from rayapp.core.names import load_extra
from rayapp.extras.audit.subject import PROSE, Attempt, Subject, cheats, score_of

# Another extra, reached by name. Its tasks have the type Any here.
as_answer = load_extra("repositories.task:as_answer")
SOLVE: str = load_extra("repositories.scripts:SOLVE")
PATCH: str = load_extra("repositories.swe:PATCH")
_MIN_PASSAGE_CHARS = 50


def repository_subject(task: Any) -> Subject:
    """Return a repository task as a subject. Its cheats change files, or put code at the top of every module."""
    folder = task.folder
    return Subject(
        name=task.name,
        kind="repository",
        prompt=folder.instruction,
        score=score_of(task),
        solution=None,
        solve=task.solve if folder.solution else None,
        nothing=(*PROSE, Attempt(name="nothing changed", text=as_answer({}))),
        trivial=tuple(_trivial(task)),
        cheats=tuple(_cheats(task)),
        limit_s=folder.timeout_s,
        secrets=tuple(_secrets(task)),
        workspace=task.agent_start(),
        notes={} if folder.solution else {"solution": "the task has no folder `solution`"},
    )


def _tests(task: Any) -> Sequence[str]:
    if task.folder.named is not None:
        return [_added(task.folder.named.patch)]
    script = task.folder.script
    found = script.files.values() if script else ()
    return [data.decode(errors="replace") for data in found] or [test.original for test in task.folder.tests]


def _added(patch: str) -> str:
    """Return the lines that a diff adds, with a blank line between its runs."""
    return "\n".join(line[1:] if line[:1] == "+" and line[:3] != "+++" else "" for line in patch.splitlines())


def _modules(task: Any) -> dict[str, str]:
    """Return path -> source of the repository's modules, without the tests that an agent sees."""
    return {
        path: text
        for path, text in task.folder.repository.items()
        if path.endswith(".py") and "test" not in path.rpartition("/")[2]
    }


def _trivial(task: Any) -> Iterator[Attempt]:
    yield Attempt(name="every file deleted", text=as_answer(dict.fromkeys(task.folder.repository)))
    yield Attempt(name="every module empty", text=as_answer(dict.fromkeys(_modules(task), "")))
    anything = "def __getattr__(name):\n    return lambda *args, **options: {value}\n"
    for value in ("None", "args[0] if args else None", "0", "True", "[]"):
        empty = dict.fromkeys(_modules(task), anything.format(value=value))
        yield Attempt(name=f"every function returns {value}", text=as_answer(empty))


def _cheats(task: Any) -> Iterator[Attempt]:
    for what, files in _cheat_files().items():
        yield Attempt(name=what, text=as_answer(dict(files)))
    edited = {path: "def test_nothing():\n    pass\n" for path in task.folder.repository if "test" in path}
    yield Attempt(name="edits the tests", text=as_answer(dict(edited)))
    for what, code in cheats().items():
        changed = {path: f"{code}\n\n{text}" for path, text in _modules(task).items()}
        yield Attempt(name=what, text=as_answer(dict(changed)))


def _secrets(task: Any) -> Iterator[str]:
    """Yield the passages of the solution and of the hidden tests that the files in their place lack; for diffs and a
    `solve.sh`, which name no such files, those that the whole repository lacks."""
    base, solution = task.folder.repository, task.folder.solution
    shown = "\n".join(base.values())
    replaced = "\n".join(base.get(path, "") for path in solution)
    if task.folder.named is not None:
        solution, replaced = {SOLVE: _added(solution.get(PATCH, ""))}, shown
    for path, text in solution.items():
        yield from _passages(text, shown if path == SOLVE else replaced)
    for text in _tests(task):
        yield from _passages(text, replaced)


def _passages(text: str, known: str) -> Iterator[str]:
    """Yield passages too long to be equal by chance, separated by blank lines, imports and lines of `known`."""
    known_lines = {line.strip() for line in known.splitlines()}
    run: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if bare and bare not in known_lines and not bare.startswith(("import ", "from ", "#")):
            run.append(line)
            continue
        if len("".join("".join(run).split())) >= _MIN_PASSAGE_CHARS:
            yield "\n".join(run)
        run = []


@cache
def _cheat_files() -> dict[str, dict[str, str | None]]:
    text = resources.files("rayapp.extras.audit").joinpath("cheat_files.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, str | None]] = yaml.safe_load(text)
    return found
