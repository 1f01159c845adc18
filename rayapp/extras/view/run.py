"""The page's view of one run, assembled from its files. Read only."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rayapp.core.errors import InputError, StorageError
from rayapp.extras.view.curves import PANELS, Metrics, curve, keys_of, keys_of_panel
from rayapp.extras.view.groups import GroupFilter, Groups, Page, facets, find_groups, neighbours
from rayapp.extras.view.trajectory import Advantages, group_advantages, load_tokenizer, read_group, read_trajectory
from rayapp.runs.layout import PICTURES
from rayapp.runs.source import RunSource
from rayapp.runs.tracking.metrics import warning_of
from rayapp.storage.media import kind_of

# A run that has logged nothing for this many times the length of its last step is shown as quiet, not running.
QUIET_STEPS = 5
QUIET_FLOOR_S = 120.0


class ViewedRun:
    """One run that the server shows; `tokenizer_path` is that of --tokenizer."""

    def __init__(self, source: RunSource, tokenizer_path: Path | None = None) -> None:
        self.source = source
        self.name = source.name
        self._groups = Groups(source)
        self._metrics = Metrics(source)
        self._tokenizer_path = tokenizer_path
        self._tokenizer: Any | None = None
        # Revision, records and configuration when the storage last answered.
        self._seen: tuple[str, list[dict[str, Any]], dict[str, Any]] = ("", [], {})

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration; empty if there is none, or it doesn't parse."""
        try:
            loaded = yaml.safe_load(self.source.read_bytes("config.yaml") or b"")
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def summary(self) -> dict[str, Any]:
        """Return the data that the page polls, those of the last answer if the storage is unreachable. `revision`
        changes if the page has to be redrawn."""
        problems = [*self._groups.problems]
        try:
            files = hash(tuple(self.source.step_files()))
            self._seen = (f"{self.source.stamp('metrics.jsonl')}{files}", self._metrics.records(), self.config())
        except StorageError as error:
            problems.insert(0, str(error))
        revision, records, config = self._seen
        num_steps = _section(config, "train").get("num_steps")
        return {
            "name": self.name,
            "location": self.source.root,
            "revision": revision,
            "state": run_state(records, num_steps, now=time.time()),
            "num_steps": num_steps,
            "last": records[-1] if records else None,
            "problems": [text for text in (warning_of(records), *problems) if text][:20],
        }

    def panels(self) -> list[dict[str, Any]]:
        """Return the charts that have data, with their curves."""
        records = self._metrics.records()
        known = keys_of(records)
        shown = [(panel, keys) for panel in PANELS if (keys := keys_of_panel(panel, known))]
        return [
            asdict(panel) | {
                "keys": keys,
                "curves": {key: curve(records, key, absent=0.0 if panel.absent_is_zero else None) for key in keys},
            }
            for panel, keys in shown
        ]  # fmt: skip

    def facets(self) -> dict[str, Any]:
        return facets(self._groups)

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        return find_groups(self._groups, GroupFilter.parse(query), Page.parse(query))

    def group(self, step: int, group_id: int) -> dict[str, Any]:
        """Return a group with its trajectories and their advantages. Raises InputError: there is no such group."""
        rows = read_group(self.source, step, group_id)
        advantages = self._advantages(rows)
        for row, value in zip(rows, advantages.values, strict=True):
            row["advantage"] = value
        shared = {name: rows[0][name] for name in ("prompt", "prefill", "task", "num_prompt_tokens", "pictures")}
        return shared | {
            "step": step,
            "group_id": group_id,
            "neighbours": neighbours(self._groups, step, group_id),
            "advantage_label": advantages.label,
            "trajectories": [{name: value for name, value in row.items() if name not in shared} for row in rows],
        }

    def trajectory(self, step: int, group_id: int, index: int) -> dict[str, Any]:
        """Return one trajectory. Raises InputError: there is none."""
        rows = read_group(self.source, step, group_id)
        advantages = self._advantages(rows)
        found = read_trajectory(self.source, step, group_id, index, self.tokenizer())
        by_index = {row["index"]: value for row, value in zip(rows, advantages.values, strict=True)}
        return found | {
            "step": step,
            "group_id": group_id,
            "advantage": by_index.get(index),
            "advantage_label": advantages.label,
            "group_size": len(rows),
        }

    def picture(self, sha256: str) -> tuple[bytes, str]:
        """Return the bytes and media type of a picture. Raises InputError: the run has no such picture."""
        is_name = re.fullmatch("[0-9a-f]{64}", sha256) is not None
        data = self.source.read_bytes(f"{PICTURES}/{sha256}") if is_name else None
        # Send nothing of another kind, since a browser may run it.
        if data is None or (kind := kind_of(data)) is None:
            raise InputError(f"this run has no picture {sha256:.64}")
        return data, kind

    def tokenizer(self) -> Any | None:
        """Return the tokenizer, searched at each call: a run writes it when it ends."""
        if self._tokenizer is None:
            model_path = str(_section(self.config(), "model").get("path", ""))
            self._tokenizer = load_tokenizer(self.source, model_path, self._tokenizer_path)
        return self._tokenizer

    def _advantages(self, rows: list[dict[str, Any]]) -> Advantages:
        algorithm = _section(self.config(), "algorithm")
        return group_advantages([row["reward"] for row in rows], [row["valid"] for row in rows], algorithm)


def run_state(records: list[dict[str, Any]], num_steps: int | None, *, now: float) -> str:
    """Return waiting, running, finished or quiet, judged by the log: a viewer must not touch the run's lock."""
    if not records:
        return "waiting"
    last = records[-1]
    if num_steps is not None and last["step"] >= num_steps:
        return "finished"
    patience_s = max(QUIET_FLOOR_S, QUIET_STEPS * float(last.get("timing_s/step", 0.0)))
    return "running" if now - float(last.get("time", 0.0)) < patience_s else "quiet"


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
