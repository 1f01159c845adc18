"""A task over a repository: an agent changes files in a workspace, hidden tests judge the changes in another sandbox.

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
from rayapp.tasks.repository.work import applied, as_answer, changed_files, read_answer
from rayapp.tasks.sandboxed import judged_in_sandbox

TOOLS = ("bash", "edit", "python", "submit_work")
_GIT = "git init -q . && git add -A && git -c user.name=task -c user.email=task@localhost commit -q -m 'As handed out'"
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
        """The sandboxes of its workspaces and verdicts."""
        folder = self.folder
        return SandboxSpec(
            template=folder.image, memory_mib=folder.memory_mib, disk_mib=folder.disk_mib, max_processes=_PROCESSES
        )

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
            setup=("bash", "-c", _GIT),
        )

    async def collect(self, sandbox: Sandbox) -> str:
        """The answer that a workspace holds: the files that are not as they were.

        Raises:
            UnusableWorkError: too much has changed.
            SandboxError: the sandbox failed.
        """
        return as_answer(await changed_files(sandbox, self.folder.repository))

    @property
    def solution(self) -> str | None:
        """The solution as an answer."""
        return as_answer(dict(self.folder.solution)) if self.folder.solution else None

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
            found = await judged_in_sandbox(sandboxes, self.spec, partial(self._judge, self.with_changes(files)))
        return replace(found, time_score_s=time.monotonic() - started)

    def with_changes(self, files: Mapping[str, str | None]) -> dict[str, str]:
        """The repository as it is tested: changes of files that don't count are left out."""
        return applied(self.folder.repository, files, self.folder.own.answer)

    async def _judge(self, repository: Mapping[str, str], sandbox: Sandbox) -> Reward:
        tests = self.folder.tests
        outcomes = await run_tests(sandbox, repository, tests, timeout_s=self.folder.timeout_s)
        return verdict(tests, outcomes, pays_share=self.folder.own.score == "share")


def load_repository(folder: Traversable, name: str) -> RepositoryTask:
    """The task of a folder. Raises InputError as `read_folder`."""
    return RepositoryTask(folder=read_folder(folder, name))
