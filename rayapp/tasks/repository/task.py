"""A task over a repository: an agent changes files in a workspace, hidden tests judge the changes in another sandbox.
Where the user trusts it, the folder's own `test.sh` does.

    folder -> agent_start: the repository, a quota, tools -> submit: the changed files, as an answer -> score

Played by the tool agent alone. See `rayapp.core.protocols.AgentTask`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources.abc import Traversable

from rayapp.core.errors import InputError
from rayapp.core.protocols import Sandbox, SandboxSource, Tokenizer
from rayapp.core.types import AgentStart, Prompt, Reward, SandboxSpec
from rayapp.tasks.repository.folder import TaskFolder, read_folder
from rayapp.tasks.repository.grading import no_answer, run_tests, verdict
from rayapp.tasks.repository.scripts import LINK_WORKDIR, SOLVE, judge_by_script, run_solve_script, without_steering
from rayapp.tasks.repository.work import applied, as_answer, changed_files, read_answer
from rayapp.tasks.sandboxed import LEASE_TIMEOUT_S, judged_in_sandbox

TOOLS = ("bash", "edit", "python", "submit_work")
_GIT = "git init -q . && git add -A && git -c user.name=task -c user.email=task@localhost commit -q -m 'As handed out'"
_SETUP_TIMEOUT_S = 30.0
_PROCESSES = 64
"""Git starts helpers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryTask:
    """See the module; make one with `load_repository`."""

    folder: TaskFolder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def spec(self) -> SandboxSpec:
        """The sandboxes of its workspaces."""
        folder = self.folder
        return SandboxSpec(
            template=folder.image,
            memory_mib=folder.memory_mib,
            disk_mib=folder.disk_mib,
            max_processes=_PROCESSES,
            own_root=bool(folder.workdir),
        )

    @property
    def verdict_spec(self) -> SandboxSpec:
        """The sandboxes of its verdicts."""
        return replace(self.spec, template=self.folder.script.image) if self.folder.script else self.spec

    def render(self, tokenizer: Tokenizer) -> Prompt:
        """Raises InputError: an agent has to play it."""
        raise InputError(
            f"task {self.name} is a repository to work in, which one answer can't: set agent.task_agent to tool_agent"
        )

    def agent_start(self) -> AgentStart:
        """The instruction, and the repository in a workspace with a quota, under git where there is one."""
        told = f"{self.folder.instruction}\n\nThe repository is your workspace. Call submit when you are done."
        return AgentStart(
            messages=({"role": "user", "content": told},),
            files=self.folder.repository,
            tools=TOOLS,
            tools_kwargs={"submit": {"create_kwargs": {"collect": self.collect}}},
            spec=self.spec,
            images=self.folder.images,
            setup=("bash", "-c", f"{LINK_WORKDIR}{_GIT}" if self.folder.workdir else _GIT, self.folder.workdir),
        )

    async def collect(self, sandbox: Sandbox) -> str:
        """The answer that a workspace holds: the files that are not as they were.

        Raises:
            UnusableWorkError: too much has changed.
            SandboxError: the sandbox failed.
        """
        return as_answer(await changed_files(sandbox, self.folder.repository))

    async def solve(self, sandboxes: SandboxSource) -> str | None:
        """The solution as an answer; None where the folder has none. `solve.sh` is run in a workspace.

        Raises:
            UnusableWorkError: it changes too much.
            SandboxError: the sandbox failed.
        """
        folder = self.folder
        if SOLVE not in folder.solution:
            return as_answer(dict(folder.solution)) if folder.solution else None
        async with sandboxes.lease(self.spec, timeout_s=LEASE_TIMEOUT_S) as sandbox:
            start = self.agent_start()
            for path, text in start.files.items():
                await sandbox.write_file(path, text.encode())
            await sandbox.run_command(start.setup, timeout_s=_SETUP_TIMEOUT_S)
            await run_solve_script(sandbox, folder.solution, workdir=folder.workdir, timeout_s=folder.timeout_s)
            return await self.collect(sandbox)

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: SandboxSource, *, seed: int) -> Reward:
        """1 where the changed files pass every hidden test, else 0; or the share of tests, where task.toml says so.

        Raises:
            SandboxConfigError: no sandbox can ever be had with this configuration.
        """
        started = time.monotonic()
        files = read_answer(completion_text)
        if files is None:
            found = no_answer("nothing was handed in")
        else:
            found = await judged_in_sandbox(
                sandboxes, self.verdict_spec, partial(self._judge, self.with_changes(files))
            )
        return replace(found, time_score_s=time.monotonic() - started)

    def with_changes(self, files: Mapping[str, str | None]) -> dict[str, str]:
        """The repository as it is tested: changes of files that don't count are left out."""
        return applied(self.folder.repository, files, self.folder.own.answer)

    async def _judge(self, repository: Mapping[str, str], sandbox: Sandbox) -> Reward:
        if self.folder.script is not None:
            return (await self.judge_by_script(repository, sandbox))[0]
        tests = self.folder.tests
        outcomes = await run_tests(sandbox, repository, tests, timeout_s=self.folder.timeout_s)
        return verdict(tests, outcomes, pays_share=self.folder.own.score == "share")

    async def judge_by_script(self, changed: Mapping[str, str], sandbox: Sandbox) -> tuple[Reward, float]:
        """The reward of its `test.sh`, and the seconds that it took. Raises as `scripts.judge_by_script`."""
        folder = self.folder
        assert folder.script is not None
        told = (folder.instruction, *folder.solution, *folder.solution.values())
        repository, left_out = without_steering(folder.repository, changed, told)
        gone = sorted(folder.repository.keys() - repository.keys())
        reward, seconds = await judge_by_script(
            sandbox, folder.script, repository, gone=gone, workdir=folder.workdir, timeout_s=folder.timeout_s
        )
        note = f"left out: {', '.join(left_out)}. " if left_out else ""
        return replace(reward, detail=note + reward.detail), seconds


def load_repository(folder: Traversable, name: str, *, trusts_script: bool = False) -> RepositoryTask:
    """The task of a folder. Arguments and errors are those of `read_folder`."""
    return RepositoryTask(folder=read_folder(folder, name, trusts_script=trusts_script))
