"""What an agent changed in a repository: read out of its workspace, written as an answer, read again. Pure but for
`changed_files`.

An answer is JSON, `{"files": {"src/cart.py": "…", "old.py": null}}`: the whole text of each file that is not as it was,
null for one that is gone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from rayapp.core.errors import SandboxProtocolError, UnusableWorkError
from rayapp.core.protocols import Sandbox
from rayapp.sandbox.local.levels.visible_files import HARBOR

MAX_BYTES = 1 << 20
"""Of all changed files together."""
MAX_FILES = 200
_TIMEOUT_S = 30.0
_SKIPPED = (".git", "__pycache__", ".pytest_cache", HARBOR)
_PROGRAM = """
import hashlib, json, os, sys
known, most, skipped = json.loads(sys.stdin.read())
files, size, problem = {}, 0, ''
for folder, folders, names in os.walk('.'):
    folders[:] = sorted(name for name in folders if name not in skipped)
    for name in sorted(names):
        path = os.path.join(folder, name)[2:]
        if os.path.islink(path) or not os.path.isfile(path) or name.endswith('.pyc'):
            continue
        with open(path, 'rb') as file:
            data = file.read(most + 1)
        if known.pop(path, '') == hashlib.sha256(data).hexdigest():
            continue
        size += len(data)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if size > most:
            problem = 'the changed files are larger than %d KiB together' % (most >> 10)
            break
        files[path] = text
files.update((path, None) for path in known if not os.path.lexists(path))
print(json.dumps({'problem': problem, 'files': {} if problem else files}))
"""


async def changed_files(sandbox: Sandbox, base: Mapping[str, str]) -> dict[str, str | None]:
    """The files of a workspace that are not as they were at its start.

    Raises:
        UnusableWorkError: too much has changed.
        SandboxError: the sandbox failed.
    """
    known = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in base.items()}
    ran = await sandbox.run_code(
        _PROGRAM, timeout_s=_TIMEOUT_S, stdin=json.dumps([known, MAX_BYTES, _SKIPPED]), max_output_bytes=8 * MAX_BYTES
    )
    if ran.stopped_for is not None:
        raise UnusableWorkError(f"the workspace could not be read: {ran.stopped_for.value}")
    try:
        found = json.loads(ran.stdout)
        problem, files = found["problem"], found["files"]
    except (ValueError, KeyError, TypeError):
        raise SandboxProtocolError(f"the workspace could not be read: {ran.error or 'no answer'}") from None
    if problem:
        raise UnusableWorkError(problem)
    return {str(path): None if text is None else str(text) for path, text in files.items()}


def as_answer(files: Mapping[str, str | None]) -> str:
    return json.dumps({"files": dict(sorted(files.items()))}, indent=1)


def read_answer(text: str) -> dict[str, str | None] | None:
    """The changed files of an answer; None for a text that is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"files": dict(files)} if len(files) <= MAX_FILES and all(map(_is_change, files.items())):
            return files
    return None


def _is_change(item: tuple[object, object]) -> bool:
    path, text = item
    if not isinstance(path, str) or not isinstance(text, str | None):
        return False
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        return False
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def applied(
    base: Mapping[str, str], files: Mapping[str, str | None], allowed: Sequence[str] = ("*",)
) -> dict[str, str]:
    """The repository with the changes, those alone whose path fits one of these patterns."""
    counted = {path: text for path, text in files.items() if any(fnmatch.fnmatch(path, each) for each in allowed)}
    both = {**base, **counted}
    return {path: text for path, text in both.items() if text is not None}
