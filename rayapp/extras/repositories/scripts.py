"""Runs Harbor's scripts: `tests/test.sh`, which judges if the user trusts it, and `solution/solve.sh`.

    changed files -> fresh sandbox: changed repository at /app, tests at /tests -> test.sh -> its reward file

The script runs the code that it judges, so the code could write the reward itself. There are four precautions. Of the
agent's work, the sandbox gets only changed files, except files that control a test runner. The reward is read from one
file, after all processes of the script have ended. A killed script gives no reward. Code that passes the tests must
fail their sentinels (`sentinels.py`), each in its own sandbox; otherwise the pass counts as forged.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from rayapp.core.errors import SandboxConfigError, SandboxProtocolError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import Reward
from rayapp.extras.repositories.sentinels import Sentinel, draw, run_by, with_sentinels
from rayapp.sandbox.local.levels.visible_files import HARBOR

WORKDIR = "/app"  # Default folder of a repository, and the only one of local sandboxes.
SOLVE = "solve.sh"
_LOGS = "/logs/verifier"
_MAX_REWARD_BYTES = 1 << 16
_FILL_TIMEOUT_S = 60.0
_SHOWN_CHARS = 300
SCRIPT_FAILURES = ("no_reward", "bad_reward")  # Failure kinds of invalid verdicts that the script itself caused.
_STEERS = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
     "pyproject.toml", "sitecustomize.py", "usercustomize.py", ".coveragerc"}
)  # fmt: skip
_SHADOWED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "tomli"}
_INSTALLS = re.compile(r"\s*(?:sudo\s+)?(?:apt|apt-get|apk|yum|curl|wget|uvx|npm|(?:uv |python3? -m )?pip3?)\s")
_FILL = """
import base64, json, os, subprocess, sys
job, missing = json.loads(sys.stdin.read()), []
for given in job['folders']:
    path = os.path.realpath(given)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        pass
    if not os.access(path, os.W_OK):
        own = 'mkdir -p "$1" && chown -R "$2" "$1"'
        try:
            subprocess.run(['sudo', '-n', 'sh', '-c', own, 'sh', path, str(os.getuid())], check=False)
        except OSError:
            pass
    if not os.access(path, os.W_OK):
        missing.append(given)
if missing:
    print(json.dumps(missing))
    sys.exit()
def change(path, data):
    if data is None:
        os.path.lexists(path) and os.unlink(path)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as file:
        file.write(data)
    if data.startswith(b'#!'):
        os.chmod(path, 0o755)
for path in [*job['gone'], *job['files']]:
    try:
        change(path, base64.b64decode(job['files'][path]) if path in job['files'] else None)
    except (OSError, UnicodeEncodeError, RecursionError) as error:
        # an answer's file that can't be: a folder has its name, a file is above it, or its path is too long or no text
        if getattr(error, 'errno', 36) not in (17, 20, 21, 36):
            raise
print('[]')
"""
# Shell commands that make the task's folder ($0) a link to the working folder, and move the image's files there.
LINK_WORKDIR = f"""
root() {{ "$@" 2>/dev/null || sudo -n "$@"; }}
at=$(readlink "$0" || echo "$0")
if [ "$at" != "$PWD" ]; then
  if [ -d "$at" ]; then cp -an "$at/." . && root rm -rf "$at"; fi
  root mkdir -p "$(dirname "$at")" && root ln -s "$PWD" "$at"
fi
git init -q . && echo {HARBOR} >> .git/info/exclude
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestScript:
    """A `test.sh` that the user trusts, with the files, variables and image that it needs."""

    __test__ = False  # not a pytest class
    files: Mapping[str, bytes]  # Relative path -> contents of the files in the folder `tests`.
    env: tuple[tuple[str, str], ...]
    image: str  # Image or template of the script's sandboxes; empty if any sandbox with Python is enough.

    def sentinels(self, rng: random.Random) -> list[Sentinel]:
        """Draw sentinels, in random order, from the Python tests that the script seems to run."""
        texts = [data.decode(errors="replace") for path, data in self.files.items() if not path.endswith(".py")]
        return draw(self.files, run_by("\n".join(texts), list(self.files)), rng)


