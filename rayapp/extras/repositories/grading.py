"""Makes the verdict on changed files: hidden tests run in a fresh sandbox, which gets only the repository with the
changes.

    changed files -> repository with the changes -> one interpreter per test -> values of its probes -> compared outside

No expected value enters the sandbox. Of an agent's workspace, only the changed files do: no process, no bytecode, no
file that is not part of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rayapp.core.protocols import Sandbox
from rayapp.core.types import Reward
from rayapp.extras.repositories.hidden_tests import PROBE, HiddenTest, all_hold
from rayapp.tasks.text_process import holds

_ENTRY = "_rayapp_entry"
_INSIDE = f"""
def {_ENTRY}(files, source, image_folder):
    import os, shutil, sys, tempfile
    folder = tempfile.mkdtemp()
    if image_folder:
        start = image_folder if os.path.isdir(image_folder) else os.getcwd()
        shutil.copytree(start, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns('.git'))
    for path, text in files.items():
        target = os.path.join(folder, path)
        if os.path.lexists(target) and (text is None or os.path.islink(target)):
            os.unlink(target)
        if text is None:
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, 'w', encoding='utf-8', newline='') as file:
            file.write(text)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    values = []
    def plain(value):
        for kind in (bool, int, float, str, bytes):
            if isinstance(value, kind):
                return kind(value)
        for kind in (list, tuple, set):
            if isinstance(value, kind):
                return kind([plain(part) for part in value])
        if isinstance(value, dict):
            return {{plain(key): plain(item) for key, item in value.items()}}
        return value
    names = {{'__name__': 'hidden', {PROBE!r}: lambda value: values.append(plain(value))}}
    exec(compile(source, '<hidden test>', 'exec'), names)
    return values
"""


async def run_tests(
    sandbox: Sandbox,
    repository: Mapping[str, str | None],
    tests: Sequence[HiddenTest],
    *,
    timeout_s: float,
    image_folder: str = "",
) -> list[str]:
    """Run every test, each in its own interpreter. Return why each failed; an empty text for one that passed.

    Args:
        repository: relative path -> text; None for a deleted file.
        image_folder: folder of the image, or else its working folder, to a copy of which `repository` is added.
        timeout_s: limit for all tests together; tests that have not run by then fail.
    Raises SandboxError, and TextReadingFailedError from the process that checks conditions.
    """
    left_s, problems = timeout_s, list[str]()
    for test in tests:
        if left_s <= 0:
            problems.append("out of time")
            continue
        inputs = [[dict(repository), test.source, image_folder]]
        report = await sandbox.call_function(_INSIDE, _ENTRY, inputs, timeout_s=left_s)
        (call,), ran = report.calls, report.exec
        left_s -= ran.duration_s
        problem = f"stopped for {ran.stopped_for.value}" if ran.stopped_for else ran.error or call.error
        if not problem and not (ran.ok and call.ok and await holds(partial(all_hold, test.conditions), call.value)):
            problem = "wrong value"
        problems.append(problem)
    return problems


def verdict(tests: Sequence[HiddenTest], problems: Sequence[str], *, pays_share: bool) -> Reward:
    """Return 1 if all tests passed, else 0, with `pays_share` the fraction; terms `pass_rate` and `solved`."""
    failed = [f"{test.name}: {problem}" for test, problem in zip(tests, problems, strict=True) if problem]
    share = 1 - len(failed) / len(tests)
    solved = float(not failed)
    terms = {"pass_rate": share, "solved": solved}
    return Reward(value=share if pays_share else solved, terms=terms, detail=failed[0] if failed else "")


def no_answer(detail: str) -> Reward:
    return Reward(value=0.0, terms={"pass_rate": 0.0, "solved": 0.0}, status="no_code", detail=detail)
