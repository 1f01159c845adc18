"""Scores completions of a task with the code of training, without a model or Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayapp.api.arguments import ConfigLike, Overrides, TaskLike, load
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done, side_by_side
from rayapp.core.errors import ConfigError
from rayapp.core.own_thread import work_apart
from rayapp.core.protocols import AgentTask, EnvironmentRow, Task
from rayapp.core.types import Prompt, Reward
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.providers import why_no_workspace
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_task
from rayapp.tasks.verdict import task_verdict

_AT_ONCE = 4  # completions in parallel, in order


def score(
    task: TaskLike,
    completions: str | Sequence[str],
    *,
    seed: int = 0,
    config: ConfigLike = None,
    overrides: Overrides = (),
) -> list[Reward]:
    """Score completions as training does, in sandboxes. Return one verdict for each, in order.

    A completion with the function's `def` line is the whole answer; any other is appended to the task's prefill. `seed`
    draws the hidden tests; of the config, the section `sandbox` is used.
    """

    def work() -> list[Reward]:
        sandbox, found = load(config, overrides).sandbox, list[Reward]()
        texts = [completions] if isinstance(completions, str) else list(completions)
        score_all(as_task(task), texts, sandbox, seed=seed, tell=lambda _, verdict: found.append(verdict))
        return found

    return work_apart(work)


def as_task(task: TaskLike) -> Task:
    found = load_task(str(task)) if isinstance(task, str | os.PathLike) else task
    if isinstance(found, EnvironmentRow):
        found.refuse()
    return found


def score_all(
    task: Task, texts: Sequence[str], sandbox: SandboxConfig, *, seed: int, tell: Callable[[int, Reward], None]
) -> None:
    """Score texts in a temporary pool. `tell` is called with the index and verdict of each text, in order."""
    if isinstance(task, AgentTask) and (why := why_no_workspace(sandbox, task.agent_start())):
        raise ConfigError(f"task {task.name} {why}")

    async def run() -> None:
        async with open_pool(sandbox.without_stock, f"score-{os.getpid()}") as (sandboxes, _):
            for start in range(0, len(texts), _AT_ONCE):
                batch = texts[start : start + _AT_ONCE]
                verdicts = (task_verdict(task, prompt_for(task, text), text, sandboxes, seed=seed) for text in batch)
                for place, verdict in enumerate(await side_by_side(verdicts), start):
                    tell(place, verdict)

    run_until_done(run())


def prompt_for(task: Task, text: str) -> Prompt:
    """Return the prompt that a text answers. It has no prefill if the text has the function's `def` line."""
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
    if isinstance(task, CodingTask) and f"def {task.func_name}" not in text:
        return replace(prompt, prefill=task.answer_prefix)
    return prompt