def why_a_script_needs_an_image(script: str) -> str:
    """Return a test.sh's first line that needs more than a plain Python sandbox, and why; empty without one."""
    for number, line in enumerate(script.splitlines(), start=1):
        program = interpreter_of(line) if number == 1 else ""
        why = f"this node has no {program}" if program and shutil.which(program) is None else ""
        if why or _INSTALLS.match(line):
            return f"tests/test.sh, line {number}, `{line.strip()[:80]}`: {why or 'sandboxes have no network'}"
    return ""


def interpreter_of(first_line: str) -> str:
    """Return the program of a script's first line (`#!`); empty without one, and then the script can't be started."""
    words = first_line.removeprefix("#!").split() if first_line.startswith("#!") else []
    return next((word for word in words if PurePosixPath(word).name != "env" and not word.startswith("-")), "")


def without_steering(
    base: Mapping[str, str], changed: Mapping[str, str | None], told: Sequence[str]
) -> tuple[dict[str, str | None], list[str]]:
    """Undo changes to files that control a test runner; return the repository (None: deleted), and the paths undone.

    These are its configuration, Python's start-up code, metadata of packages (which name plug-ins), and new top-level
    modules named like one of Python or pytest. Files named in `told` (instruction and solution) may be changed.
    """
    words = "\n".join(told)
    left_out = [
        path
        for path in sorted(base.keys() | changed.keys())
        if base.get(path, "\0") != changed.get(path) and _steers(path, base) and PurePosixPath(path).name not in words
    ]
    kept = {path: text for path, text in changed.items() if path not in left_out}
    return kept | {path: base[path] for path in left_out if path in base}, left_out


def _steers(path: str, base: Mapping[str, str]) -> bool:
    parts = PurePosixPath(path).parts
    is_module = path.endswith(".py") and parts[1:] in ((), ("__init__.py",))
    is_new_module = path not in base and is_module and parts[0].removesuffix(".py") in _SHADOWED
    is_plugin = parts[-1].endswith(".pth") or any(part.endswith((".egg-info", ".dist-info")) for part in parts)
    return parts[-1] in _STEERS or is_new_module or is_plugin or parts[0] == HARBOR


