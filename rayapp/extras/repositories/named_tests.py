"""Judges changed files by a repository's own pytest tests, which a data set names (SWE-bench's form).

    fresh sandbox: the repository as it was -> git apply test_patch -> the changed files, but none of a test
        -> a child process runs pytest, its parent collects outcomes -> compared outside with the names that must pass

An agent's sandbox never has the tests of the patch or the names that must pass. The child sends outcomes through a
pipe, with a secret of the run in each line. The parent writes the report and imports no code of the repository. In a
run that does not report its end, no test counts as passed. Tested code that reaches pytest's own objects can still
forge outcomes. Therefore code that passes runs a second time, with one wrong expectation in each of several tests
(`sentinels.py`).
"""

from __future__ import annotations

import base64
import codecs
import importlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from rayapp.core.errors import InputError, SandboxConfigError, SandboxProtocolError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import Reward
from rayapp.extras.repositories.sentinels import Sentinel, with_sentinels

_SETUP_TIMEOUT_S = 120.0
_MAX_REPORT_BYTES = 8 << 20
_MAX_TEST_BYTES = 1 << 20
_SHOWN_CHARS = 300
_FILE_TIME_S = 1_577_836_800  # Time of all files that a run writes, in seconds since 1970.
_LIBRARY = ".harbor/lib"
_PATCH = ".harbor/test.patch"
_QUOTED = r'"[ab]/(?:[^"\\]|\\.)*"'  # git quotes names with letters outside ASCII, quotes or control characters
_TOUCHED = re.compile(
    rf"^(?:diff --git ({_QUOTED}|a/.+?) ({_QUOTED}|b/.+)|(?:\+\+\+|---) ({_QUOTED}|[ab]/[^\t\n]+))", re.MULTILINE
)
# Interpreters to look for in a sandbox; the first two are in SWE-bench's and R2E's images.
PYTHONS = ("/opt/miniconda3/envs/testbed/bin/python", "/testbed/.venv/bin/python", "python3", "python")
_PREPARE = """
import base64, json, os, shutil, subprocess, sys
job = json.loads(sys.stdin.read())
def end(**found):
    print(json.dumps(found))
    sys.exit()
for path, data in job['files'].items():
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with open(path, 'wb') as file:
        file.write(base64.b64decode(data))
python = next(filter(None, map(shutil.which, job['pythons'])), '')
if not python:
    end(lacks='none of ' + ', '.join(job['pythons']))
if not shutil.which('git'):
    end(lacks='git')
def read():
    texts = {}
    for path in job['tests']:
        if os.path.isfile(path) and os.path.getsize(path) <= job['most']:
            with open(path, 'rb') as file:
                texts[path] = base64.b64encode(file.read()).decode()
    return texts
before = read()
if job['patch']:
    git = ['git', '-c', 'safe.directory=*', 'apply', '--whitespace=nowarn', job['patch']]
    ran = subprocess.run(git, capture_output=True, text=True, errors='replace')
    os.unlink(job['patch'])
    if ran.returncode:
        end(problem=ran.stderr.strip()[-300:])
end(python=python, tests=read(), before=before, absent=[path for path in job['named'] if not os.path.isfile(path)])
"""
_CHILD = """
import sys
here = sys.path.pop(0)
import json, os, pytest
secret, files, report = json.loads(sys.stdin.readline())
os.set_inheritable(report, False)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def reporter(secret, write, dumps):
    def tell(*found):
        line = (secret + dumps(found) + '\\n').encode()
        while line:
            line = line[write(report, line):]
    class Report:
        def pytest_runtest_logreport(self, report):
            passed = report.outcome == 'passed' or hasattr(report, 'wasxfail')
            crash = getattr(report.longrepr, 'reprcrash', None)
            tell(report.nodeid, report.when, passed, str(getattr(crash, 'message', ''))[:200])
    return Report(), tell
plugin, tell = reporter(secret, os.write, json.dumps)
del secret
sys.path.insert(0, here)
status = pytest.main(['-q', '-rN', '-p', 'no:cacheprovider', *files], plugins=[plugin])
tell('', 'end', int(status), '')
"""
_RUN = """
import base64, ctypes, json, os, secrets, select, signal, subprocess, sys, tempfile, time
job = json.loads(sys.stdin.read())
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
def is_direct(path):
    folder = os.path.dirname(path)
    return os.path.realpath(folder or '.') == os.path.normpath(os.path.join(os.path.realpath('.'), folder))
for path in job['gone']:
    if os.path.lexists(path) and is_direct(path):
        os.unlink(path)
for path, data in [*job['files'].items(), *job['texts'].items()]:
    if not is_direct(path):
        continue
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    if os.path.islink(path):
        os.unlink(path)
    data = base64.b64decode(data)
    with open(path, 'wb') as file:
        file.write(data)
    if data.startswith(b'#!'):
        os.chmod(path, 0o755)
    os.utime(path, (job['time'], job['time']))
secret = secrets.token_hex(16)
ours, theirs = os.pipe()
env = {**os.environ, 'PYTHONNOUSERSITE': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
env['PATH'] = os.path.dirname(job['python']) + ':' + env.get('PATH', '/usr/local/bin:/usr/bin:/bin')
if job['library']:
    env['PYTHONPATH'] = os.path.abspath(job['library'])
output = tempfile.TemporaryFile()
child = subprocess.Popen([job['python'], '-c', job['program']], stdin=subprocess.PIPE, stdout=output, stderr=output,
                         env=env, pass_fds=[theirs])
os.close(theirs)
try:
    child.stdin.write((json.dumps([secret, job['tests'], theirs]) + '\\n').encode())
    child.stdin.close()
except BrokenPipeError:
    pass
data, is_open, ended = bytearray(), True, 0.0
while is_open and len(data) < job['most'] and not (ended and time.monotonic() > ended + 1):
    ready, _, _ = select.select([ours], [], [], 0.1)
    chunk = os.read(ours, 65536) if ready else b''
    data += chunk
    is_open = bool(chunk) or not ready
    ended = ended or (child.poll() is not None and time.monotonic()) or 0.0
if child.poll() is None and not is_open:
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        pass
if child.poll() is None:
    child.kill()
output.seek(0, 2)
output.seek(max(0, output.tell() - 2000))
told = output.read().decode(errors='replace')
outcomes, whys, has_ended = {}, {}, False
for line in bytes(data).decode(errors='replace').splitlines():
    if not line.startswith(secret):
        continue
    name, when, passed, why = json.loads(line[len(secret):])
    if when == 'end':
        has_ended = True
    else:
        outcomes[name] = outcomes.get(name, True) and bool(passed)
        whys[name] = whys.get(name) or ('' if passed else why)
print(json.dumps({'outcomes': outcomes, 'whys': whys, 'has_ended': has_ended, 'told': told}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTests:
    """A repository's own tests that judge an answer. No part may reach an agent."""

    __test__ = False  # not a pytest class
    patch: str  # Diff that adds or changes the tests; empty if the repository has them.
    # Names in pytest's form (`tests/test_cart.py::test_total[a]`) of tests that only pass with the solution.
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]  # Names of the tests that pass without the solution, too.
    pythons: tuple[str, ...] = PYTHONS  # Interpreters to look for; the first one that exists runs pytest.
    brings_pytest: bool  # True if the sandbox gets a copy of the pytest that is installed here.

    @property
    def names(self) -> tuple[str, ...]:
        return self.fail_to_pass + self.pass_to_pass

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({name.partition("::")[0] for name in self.names}))

    @property
    def own_files(self) -> frozenset[str]:
        """Paths that an answer can't change: those of named tests, and all that the patch touches."""
        return frozenset(self.files) | touched_by(self.patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    __test__ = False
    outcomes: Mapping[str, bool]  # Name of a test that ran, `with_escaped_id` -> whether it passed.
    # Name of a failed test -> the exception's message, if pytest gives one.
    whys: Mapping[str, str] = field(default_factory=dict)
    problem: str  # Reason why no test counts as passed; empty if the run came to its end.
    told: str  # End of the output.
    seconds: float

    def passes(self, name: str) -> bool:
        found = self.outcomes_of(name)
        return not self.problem and bool(found) and all(found)

    def outcomes_of(self, name: str) -> list[bool]:
        """Return the outcomes of the tests that a name means. SWE-bench cuts many names at a blank, as in
        `test_x[(AttributeError,`: they mean all tests that begin so."""
        if name in self.outcomes or "[" not in name:
            return [self.outcomes[name]] if name in self.outcomes else []
        at_blank = [passed for each, passed in self.outcomes.items() if each.startswith(f"{name} ")]
        if at_blank or name.endswith("]"):
            return at_blank
        return [passed for each, passed in self.outcomes.items() if each.startswith(name)]


def with_escaped_id(name: str) -> str:
    """Return the name with its parameters' id in ASCII, as pytest writes ids unless a repository turns that off."""
    test, bracket, parameters = name.partition("[")
    shown = (each if " " <= each <= "~" else each.encode("unicode_escape").decode() for each in parameters)
    return f"{test}{bracket}{''.join(shown)}"


def touched_by(patch: str) -> frozenset[str]:
    return frozenset(_unquoted(path)[2:] for found in _TOUCHED.finditer(patch) for path in found.groups() if path)


def _unquoted(path: str) -> str:
    if not path.startswith('"'):
        return path
    return codecs.escape_decode(path[1:-1].encode())[0].decode(errors="replace")


class PreparedTests:
    """A fresh sandbox with the repository and its tests, to which `run` adds an answer."""

    def __init__(
        self,
        sandbox: Sandbox,
        tests: NamedTests,
        python: str,
        *,
        texts: Mapping[str, bytes],
        before: Mapping[str, bytes],
    ) -> None:
        self._sandbox = sandbox
        self._tests = tests
        self._python = python
        # Path -> contents of the files of `own_files`, after and before the patch.
        self.texts, self.before = texts, before

    @classmethod
    async def prepare(
        cls, sandbox: Sandbox, tests: NamedTests, repository: Mapping[str, str]
    ) -> PreparedTests | Reward:
        """Fill a fresh sandbox with repository and tests; return an invalid reward if their patch or a file is missing.

        Args:
            repository: path -> text of the files to write; empty if the image has the repository.
        Raises SandboxError, e.g. SandboxConfigError if the sandbox lacks Python or git.
        """
        files = {path: text.encode() for path, text in repository.items()}
        files |= {_PATCH: tests.patch.encode()} if tests.patch else {}
        files |= {f"{_LIBRARY}/{path}": data for path, data in pytest_files().items()} if tests.brings_pytest else {}
        job = {
            "files": _packed(files),
            "patch": _PATCH if tests.patch else "",
            "pythons": tests.pythons,
            "tests": sorted(tests.own_files),
            "named": tests.files,
            "most": _MAX_TEST_BYTES,
        }
        found = await _told(sandbox, _PREPARE, job, timeout_s=_SETUP_TIMEOUT_S)
        if lacks := found.get("lacks"):
            where = f"sandboxes of {sandbox.provider} ({sandbox.id})"
            raise SandboxConfigError(f"{where} lack {lacks}, which the tests need: install it in their image")
        if "problem" in found:
            return Reward.invalid("bad_test_patch", f"test_patch does not apply: {found['problem']}")
        if absent := found["absent"]:
            return Reward.invalid("no_test_file", f"the named tests' file {absent[0]} is not in the repository")
        texts, before = _unpacked(found["tests"]), _unpacked(found["before"])
        return cls(sandbox, tests, found["python"], texts=texts, before=before)

    async def run(
        self,
        files: Mapping[str, str | None],
        *,
        timeout_s: float,
        sentinels: Sequence[Sentinel] = (),
    ) -> TestRun:
        """Run the tests once, with these changes.

        Args:
            files: path -> text of each changed file; None for a deleted file.
            sentinels: expectations of the tests to replace by wrong ones.
        Raises SandboxError.
        """
        changed = {path: text.encode() for path, text in files.items() if text is not None}
        # A run with sentinels and a run without do the same: the tests are written last, and all files get one time.
        job = {
            "files": _packed(changed),
            "texts": _packed(with_sentinels(self.texts, sentinels)),
            "time": _FILE_TIME_S,
            "gone": [path for path, text in files.items() if text is None],
            "tests": self._tests.files,
            "python": self._python,
            "library": _LIBRARY if self._tests.brings_pytest else "",
            "program": _CHILD,
            "most": _MAX_REPORT_BYTES,
        }
        ran = await self._sandbox.run_code(
            _RUN, timeout_s=timeout_s, stdin=json.dumps(job), max_output_bytes=_MAX_REPORT_BYTES
        )
        if ran.stopped_for is not None or not ran.ok:
            why = ran.stopped_for.value if ran.stopped_for else ran.error or "no report"
            return TestRun(outcomes={}, problem=why, told="", seconds=ran.duration_s)
        try:
            found = json.loads(ran.stdout)
            outcomes = {with_escaped_id(name): bool(passed) for name, passed in found["outcomes"].items()}
            whys = {with_escaped_id(name): str(why) for name, why in found["whys"].items() if why}
            has_ended, told = bool(found["has_ended"]), " ".join(str(found["told"]).split())[-_SHOWN_CHARS:]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return TestRun(outcomes={}, problem="its report can't be read", told="", seconds=ran.duration_s)
        problem = "" if has_ended else f"the tests' process did not report its end: {told}"
        return TestRun(outcomes=outcomes, whys=whys, problem=problem, told=told, seconds=ran.duration_s)


async def _told(sandbox: Sandbox, program: str, job: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    ran = await sandbox.run_code(
        program, timeout_s=timeout_s, stdin=json.dumps(job), max_output_bytes=_MAX_REPORT_BYTES
    )
    try:
        return dict(json.loads(ran.stdout))
    except (ValueError, TypeError, RecursionError):
        why = f"stopped for {ran.stopped_for.value}" if ran.stopped_for else ran.error or "no answer"
        raise SandboxProtocolError(f"the repository and its tests can't be written into the sandbox: {why}") from None


def _packed(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in files.items()}


def _unpacked(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: base64.b64decode(data) for path, data in files.items()}


def named_verdict(tests: NamedTests, run: TestRun, *, pays_share: bool) -> Reward:
    """Return 1 if all named tests passed, else 0, with `pays_share` the fraction that passed.

    Terms: `solved`, `verdict/forgeable`, and the fractions `pass_rate`, `fail_to_pass` and `pass_to_pass`.
    """
    failed = [name for name in tests.names if not run.passes(name)]
    share = 1 - len(failed) / len(tests.names)
    why = run.problem or (f"{failed[0]}: {why_failed(run, failed[0])}; {len(failed)} failed" if failed else "")
    solved = float(not failed)
    terms = {
        "pass_rate": share,
        "solved": solved,
        "fail_to_pass": _share(tests.fail_to_pass, run),
        "pass_to_pass": _share(tests.pass_to_pass, run),
        "verdict/forgeable": 1.0,
    }
    return Reward(value=share if pays_share else solved, terms=terms, detail=why[:_SHOWN_CHARS])


def why_failed(run: TestRun, name: str) -> str:
    """Return why a test did not pass; empty if it passed."""
    return "" if run.passes(name) else run.problem or run.whys.get(name) or _state(run, name)


def _state(run: TestRun, name: str) -> str:
    return "failed" if run.outcomes_of(name) else "did not run"


def _share(names: Sequence[str], run: TestRun) -> float:
    return sum(map(run.passes, names)) / len(names) if names else 1.0


def passed_sentinels(sentinels: Sequence[Sentinel], names: Sequence[str], run: TestRun) -> list[Sentinel]:
    """Return the sentinels that pass in all variants of their test, whose names may show the wrong expectation."""
    counts = Counter(name.partition("[")[0] for name in names)

    def is_passed(test: str) -> bool:
        ended = [passed for name, passed in run.outcomes.items() if name.partition("[")[0] == test]
        return not run.problem and len(ended) >= counts[test] > 0 and all(ended)

    return [each for each in sentinels if is_passed(each.name)]


@cache
def pytest_files() -> dict[str, bytes]:
    """Return path -> bytes of the pytest installed here and its dependencies. Raises InputError: there is none."""
    found: dict[str, bytes] = {}
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        try:
            place = Path(importlib.import_module(name).__file__ or "").parent
        except ImportError:
            raise InputError(
                "pytest is not installed on this machine, and tests in sandboxes without an image need it: "
                "pip install pytest"
            ) from None
        for path in place.rglob("*.py"):
            if path.parent.name not in ("lexers", "styles") or path.stem in ("__init__", "_mapping", "python", "diff"):
                found[str(PurePosixPath(path.relative_to(place.parent)))] = path.read_bytes()
    shim = Path(importlib.import_module("pytest").__file__ or "").parents[1] / "py.py"
    found |= {shim.name: shim.read_bytes()} if shim.is_file() else {}
    return found
