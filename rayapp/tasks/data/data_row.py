"""One row of training data as plain data, taken out of verl's schema and checked. Pure; `reading.py` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayapp.core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One prompt and what its reward needs.

    Example: `DataRow(messages=({"role": "user", "content": "1+1?"},), data_source="openai/gsm8k", ground_truth="2")`.
    """

    messages: tuple[Mapping[str, Any], ...]
    """The prompt: role and content each."""
    data_source: str
    ground_truth: Any
    """What `reward_model.ground_truth` holds: a text for GSM8K."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by tool, e.g. {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}}."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that the row says, for custom rewards."""
    agent_name: str = ""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as the policy reads it, cut to its length where that is asked for; empty when nothing encodes it."""


def parse_row(raw: Mapping[str, Any], where: str) -> DataRow:
    """A row of a parquet file in verl's schema.

    Args:
        where: file and row, for messages.
    Raises:
        InputError: a value is missing or of another type.
    """
    reward = _mapping(raw.get("reward_model"), "reward_model", where)
    if reward.get("ground_truth") is None:
        raise InputError(f"{where}: reward_model has no ground_truth")
    extra = _without_none(_mapping(raw.get("extra_info") or {}, "extra_info", where))
    source = raw.get("data_source")
    if not isinstance(source, str) or not source:
        raise InputError(f"{where}: data_source must be a text, not {source!r:.60}")
    return DataRow(
        messages=parse_messages(raw.get("prompt"), where),
        data_source=source,
        ground_truth=reward["ground_truth"],
        tools_kwargs=_mapping(extra.get("tools_kwargs", {}), "extra_info.tools_kwargs", where),
        extra_info=extra,
        agent_name=raw.get("agent_name") or "",
    )


def parse_messages(prompt: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a `prompt` column. Raises InputError as `parse_row`."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        raise InputError(f"{where}: prompt must be a list of messages that isn't empty, not {prompt!r:.60}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{where}: a message must have a role and a content, not {message!r:.60}")
        if not isinstance(message.get("content"), str | list):
            raise InputError(f"{where}: a message's content must be a text, not {message.get('content')!r:.60}")
    return tuple(_without_none(message) for message in prompt)


def _mapping(value: object, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {name} must be a struct, not {value!r:.60}")
    return value


def _without_none(value: Any) -> Any:
    """The value without keys that are None: parquet gives every row the keys of all rows, also of other rows' tools."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
