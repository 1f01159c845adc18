"""A repository task: an agent changes files in a workspace, and hidden tests judge the changes in another sandbox.

    folder -> agent_start: the repository, a quota, tools -> submit: the changed files, as an answer -> score

If the user trusts the folder's own `test.sh`, this script judges instead of hidden tests. Tasks of a data set in
SWE-bench's form (`swe.py`) are judged by named tests of the repository. Only the tool agent can play a repository task
(`rayapp.core.protocols.AgentTask`). An answer is JSON, `{"files": {"src/cart.py": "…", "old.py": null}}`: the whole
text of each changed file, null for a deleted file.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import json
import posixpath
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from rayapp.core.aio import side_by_side
from rayapp.core.errors import InputError, SandboxProtocolError, UnusableWorkError
from rayapp.core.protocols import Sandbox, SandboxSource, Tokenizer
from rayapp.core.types import AgentStart, Prompt, Reward, SandboxSpec
from rayapp.extras.repositories.folder import TaskFolder, read_folder
from rayapp.extras.repositories.grading import no_answer, run_tests, verdict
from rayapp.extras.repositories.hidden_tests import HiddenTest
from rayapp.extras.repositories.named_tests import NamedTests, PreparedTests, named_verdict, passed_sentinels
from rayapp.extras.repositories.scripts import (
    LINK_WORKDIR,
    SCRIPT_FAILURES,
    SOLVE,
    TestScript,
    forged,
    judge_by_script,
    run_solve_script,
    without_steering,
)
from rayapp.extras.repositories.sentinels import Sentinel, draw, tests_in
from rayapp.sandbox.local.levels.visible_files import HARBOR
from rayapp.tasks.text_process import TextReadingFailedError
from rayapp.tasks.verdict import LEASE_TIMEOUT_S, judged_in_sandbox

_T = TypeVar("_T")
MAX_BYTES = 1 << 20  # Bytes of all changed files together.
MAX_FILES = 200
_TIMEOUT_S = 30.0
_SKIPPED = (".git", "__pycache__", ".pytest_cache", HARBOR)
_START = "refs/rayapp/start"  # Reference to the commit with which the workspace starts.
_SNAPSHOT = f"{HARBOR}/start"  # List of the files, with digests, with which a workspace on an image starts.
_PROGRAM = """
import hashlib, json, os, subprocess, sys
known, most, skipped, start, snapshot = json.loads(sys.stdin.read())
files, size, problem = {}, 0, ''
def git(*words):
    told = subprocess.run(['git', '-c', 'safe.directory=*', '-c', 'core.hooksPath=/dev/null', *words],
                          capture_output=True, check=True).stdout
    return [os.fsdecode(name) for name in told.split(b'\\0') if name]
def walked():
    for folder, folders, names in os.walk('.'):
        folders[:] = sorted(name for name in folders if name not in skipped)
        yield folder, sorted(names)
def changed():
    git('add', '-A', '--', ':/')
    yield '.', git('diff', '--cached', '--name-only', '--no-renames', '-z', start)
try:
    folders = list(changed() if start else walked())
except FileNotFoundError:
    print(json.dumps({'lacks': 'git'}))
    sys.exit()
except subprocess.CalledProcessError as error:
    folders, problem = [], "the workspace's git history is damaged: " + error.stderr.decode(errors='replace')[-200:]
except RecursionError:
    folders, problem = [], "the workspace's folders are nested too deeply"
if snapshot and os.path.isfile(snapshot):
    with open(snapshot, encoding='utf-8', errors='surrogateescape') as file:
        known = {line[66:]: line[:64] for line in file.read().split('\\n') if line[64:68] == '  ./'}
        known = {os.path.normpath(path): digest for path, digest in known.items()}
if start:
    known = dict.fromkeys((path for _, names in folders for path in names), '')
