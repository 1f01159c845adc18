"""Prompts that are too long: an error, or a cut, by verl's names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rayapp.core.errors import InputError

Truncation = Literal["error", "left", "right", "middle"]


def cut_prompt(ids: Sequence[int], max_tokens: int, truncation: Truncation, where: str) -> Sequence[int]:
    """At most `max_tokens` of `ids`.

    Args:
        truncation: `left` drops the beginning, `right` the end, `middle` what lies between two halves.
    Raises:
        InputError: it is too long and truncation is `error`.
    """
    if len(ids) <= max_tokens:
        return ids
    match truncation:
        case "left":
            return ids[-max_tokens:]
        case "right":
            return ids[:max_tokens]
        case "middle":
            head = max_tokens // 2
            return [*ids[:head], *ids[len(ids) - (max_tokens - head) :]]
    raise InputError(
        f"{where}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {max_tokens}. "
        "Raise it, set filter_overlong_prompts, or choose a truncation: left, right or middle."
    )
