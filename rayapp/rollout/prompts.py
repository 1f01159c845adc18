"""Rendered prompts: each task's prompt as token ids, checked against the limit before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from rayapp.config import Config
from rayapp.errors import InputError
from rayapp.protocols import Task, Tokenizer
from rayapp.types import Prompt


def render_prompts(config: Config, tasks: Sequence[Task]) -> list[Prompt]:
    """One prompt per task, in the order of `config.tasks`.

    Raises:
        InputError: a prompt is longer than rollout.max_prompt_tokens.
    """
    tokenizer = load_tokenizer(config)
    prompts = [task.render(tokenizer) for task in tasks]
    limit = config.rollout.max_prompt_tokens
    for prompt in prompts:
        if prompt.token_ids.size > limit:
            raise InputError(
                f"task {prompt.task!r}: its prompt has {prompt.token_ids.size} tokens, rollout.max_prompt_tokens is "
                f"{limit}. Raise it, or shorten the prompt."
            )
    return prompts


def load_tokenizer(config: Config) -> Tokenizer:
    """The model's own tokenizer."""
    from transformers import AutoTokenizer  # seconds to import: not when the CLI only prints help

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    return tokenizer
