"""Checks whether a run may resume: its configuration must lead to the same training, its folder have a known format.

`format.json` holds the format of a run folder; a program that is too old for it refuses and changes nothing. Folders
without the file are format 1.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import renamed_keys
from rayapp.core.errors import RunFolderError
from rayapp.core.files import write_text
from rayapp.core.version import __version__

log = logging.getLogger(__name__)


def _of(section: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys)


FREE_KEYS = (
    *("cluster", "checkpoint", "eval", "tracking", "recovery", "sandbox"),
    *_of("run", "output_dir", "staging_dir", "resume", "allow_changed"),
    "data.cache_dir",
    *_of("server", "start_timeout_s", "request_timeout_s", "sync_timeout_s"),
    *_of("learner", "step_timeout_s", "offload_when_idle"),
    *_of("rollout", "group_deadline_s", "max_failed_ratio"),
    *_of("judges", "base_url", "api_key_env", "response_format", "timeout_s", "max_retries", "requests_per_minute"),
    *_of("judges", "max_concurrent", "cache", "input_price", "output_price"),
)
"""Keys and sections that may differ: they change where a run executes, how long, and what it records, but not the
training.

train.num_steps may differ, too, unless the learning rate depends on it.
"""
MACHINE_KEYS = (
    "rollout.num_workers",
    *_of("server", "num_servers", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib", "kv_block_tokens"),
    *_of("server", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "cpu_threads", "weight_transport"),
    "server.weight_bucket_mib",
    *_of("model_servers", "tensor_parallel_size", "gpu_memory_utilization"),
    *_of("learner", "num_learners", "max_tokens_per_microbatch", "share_prefixes", "activation_checkpointing"),
    *_of("learner", "log_prob_chunk_tokens", "cpu_threads", "cpu_offload"),
)
"""Keys that differ between machines. The training is equal, but not to the last bit: a warning says so."""
_IN_A_LIST = re.compile(r"^sources\[\d+\]\.|\[\d+\]")
"""Prefix of keys in a list: a key that may differ in a run may differ in each of its sources and judges."""


def check_same_training(config: Config, stored: Path) -> None:
    """Compare the configuration with the one that made the run folder.

    Raises:
        RunFolderError: keys that change the training differ, with both values of each; or the folder has keys of an
            older version.
    """
    made_with = yaml.safe_load(stored.read_text()) or {}
    if old := renamed_keys(made_with):
        raise RunFolderError(
            f"{stored.parent} was made by an older version, whose key {next(iter(old))} is now called "
            f"{next(iter(old.values()))}: continue with the older version, or choose another run.name."
        )
    now = dict(_flat(config.model_dump(mode="json")))
    # A key unknown to the run's version had its default value.
    usual = {key: value for key, value in _flat(Config().model_dump(mode="json")) if key in now}
    before = usual | dict(_flat(made_with))
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
        log.warning(
            "the run resumes with a changed %s. From this step on the run does not repeat to the last bit.", line
        )


def _is_among(key: str, free: Sequence[str]) -> bool:
    key = _IN_A_LIST.sub("", key)
    return any(key == each or key.startswith(f"{each}.") for each in free)


def _reason(key: str, config: Config) -> str:
    if key != "train.num_steps":
        return ""
    return f" (learner.optimizer.schedule is {config.learner.optimizer.schedule}: each step's learning rate follows)"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values, including those of sections in a list, as `sources[0].name`."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                yield from _flat(each, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


FORMAT_FILE = "format.json"
FORMAT = 1


def check_format(folder: Path) -> None:
    """Check the folder's format. Raises RunFolderError: a newer version wrote the folder."""
    file = folder / FORMAT_FILE
    if file.exists():
        check_format_text(file.read_bytes(), str(folder))


def check_format_text(text: bytes, where: str) -> None:
    """Check the text of `format.json` of the run at `where`. Raises RunFolderError: a newer version, or malformed."""
    try:
        raw = json.loads(text)
        found, writer = int(raw["format"]), str(raw.get("written_by", "another version"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{where}/{FORMAT_FILE} can't be read ({error!r}): the folder is damaged, or no run"
        ) from None
    if found > FORMAT:
        raise RunFolderError(
            f"{where} was written by a newer version ({writer}, format {found}); this version reads format {FORMAT}. "
            "Nothing was changed: use the newer version."
        )


def write_format(folder: Path) -> None:
    """Write the format into the folder."""
    text = json.dumps({"format": FORMAT, "written_by": f"rayapp {__version__}"})
    file = folder / FORMAT_FILE
    if not file.exists() or file.read_text() != text:
        write_text(file, text)