for folder, names in folders:
    for name in names:
        path = os.path.join(folder, name)[2:]
        if set(path.split('/')) & set(skipped):
            continue
        if os.path.islink(path) or not os.path.isfile(path) or name.endswith('.pyc'):
            continue
        try:
            with open(path, 'rb') as file:
                data = file.read(most + 1)
        except OSError:  # the agent took the permission to read it, or a process of its removed it
            continue
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
found = json.dumps({'problem': problem, 'files': {} if problem else files}, ensure_ascii=False)
sys.stdout.buffer.write(found.encode(errors='replace'))
"""
_MAX_OUTPUT_BYTES = MAX_BYTES + (1 << 18)  # Room for JSON's escapes, too. More bytes would block the event loop.


async def changed_files(
    sandbox: Sandbox, base: Mapping[str, str], *, by_git: bool = False, by_snapshot: bool = False
) -> dict[str, str | None]:
    """Return path -> text of the files changed since the workspace's start; None for a deleted file.

    Args:
        by_git: git lists the changes, without files that it ignores; otherwise the files are compared with `base`.
        by_snapshot: compare with the list that the workspace's setup made, if it is still there.
    Raises SandboxError, also if `by_git` has no git, and UnusableWorkError if the changes are too large.
    """
    known = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in base.items()}
    start, snapshot = _START if by_git else "", _SNAPSHOT if by_snapshot else ""
    told = json.dumps([{} if by_git else known, MAX_BYTES, _SKIPPED, start, snapshot])
    ran = await sandbox.run_code(_PROGRAM, timeout_s=_TIMEOUT_S, stdin=told, max_output_bytes=_MAX_OUTPUT_BYTES)
    if ran.stopped_for is not None:
        raise UnusableWorkError(f"the workspace could not be read: reading was stopped for {ran.stopped_for.value}")
    try:
        found = json.loads(ran.stdout)
        if "lacks" in found:
            # No SandboxConfigError, which ends the run: an agent can remove git.
            raise SandboxProtocolError(
                f"sandbox {sandbox.id} lacks git, which lists an agent's changes: the agent removed it, or it must be "
                "installed in the image"
            )
        problem, files = found["problem"], dict(found["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SandboxProtocolError(f"the workspace could not be read: {ran.error or 'no answer'}") from None
    if len(files) > MAX_FILES:
        problem = f"more than {MAX_FILES} files have changed"
    if problem:
        raise UnusableWorkError(problem)
    return {str(path): None if text is None else str(text) for path, text in files.items()}


def as_answer(files: Mapping[str, str | None]) -> str:
    return json.dumps({"files": dict(sorted(files.items()))}, indent=1)


def read_answer(text: str) -> dict[str, str | None] | None:
    """Return an answer's path -> text (None for a deleted file); None if the text is not an answer."""
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
    # Another spelling of a path, such as ./tests/test_a.py, would not be recognized as the path of a hidden test.
    first = path.partition("/")[0]
    return path == posixpath.normpath(path) and first not in ("", ".", "..") and "\0" not in path


