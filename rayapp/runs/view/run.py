"""The page's view of one run, assembled from its files. Read only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from rayapp.core.errors import InputError, RayappError, StorageError
from rayapp.runs.mirror.layout import PROFILES
from rayapp.runs.profiles import SUMMARY, read_profile
from rayapp.runs.tracking.metrics import warning_of
from rayapp.runs.view.curves import PANELS, Curves, Metrics, Panel, curve, keys_of, keys_of_panel
from rayapp.runs.view.details import diff_lines, group_advantages, load_tokenizer, read_group, read_trajectory
from rayapp.runs.view.groups import GroupFilter, Page, facets, find_groups, neighbours, same_prompt
from rayapp.runs.view.index import GroupIndex, TextSearch
from rayapp.runs.view.source import RunSource

# A run that has logged nothing for this many times the length of its last step is shown as quiet, not running.
QUIET_STEPS = 5
QUIET_FLOOR_S = 120.0
MOST_PROFILES = 5
_Small = tuple[tuple[int, int], list[dict[str, Any]], dict[str, Any]]
"""Stamp of metrics.jsonl, its records, and the configuration."""


class ViewedRun:
    """One run that the server shows.

    Args:
        source: its files.
        tokenizer_path: path given with --tokenizer.
    """

    def __init__(self, source: RunSource, tokenizer_path: Path | None = None) -> None:
        self.source = source
        self.name = source.name
        self.index = GroupIndex(source)
        self.search = TextSearch(source)
        self._metrics = Metrics(source)
        self._tokenizer_path = tokenizer_path
        self._tokenizer: Any | None = None
        self._seen: _Small = ((0, 0), [], {})
        self.problem = ""
        """Reason why the last refresh failed; empty if it succeeded."""

    def refresh(self) -> bool:
        """Look for new files; returns True if more are waiting. The page shows when the storage is unreachable."""
        try:
            more = self.index.refresh()
        except RayappError as error:
            self.problem = str(error)
            return False
        self.problem = ""
        return more

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration; empty if there is none, or it doesn't parse."""
        try:
            loaded = yaml.safe_load(self.source.read_bytes("config.yaml") or b"")
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def records(self) -> list[dict[str, Any]]:
        """Return every logged step."""
        return self._metrics.records()

    def _small_files(self) -> tuple[_Small, str]:
        """Return the small files, and why they may be outdated: an unreachable storage must not break the page."""
        try:
            stamp = self.source.stamp("metrics.jsonl") or (0, 0)
            self._seen = (stamp, self._metrics.records(), self.config())
        except StorageError as error:
            return self._seen, str(error)
        return self._seen, ""

    def summary(self) -> dict[str, Any]:
        """Return the data that the page polls; `revision` changes if the page has to be redrawn."""
        (stamp, records, config), away = self._small_files()
        num_steps = _section(config, "train").get("num_steps")
        progress = asdict(self.index.progress())
        problems = list(
            dict.fromkeys(text for text in (away, self.problem, warning_of(records), *progress.pop("problems")) if text)
        )
        return {
            "name": self.name,
            "location": self.source.root,
            "revision": f"{stamp[0]}-{stamp[1]}-{progress['revision']}",
            "state": run_state(records, num_steps, now=time.time()),
            "num_steps": num_steps,
            "last": records[-1] if records else None,
            "index": progress,
            "problems": problems[:20],
        }

    def panels(self) -> list[dict[str, Any]]:
        """Return the charts with their curves."""
        shown = panels_of(self._metrics.records())
        return [asdict(panel) | {"keys": list(curves), "curves": curves} for panel, curves in shown]

    def profiles(self) -> list[dict[str, Any]]:
        """Return the summaries of the last profiled steps, without damaged ones."""
        found = []
        for name in self.source.profiled_steps()[:MOST_PROFILES]:
            text = self.source.read_bytes(f"{PROFILES}/{name}/{SUMMARY}")
            with suppress(ValueError):
                profile = read_profile(text or b"")
                found.append(asdict(profile) | {"rows": list(profile.rows()), "total_s": profile.total_s})
        return found

    def facets(self) -> dict[str, Any]:
        return facets(self.index)

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the page of groups for a query. Raises InputError: an invalid filter."""
        chosen, page = GroupFilter.parse(query), Page.parse(query)
        if chosen.text is None:
            return find_groups(self.index, chosen, page)
        found = self.search.find(chosen.text)
        looked = {"searched": found.num_searched, "files": found.num_files}
        return find_groups(self.index, chosen, page, among=found.groups) | looked

    def group(self, step: int, group_id: int) -> dict[str, Any]:
        """Return a group with its trajectories, their advantages, and the other groups of its prompt.

        Raises:
            InputError: there is no such group.
        """
        rows = read_group(self.source, step, group_id)
        advantages = self._advantages(rows)
        for row, value in zip(rows, advantages.values, strict=True):
            row["advantage"] = value
        known = self.index.query(
            "select prompt_id from groups where step = $step and group_id = $group", {"step": step, "group": group_id}
        )
        shared = {name: rows[0].pop(name) for name in ("prompt", "prefill", "task", "num_prompt_tokens")}
        for row in rows[1:]:
            for name in shared:
                del row[name]
        return shared | {
            "step": step,
            "group_id": group_id,
            "prompt_id": known[0]["prompt_id"] if known else None,
            "neighbours": neighbours(self.index, step, group_id),
            "advantage_label": advantages.label,
            "trajectories": rows,
            "same_prompt": same_prompt(self.index, known[0]["prompt_id"], is_eval=group_id < 0) if known else [],
        }

    def trajectory(self, step: int, group_id: int, index: int) -> dict[str, Any]:
        """Return one trajectory. Raises InputError: there is no such trajectory."""
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

    def diff(self, left: Sequence[int], right: Sequence[int]) -> dict[str, Any]:
        """Compare two completions, each named by (step, group, index).

        Raises:
            InputError: one of them does not exist.
        """
        one, other = (self._completion(*key) for key in (left, right))
        return {
            "left": {key: one[key] for key in ("reward", "reward_status", "reward_detail", "task")},
            "right": {key: other[key] for key in ("reward", "reward_status", "reward_detail", "task")},
            "same_prompt": one["prompt"] == other["prompt"],
            "prompt": one["prompt"],
            "rows": diff_lines(one["prefill"] + one["completion"], other["prefill"] + other["completion"]),
        }

    def tokenizer(self) -> Any | None:
        """Return the tokenizer, or None. A run writes its tokenizer when it ends, so each call searches again."""
        if self._tokenizer is None:
            model_path = str(_section(self.config(), "model").get("path", ""))
            self._tokenizer = load_tokenizer(self.source, model_path, self._tokenizer_path)
        return self._tokenizer

    def _completion(self, step: int, group_id: int, index: int) -> dict[str, Any]:
        rows = read_group(self.source, step, group_id)
        found = next((row for row in rows if row["index"] == index), None)
        if found is None:
            raise InputError(f"group {group_id} of step {step} has no trajectory {index}")
        return found

    def _advantages(self, rows: list[dict[str, Any]]) -> Any:
        algorithm = _section(self.config(), "algorithm")
        return group_advantages([row["reward"] for row in rows], [row["valid"] for row in rows], algorithm)


def panels_of(records: list[dict[str, Any]]) -> Iterator[tuple[Panel, Curves]]:
    """Yield each panel with its curves; panels without data are left out."""
    known = keys_of(records)
    for panel in PANELS:
        absent = 0.0 if panel.absent_is_zero else None
        if keys := keys_of_panel(panel, known):
            yield panel, {key: curve(records, key, absent=absent) for key in keys}


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