async def judge_by_script(
    sandbox: Sandbox,
    script: TestScript,
    repository: Mapping[str, str | None],
    *,
    workdir: str,
    timeout_s: float,
    sentinels: Sequence[Sentinel] = (),
) -> Reward:
    """Run `test.sh`; return the reward that it writes.

    Args:
        repository: path -> text of the files to write; None for a file to delete.
        sentinels: expectations to replace by wrong ones before the script runs.
    Raises SandboxError; SandboxConfigError if Harbor's folders (/tests, /logs and the repository's) can't be made.
    """
    tests = {f"/tests/{path}": data for path, data in with_sentinels(script.files, sentinels).items()}
    code = {f"{workdir}/{path}": text.encode() for path, text in repository.items() if text is not None}
    rewards = [f"{_LOGS}/reward.json", f"{_LOGS}/reward.txt"]
    missing = [*(f"{workdir}/{path}" for path, text in repository.items() if text is None), *rewards]
    await _fill(sandbox, {**code, **tests}, folders=(workdir, "/tests", "/logs", _LOGS), gone=missing)
    argv = ["env", *(f"{name}={value}" for name, value in script.env), *in_folder(workdir, "/tests/test.sh")]
    ran = await sandbox.run_command(argv, timeout_s=timeout_s)
    told = " ".join(f"{ran.stdout}\n{ran.stderr}".split())[-_SHOWN_CHARS:]
    if ran.stopped_for is not None:
        return replace(_reward(0.0, told), status=ran.stopped_for.value)
    if ran.exit_code < 0:
        return Reward.invalid("no_reward", f"tests/test.sh was ended by signal {-ran.exit_code}")
    # Read reward.json only if a file of tests/ mentions it: otherwise the judged code may have written it.
    names_json = any(b"reward.json" in data for data in script.files.values())
    for path in rewards if names_json else rewards[1:]:
        try:
            text = await sandbox.read_file(path, max_bytes=_MAX_REWARD_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:  # the judged code may have put a folder or a link there
            return Reward.invalid("no_reward", f"the reward of tests/test.sh can't be read: {error}")
        return _read_reward(text, is_json=path.endswith(".json"), told=told)
    return Reward.invalid("no_reward", f"tests/test.sh wrote no reward: {told}")


async def run_solve_script(sandbox: Sandbox, files: Mapping[str, str], *, workdir: str, timeout_s: float) -> None:
    """Run `solve.sh` in an agent's workspace. Raises SandboxError."""
    solution = {f"/solution/{path}": text.encode() for path, text in files.items()}
    await _fill(sandbox, solution, folders=("/solution",))
    await sandbox.run_command(in_folder(workdir, f"/solution/{SOLVE}"), timeout_s=timeout_s)


def in_folder(folder: str, program: str) -> list[str]:
    return ["sh", "-c", 'cd "$0" && exec "$1"', folder, program]


async def _fill(
    sandbox: Sandbox, files: Mapping[str, bytes], *, folders: Sequence[str], gone: Sequence[str] = ()
) -> None:
    packed = {path: base64.b64encode(data).decode() for path, data in files.items()}
    job = json.dumps({"folders": folders, "gone": gone, "files": packed})
    ran = await sandbox.run_code(_FILL, timeout_s=_FILL_TIMEOUT_S, stdin=job)
    if not ran.ok:
        why = f"stopped for {ran.stopped_for.value}" if ran.stopped_for else ran.error or "no answer"
        raise SandboxProtocolError(f"the files for one of Harbor's scripts can't be written into the sandbox: {why}")
    if missing := json.loads(ran.stdout):
        where = f"sandboxes of {sandbox.provider} ({ran.isolation})"
        raise SandboxConfigError(f"{where} can't make the folders {', '.join(missing)}, which Harbor's scripts use")


def _read_reward(data: bytes, *, is_json: bool, told: str) -> Reward:
    text = data.decode("utf-8-sig", errors="replace").strip()
    try:
        value = _value_of(json.loads(text)) if is_json else float(text)
    except (ValueError, TypeError, OverflowError, RecursionError):
        value = -1.0
    if not 0.0 <= value <= 1.0:
        return Reward.invalid(
            "bad_reward", f"tests/test.sh wrote {text[:_SHOWN_CHARS]!r}, but a reward is a number from 0 to 1"
        )
    return _reward(value, told if value < 1.0 else "")


def _value_of(rewards: Any) -> float:
    """Return the number of a reward file: itself, the key `reward`, or else the only value."""
    if isinstance(rewards, dict):
        [rewards] = [rewards["reward"]] if "reward" in rewards else rewards.values()
    return float(rewards)


def _reward(value: float, detail: str) -> Reward:
    solved = float(value >= 1.0)
    return Reward(
        value=value,
        terms={"pass_rate": value, "solved": solved, "verdict/forgeable": 1.0},
        detail=detail[-_SHOWN_CHARS:],
    )


def forged(passed: Sequence[Sentinel]) -> Reward:
    """Return 0 for code that passed these sentinels, although right code fails them."""
    names = ", ".join(sorted({sentinel.name for sentinel in passed}))
    detail = f"forged: it also passes with a wrong expectation in {names}"
    return replace(_reward(0.0, ""), status="forged", detail=detail[:_SHOWN_CHARS])
