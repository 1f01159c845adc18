"""The verdict of a task on completions, by the very code that training scores with. Needs no model and no Ray: the pool
of sandboxes is in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayapp.api.arguments import ConfigLike, Overrides, TaskLike, load
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.aio import run_until_done, side_by_side
from rayapp.core.own_thread import awaited, work_apart
from rayapp.core.protocols import Task
from rayapp.core.types import Prompt, Reward
from rayapp.sandbox.pool.in_process import open_pool
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_task

_AT_ONCE = 4
"""Completions scored side by side; a sandbox costs little, the order is kept."""


def score(
    task: TaskLike,
    completions: str | Sequence[str],
    *,
    seed: int = 0,
    config: ConfigLike = None,
    overrides: Overrides = (),
) -> list[Reward]:
    """Score completions as training would, in sandboxes.

    Args:
        task: name of a task, a .yaml or .py file, or the task itself.
        completions: a text with the function's `def` line is taken as the whole answer, any other as what follows the
            task's prefill.
        seed: draws the hidden tests.
        config: take its sandboxes.
    Returns:
        One verdict each, in their order.
    Raises:
        UserError: the task or the sandboxes can't be used.
    """

    def work() -> list[Reward]:
        sandbox, found = load(config, overrides).sandbox, list[Reward]()
        texts = [completions] if isinstance(completions, str) else list(completions)
        score_all(as_task(task), texts, sandbox, seed=seed, tell=lambda _, verdict: found.append(verdict))
        return found

    return work_apart(work)


score_async = awaited(score)


def as_task(task: TaskLike) -> Task:
    """A task by name or file, or as it is. Raises InputError: it can't be used."""
    return load_task(str(task)) if isinstance(task, str | os.PathLike) else task


def score_all(
    task: Task, texts: Sequence[str], sandbox: SandboxConfig, *, seed: int, tell: Callable[[int, Reward], None]
) -> None:
    """Score in a pool that is ended behind it; `tell` gets the place of each text and its verdict, in order."""

    async def run() -> None:
        async with open_pool(sandbox.without_stock, f"score-{os.getpid()}") as (sandboxes, _):
            for start in range(0, len(texts), _AT_ONCE):
                batch = texts[start : start + _AT_ONCE]
                verdicts = (task.score(prompt_for(task, text), text, sandboxes, seed=seed) for text in batch)
                for place, verdict in enumerate(await side_by_side(verdicts), start):
                    tell(place, verdict)

    run_until_done(run())


def prompt_for(task: Task, text: str) -> Prompt:
    """The prompt that a text answers. A text with the function's `def` line is whole: it follows no prefill."""
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
    if isinstance(task, CodingTask) and f"def {task.func_name}" not in text:
        return replace(prompt, prefill=task.answer_prefix)
    return prompt
