"""Rendered prompts: each task's prompt as token ids, checked against the limit before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.protocols import Task
from rayapp.core.types import Prompt
from rayapp.storage.models.tokenizer import load_tokenizer


def prompted_tasks(config: Config, tasks: Sequence[Task]) -> list[tuple[Task, Prompt]]:
    """The tasks, each with its prompt. Raises InputError as `render_prompts`."""
    return list(zip(tasks, render_prompts(config, tasks), strict=True))


def render_prompts(config: Config, tasks: Sequence[Task]) -> list[Prompt]:
    """One prompt per task, in the order of `config.tasks`.

    Raises:
        InputError: a prompt is longer than rollout.max_prompt_tokens.
    """
    tokenizer = load_tokenizer(config)
    prompts = [task.render(tokenizer) for task in tasks]
    check_length(prompts, config.rollout.max_prompt_tokens)
    return prompts


def check_length(prompts: Sequence[Prompt], limit: int) -> None:
    """Raises InputError for a prompt that is longer than rollout.max_prompt_tokens."""
    for prompt in prompts:
        if prompt.token_ids.size > limit:
            raise InputError(
                f"task {prompt.task!r}: its prompt has {prompt.token_ids.size} tokens, rollout.max_prompt_tokens is "
                f"{limit}. Raise it, or shorten the prompt."
            )
