"""Whether a run may go on under a changed configuration: only if what it learns from the same state is the same."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.core.errors import RunFolderError

log = logging.getLogger(__name__)


def _of(section: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys)


FREE_KEYS = (
    *("cluster", "checkpoint", "eval", "tracking", "recovery", "sandbox"),
    *_of("run", "output_dir", "staging_dir", "resume", "allow_changed"),
    *_of("data", "eval_files", "max_eval_rows", "cache_dir"),
    *_of("server", "start_timeout_s", "request_timeout_s", "sync_timeout_s"),
    *_of("learner", "step_timeout_s", "offload_when_idle"),
    *_of("rollout", "group_deadline_s", "max_failed_ratio"),
    *_of("judges", "base_url", "api_key_env", "response_format", "timeout_s", "max_retries", "requests_per_minute"),
    *_of("judges", "max_concurrent", "cache", "input_price", "output_price"),
)
"""Keys and sections that may differ: they change where, how long and how visibly a run goes on, not what it learns.

So may train.num_steps while the learning rate does not follow from it.
"""
MACHINE_KEYS = (
    "rollout.num_workers",
    *_of("server", "num_servers", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "kv_block_tokens"),
    *_of("server", "max_num_seqs", "enforce_eager", "cpu_threads", "weight_transport", "weight_bucket_mib"),
    *_of("model_servers", "tensor_parallel_size", "gpu_memory_utilization"),
    *_of("learner", "num_learners", "max_tokens_per_microbatch", "share_prefixes", "activation_checkpointing"),
    *_of("learner", "log_prob_chunk_tokens", "cpu_threads", "cpu_offload"),
)
"""Keys that another machine needs to be different. The same is learned, but not to the last bit: a warning says so."""
_IN_A_LIST = re.compile(r"^sources\[\d+\]\.|\[\d+\]")
"""What may differ in a run may differ in its sources, and in each judge."""


def check_same_training(config: Config, stored: Path) -> None:
    """Compare with the configuration that the run folder was made by.

    Raises:
        RunFolderError: keys differ that change the training; the message names each with both values.
    """
    now = dict(_flat(config.model_dump(mode="json")))
    # A key that the run's version did not have was what it is by default.
    usual = {key: value for key, value in _flat(Config().model_dump(mode="json")) if key in now}
    before = usual | dict(_flat(yaml.safe_load(stored.read_text()) or {}))
    free = FREE_KEYS if config.learner.optimizer.schedule != "constant" else (*FREE_KEYS, "train.num_steps")
    changed = {
        key: f"{key}: {before.get(key)!r} before, {now.get(key)!r} now{_reason(key, config)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_among(key, free)
    }
    meant = (*MACHINE_KEYS, *config.run.allow_changed)
    refused = {key: line for key, line in changed.items() if not _is_among(key, meant)}
    if refused:
        raise RunFolderError(
            f"{stored.parent} was made by another configuration:\n  " + "\n  ".join(refused.values()) + "\nGo on with "
            "the old values, or choose another run.name (model.path may be this run's final/). If the change is meant: "
            f"run.allow_changed='[{', '.join(refused)}]'."
        )
    for line in changed.values():
        log.warning("goes on with another %s. From here on the run is not repeated to the last bit.", line)


def _is_among(key: str, free: Sequence[str]) -> bool:
    key = _IN_A_LIST.sub("", key)
    return any(key == each or key.startswith(f"{each}.") for each in free)


def _reason(key: str, config: Config) -> str:
    if key != "train.num_steps":
        return ""
    return f" (learner.optimizer.schedule is {config.learner.optimizer.schedule}: each step's learning rate follows)"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; those of sections in a list too, as `sources[0].name`."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                yield from _flat(each, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value