TOOLS = ("bash", "edit", "python", "submit_work")
_GIT = "git init -q . && git add -A && git -c user.name=task -c user.email=task@localhost commit -q -m 'As handed out'"
# Shell commands that replace the history, which may contain the solution, by one commit.
_NEW_GIT = f"""
tracked=$(git -c safe.directory='*' ls-files -z 2>/dev/null | base64)
rm -rf .git && git init -q . && git add -A
if [ -n "$tracked" ]; then
  printf %s "$tracked" | base64 -d > .git/tracked && git add -f --pathspec-from-file=.git/tracked --pathspec-file-nul
else
  git add -A -f
fi
git -c user.name=task -c user.email=task@localhost commit -q -m 'As handed out' && git update-ref {_START} HEAD
"""
_TAKE_SNAPSHOT = f"""
mkdir -p {HARBOR}
find . '(' -name .git -o -name {HARBOR} ')' -prune -o -type f -exec sha256sum {{}} + > {_SNAPSHOT} || rm -f {_SNAPSHOT}
"""
_SETUP_TIMEOUT_S = 30.0
# Runs of named tests that follow a pass. Code that passes each by chance is rewarded in at most 3.5% of its answers.
_TRUE_RUNS, _WRONG_RUNS = 2, 3
_PROCESSES = 64  # Git needs several, because it starts helper processes.


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryTask:
    folder: TaskFolder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def spec(self) -> SandboxSpec:
        folder = self.folder
        return SandboxSpec(
            template=folder.image,
            workdir=folder.image_workdir,
            env=folder.env,
            memory_mib=folder.memory_mib,
            disk_mib=folder.disk_mib,
            max_processes=_PROCESSES,
            own_files=True,
        )

    @property
    def verdict_spec(self) -> SandboxSpec:
        return replace(self.spec, template=self.folder.script.image) if self.folder.script else self.spec

    def render(self, tokenizer: Tokenizer) -> Prompt:
        raise InputError(
            f"task {self.name} is a repository, which only the tool agent can change: set agent.name to tool_agent"
        )

    def agent_start(self) -> AgentStart:
        """Return the instruction, and a workspace with a quota and the repository, under git if it is installed."""
        folder = self.folder
        told = f"{folder.instruction}\n\nThe repository is your workspace. Call submit when you are done."
        git = _NEW_GIT if folder.named else f"{LINK_WORKDIR}{_GIT}" if folder.workdir else _GIT
        snapshot = _TAKE_SNAPSHOT if folder.is_in_image else ""
        return AgentStart(
            messages=({"role": "user", "content": told},),
            files={} if folder.is_in_image else folder.repository,
            tools=TOOLS,
            tools_kwargs={"submit": {"create_kwargs": {"collect": self.collect}}},
            spec=self.spec,
            images=folder.images,
            setup=("bash", "-c", f"{git}{snapshot}", folder.workdir),
        )

    async def collect(self, sandbox: Sandbox) -> str:
        """Return the changed files as an answer. Raises UnusableWorkError if they are too large, and SandboxError."""
        folder, by_git = self.folder, self.folder.named is not None
        base = {} if by_git else folder.repository
        return as_answer(await changed_files(sandbox, base, by_git=by_git, by_snapshot=folder.is_in_image))

    async def solve(self, sandboxes: SandboxSource) -> str | None:
        """Return the solution as an answer; None without one. A `solve.sh` runs in a workspace.

        Raises UnusableWorkError: its changes are too large; SandboxError.
        """
        folder = self.folder
        if SOLVE not in folder.solution:
            return as_answer(dict(folder.solution)) if folder.solution else None
        async with sandboxes.lease(self.spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
            start = self.agent_start()
            for path, text in start.files.items():
                await sandbox.write_file(path, text.encode())
            await sandbox.run_command(start.setup, timeout_s=_SETUP_TIMEOUT_S)
            await run_solve_script(sandbox, folder.solution, workdir=folder.workdir or ".", timeout_s=folder.timeout_s)
            return await self.collect(sandbox)

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """Return 1 if the changed files pass every hidden test, else 0; the share of passed tests if task.toml says so.

        Raises SandboxConfigError: this configuration can never give a sandbox.
        """
        started = time.monotonic()
        files = read_answer(completion_text)
        if files is None:
            found = no_answer("no answer was handed in")
        else:
            try:
                found = await self._verdict(files, sandboxes, seed)
            except TextReadingFailedError as error:
                found = Reward.invalid(error.kind, str(error))
        return replace(found, time_score_s=time.monotonic() - started)

    def with_changes(self, files: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the repository, unless an image has it, with the changes that belong to an answer; None: deleted."""
        allowed = self.folder.own.answer
        counted = {path: text for path, text in files.items() if any(fnmatch.fnmatch(path, each) for each in allowed)}
        return {**self.folder.repository, **counted}

    async def _verdict(self, files: Mapping[str, str | None], sandboxes: SandboxSource, seed: int) -> Reward:
        if self.folder.named is not None:
            return await self._by_named_tests(self.folder.named, files, sandboxes, seed)
        repository = self.with_changes(files)
        if self.folder.script is None:
            return await judged_in_sandbox(sandboxes, self.verdict_spec, partial(self._judge, repository))
        found = await self._by_script(repository, sandboxes)
        if found.failure_kind in SCRIPT_FAILURES:
            found = await self._unless_prevented(repository, sandboxes)
        if not found.valid or found.value <= 0.0:
            return found
        return await self._unless_forged(found, self.folder.script, repository, sandboxes, seed)

    async def _judge(self, repository: Mapping[str, str | None], sandbox: Sandbox) -> Reward:
        tests = self.folder.tests
        problems = await self._run_tests(repository, sandbox, tests)
        return verdict(tests, problems, pays_share=self.folder.own.score == "share")

    async def _run_tests(
        self, repository: Mapping[str, str | None], sandbox: Sandbox, tests: Sequence[HiddenTest]
    ) -> list[str]:
        folder = self.folder
        image_folder = folder.workdir if folder.is_in_image else ""
        return await run_tests(sandbox, repository, tests, timeout_s=folder.timeout_s, image_folder=image_folder)

    async def _by_script(
        self, repository: Mapping[str, str | None], sandboxes: SandboxSource, sentinels: Sequence[Sentinel] = ()
    ) -> Reward:
        async def judge(sandbox: Sandbox) -> Reward:
            return await self._judge_by_script(repository, sandbox, sentinels)

        return await judged_in_sandbox(sandboxes, self.verdict_spec, judge)

    async def _unless_prevented(self, repository: Mapping[str, str | None], sandboxes: SandboxSource) -> Reward:
        """Return 0 if the script gives no reward again, but gives one for the repository without changes."""
        again = await self._by_script(repository, sandboxes)
        if again.failure_kind in SCRIPT_FAILURES and (await self._by_script(self.with_changes({}), sandboxes)).valid:
            return replace(forged(()), status=again.failure_kind, detail=again.detail)
        return again

    async def _unless_forged(
        self,
        found: Reward,
        script: TestScript,
        repository: Mapping[str, str | None],
        sandboxes: SandboxSource,
        seed: int,
    ) -> Reward:
        """Return the script's verdict, or that on a forgery if the code also passes sentinels, which right code fails.

        One sentinel proves it if the solution fails this sentinel. Without a solution, or for a script that gives a
        fraction, only all together do: the script might not run one sentinel's test.
        """
        rng = random.Random(f"sentinels/{self.name}/{seed}")
        sentinels = script.sentinels(rng)[: self.folder.own.sentinels]
        if not sentinels:
            return found
        runs = [partial(self._by_script, repository, sandboxes, wrong) for wrong in ((), *((s,) for s in sentinels))]
        again, *rewards = await _together(runs, rng)
        if not again.valid or again.value < found.value:
            return again
        passed = []
        for sentinel, reward in zip(sentinels, rewards, strict=True):
            if not reward.valid and reward.failure_kind not in SCRIPT_FAILURES:
                return reward
            if not reward.valid or reward.value < found.value:
                continue
            if found.value >= 1.0 and self.folder.solution:
                if await self._solution_fails(sentinel, sandboxes):
                    return forged([sentinel])
                continue  # the script does not run this test, or the test's result does not count
            passed.append(sentinel)
        return forged(passed) if passed and len(passed) == len(sentinels) else found

    async def _solution_fails(self, sentinel: Sentinel, sandboxes: SandboxSource) -> bool:
        """Return whether the solution passes the original tests and fails this sentinel."""
        solution = self.with_changes(read_answer(await self.solve(sandboxes) or "") or {})
        with_it = await self._by_script(solution, sandboxes, (sentinel,))
        return with_it.value < 1.0 and (await self._by_script(solution, sandboxes)).value >= 1.0

    async def _by_named_tests(
        self, tests: NamedTests, files: Mapping[str, str | None], sandboxes: SandboxSource, seed: int
    ) -> Reward:
        """Return the named tests' verdict, or that on a forgery, which passes sentinels that the solution fails."""
        rng, wrong = random.Random(f"sentinels/{self.name}/{seed}"), list[Sentinel]()

        async def judge(sandbox: Sandbox) -> Reward:
            prepared = await self._prepared(tests, sandbox)
            if isinstance(prepared, Reward):
                return prepared
            wrong[:] = wrong or self._drawn(tests, prepared, rng)
            run = await prepared.run(self._counted(tests, files), timeout_s=self.folder.timeout_s)
            return named_verdict(tests, run, pays_share=self.folder.own.score == "share")

        found = await judged_in_sandbox(sandboxes, self.verdict_spec, judge)
        if not found.valid or not found.terms["solved"] or not wrong:
            return found
        once_more = partial(judged_in_sandbox, sandboxes, self.verdict_spec, judge)
        with_wrong = partial(self._passed, tests, wrong, files, sandboxes)
        runs: list[Callable[[], Coroutine[Any, Any, Any]]] = [once_more] * _TRUE_RUNS + [with_wrong] * _WRONG_RUNS
        ended = await _together(runs, rng)
        again: Reward
        for again in ended[:_TRUE_RUNS]:
            if not again.valid or not again.terms["solved"]:
                return again
        passed = list[Sentinel]()
        for run in ended[_TRUE_RUNS:]:
            if isinstance(run, Reward):
                return run
            passed += [each for each in run if each not in passed]
        if passed and self.folder.solution:
            solution = read_answer(await self.solve(sandboxes) or "") or {}
            also = await self._passed(tests, passed, solution, sandboxes)
            if isinstance(also, Reward):
                return also
            passed = [each for each in passed if each not in also]
        elif len(passed) < len(wrong):
            return found  # a passed sentinel may also be one that no code can fail; only a solution could tell
        return forged(passed) if passed else found

    async def _passed(
        self, tests: NamedTests, sentinels: list[Sentinel], files: Mapping[str, str | None], sandboxes: SandboxSource
    ) -> list[Sentinel] | Reward:
        """Return the sentinels that these changes pass; an invalid reward if the sandboxes fail."""
        found: list[Sentinel] = []

        async def judge(sandbox: Sandbox) -> Reward:
            prepared = await self._prepared(tests, sandbox)
            if isinstance(prepared, Reward):
                return prepared
            changes = self._counted(tests, files)
            run = await prepared.run(changes, timeout_s=self.folder.timeout_s, sentinels=sentinels)
            found[:] = passed_sentinels(sentinels, tests.names, run)
            return named_verdict(tests, run, pays_share=False)

        verdict = await judged_in_sandbox(sandboxes, self.verdict_spec, judge)
        return found if verdict.valid else verdict

    async def _prepared(self, tests: NamedTests, sandbox: Sandbox) -> PreparedTests | Reward:
        # Copy in a thread: the files of a mirror may have to be read first.
        return await PreparedTests.prepare(sandbox, tests, await asyncio.to_thread(dict, self.folder.repository))

    def _drawn(self, tests: NamedTests, prepared: PreparedTests, rng: random.Random) -> list[Sentinel]:
        """Draw at most one sentinel for each named test. If the patch adds or changes tests, only these get one: code
        could recognize a sentinel of a test that its author, the agent, has read."""
        named = {name.partition("[")[0] for name in tests.names}
        texts = {path: prepared.texts[path] for path in tests.files if path in prepared.texts}
        known = {test for path, data in prepared.before.items() for test in tests_in(path, data).items()}
        hidden = {name for path, data in texts.items() for name, text in tests_in(path, data).items()
                  if (name, text) not in known}  # fmt: skip
        named = named & hidden or named
        firsts: dict[str, Sentinel] = {}
        for each in draw(texts, list(texts), rng):
            if each.name in named:
                firsts.setdefault(each.name, each)
        return list(firsts.values())[: self.folder.own.sentinels]

    def _counted(self, tests: NamedTests, files: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the changes without those to the tests, and to files that control how tests run."""
        base, told = self.folder.repository, (self.folder.instruction, *self.folder.solution.values())
        own = {path: text for path, text in files.items() if path not in tests.own_files}
        _, left_out = without_steering({path: base[path] for path in own if path in base}, own, told)
        return {path: text for path, text in own.items() if path not in left_out}

    async def _judge_by_script(
        self, changed: Mapping[str, str | None], sandbox: Sandbox, sentinels: Sequence[Sentinel]
    ) -> Reward:
        folder = self.folder
        assert folder.script is not None
        told = (folder.instruction, *folder.solution, *folder.solution.values())
        repository, left_out = without_steering(folder.repository, changed, told)
        reward = await judge_by_script(
            sandbox,
            folder.script,
            repository,
            workdir=folder.workdir,
            timeout_s=folder.timeout_s,
            sentinels=sentinels,
        )
        note = f"left out: {', '.join(left_out)}. " if left_out else ""
        return replace(reward, detail=note + reward.detail)


async def _together(runs: Sequence[Callable[[], Coroutine[Any, Any, _T]]], rng: random.Random) -> list[_T]:
    """Run a verdict's runs at the same time, started in random order: code could tell the run with the true tests from
    those with wrong ones by the clock if it always came first. Return results in the order of `runs`."""
    order = rng.sample(range(len(runs)), len(runs))
    ended = dict(zip(order, await side_by_side(runs[place]() for place in order), strict=True))
    return [ended[place] for place in range(len(runs))]


def load_repository(folder: Traversable, name: str, *, trusts_script: bool = False) -> RepositoryTask:
    return RepositoryTask(folder=read_folder(folder, name, trusts_script=trusts_script))
