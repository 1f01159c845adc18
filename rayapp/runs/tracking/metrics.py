"""Metrics of a step's rollouts: scalars from group summaries. docs/run-folder.md has their meanings and units.

Also `metrics.jsonl`, one line a step, on disk before the next step starts; pass@k; and `SignalWatch`, which counts
steps that teach the policy nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from rayapp.core.types import FloatArray, GroupSummary

_COUNTS = ("verdict/", "judged/", "agent/")


def summarize_step(summaries: Sequence[GroupSummary], *, version: int) -> dict[str, float]:
    """Compute metrics of the groups that one step trains on; staleness counts from policy version `version`. Reward
    metrics leave out invalid trajectories."""
    metrics = _rewards(summaries) | _groups(summaries) | _lengths(summaries) | _statuses(summaries)
    metrics |= _tools(summaries) | _verdicts(summaries)
    for task in sorted({summary.task for summary in summaries}):
        own = [summary for summary in summaries if summary.task == task]
        metrics |= {f"task/{task}/{name}": value for name, value in _rewards(own).items()}
    for source in sorted({summary.source for summary in summaries} - {""}):
        own = [summary for summary in summaries if summary.source == source]
        of_source = _rewards(own) | _groups(own) | _lengths(own)
        metrics |= {f"source/{source}/{name}": value for name, value in of_source.items()}
    staleness = [version - summary.min_policy_version for summary in summaries]
    metrics |= {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(np.max(staleness))}
    return metrics | _kept(summaries, version)


def _kept(summaries: Sequence[GroupSummary], version: int) -> dict[str, float]:
    """Return shares of trajectories continued after a weight sync and of tokens sampled before it, and mean
    staleness."""
    trajectories = [counts for summary in summaries for counts in summary.tokens_by_version if counts]
    num_tokens = sum(sum(counts.values()) for counts in trajectories)
    if not num_tokens:
        return {}
    kept = sum(sum(counts.values()) - counts[max(counts)] for counts in trajectories)
    stale = sum((version - of) * count for counts in trajectories for of, count in counts.items())
    return {
        "kept/trajectories": sum(len(counts) > 1 for counts in trajectories) / len(trajectories),
        "kept/tokens": kept / num_tokens,
        "staleness/token_mean": stale / num_tokens,
    }


def _rewards(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    valid = np.concatenate([summary.valid for summary in summaries])
    metrics = _spread("reward", np.concatenate([summary.rewards for summary in summaries])[valid])
    for name in sorted({name for summary in summaries for name in summary.reward_terms if not _is_count(name)}):
        values = np.concatenate([_term(summary, name) for summary in summaries])[valid]
        known = values[~np.isnan(values)]
        if known.size:
            metrics[f"reward/{name}/mean"] = float(known.mean())
    return metrics


def _term(summary: GroupSummary, name: str) -> FloatArray:
    return summary.reward_terms.get(name, np.full(summary.rewards.size, np.nan, np.float32))


def _is_count(name: str) -> bool:
    """Return True for counts beside a reward's terms, which `_tools` and `_verdicts` report."""
    return _is_of_tools(name) or name.startswith(_COUNTS)


def _is_of_tools(name: str) -> bool:
    return name in ("num_turns", "tool/calls", "tool/time_s", "tool/wait_s") or name.startswith("tool/failed")


def _verdicts(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    names = {name for summary in summaries for name in summary.reward_terms if name.startswith(_COUNTS)}
    return {name: float(sum(np.nansum(_term(summary, name)) for summary in summaries)) for name in sorted(names)}


def _tools(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Count turns and tool calls of all trajectories, trained on or not."""
    names = {name for summary in summaries for name in summary.reward_terms if _is_of_tools(name)}
    found = {name: np.concatenate([_term(summary, name) for summary in summaries]) for name in names}
    turns = found.pop("num_turns", np.zeros(0, np.float32))
    if not (~np.isnan(turns)).any():
        return {}
    totals = {name: float(np.nansum(values)) for name, values in found.items()}
    calls = totals.get("tool/calls", 0.0)
    for name in ("tool/time_s", "tool/wait_s"):
        totals[name] = totals.get(name, 0.0) / calls if calls else 0.0
    return totals | {"turns/mean": float(np.nanmean(turns)), "turns/max": float(np.nanmax(turns))}


def _spread(name: str, values: FloatArray) -> dict[str, float]:
    """Return statistics; none without values, because a mean of 0 would be drawn as a drop."""
    if not values.size:
        return {}
    return {f"{name}/{of}": float(getattr(values, of)()) for of in ("mean", "std", "min", "max")}


def _groups(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Return shares of groups that teach nothing: all rewards equal, or no valid one."""
    return {
        "groups/count": float(len(summaries)),
        "groups/zero_variance": float(np.mean([_has_equal_rewards(summary) for summary in summaries])),
        "groups/all_invalid": float(np.mean([not summary.valid.any() for summary in summaries])),
    }


def _has_equal_rewards(summary: GroupSummary) -> bool:
    # False with rollout.group_size 1, where nothing is compared
    rewards = summary.rewards[summary.valid]
    return summary.rewards.size > 1 and rewards.size > 0 and float(np.ptp(rewards)) == 0.0


def _lengths(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    responses = np.concatenate([summary.num_response_tokens for summary in summaries])
    return {
        "length/response/mean": float(responses.mean()),
        "length/response/max": float(responses.max()),
        "length/prompt/mean": float(np.mean([summary.mean_prompt_tokens for summary in summaries])),
        "tokens/response": float(responses.sum()),
        "tokens/total": float(sum(int(summary.num_tokens.sum()) for summary in summaries)),
    }


def _statuses(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Return shares over all trajectories; and the number with a verdict, over which rewards are means."""
    total = sum(summary.rewards.size for summary in summaries)
    counted = {
        "status": Counter(status for summary in summaries for status in summary.statuses),
        "reward_status": Counter(status for summary in summaries for status in summary.reward_statuses),
        "failure": Counter(kind for summary in summaries for kind in summary.failure_kinds if kind),
    }
    shares = {f"{name}/{key}": n / total for name, counts in counted.items() for key, n in sorted(counts.items())}
    invalid = sum(int((~summary.valid).sum()) for summary in summaries)
    counts = {"trajectories/scored": float(total - invalid), "trajectories/failed": float(invalid)}
    return shares | counts | {"rollout/invalid": invalid / total}


class JsonlTracker:
    """Appends steps to a file, which is opened for every step: a resumed run replaces it to cut its end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # NaN is not JSON, and readers in other languages fail on it.
        record = {"step": step, "time": time.time()} | {k: float(v) for k, v in sorted(metrics.items()) if v == v}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None: ...


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl; none if there is no such file."""
    return list(read_records(path.read_bytes().splitlines())) if path.exists() else []


def read_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield records with a step. Malformed lines (cut by a crash, or edited) are left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int | float):
            yield record


SOLVED = "solved"


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate for one prompt: 1 - C(n - c, k) / C(n, k), the chance that k of its n samples, drawn
    without replacement, hold a correct one (Chen et al. 2021, Evaluating Large Language Models Trained on Code, eq. 1).

    Example: 4 samples, 1 right: pass@1 is 1/4, pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2, pass@4 is 1.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def summarize_passes(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Compute `pass_at_K/NAME` (NAME: task, or SOURCE/TASK), the mean over prompts, for K = 1, 2, 4, … and all samples.

    Samples without a verdict are left out, and prompts with fewer than K others. `pass_prompts/NAME`: prompts in
    pass@1.
    """
    metrics: dict[str, float] = {}
    for name in sorted({_name(summary) for summary in summaries}):
        counts = [_counts(summary) for summary in summaries if _name(summary) == name]
        metrics[f"pass_prompts/{name}"] = float(sum(samples > 0 for samples, _ in counts))
        for k in ladder(max((samples for samples, _ in counts), default=0)):
            known = [pass_at_k(samples, right, k) for samples, right in counts if samples >= k]
            metrics[f"pass_at_{k}/{name}"] = float(np.mean(known))
    return metrics


def _name(summary: GroupSummary) -> str:
    return f"{summary.source}/{summary.task}" if summary.source else summary.task


def ladder(largest: int) -> list[int]:
    """Return 1, 2, 4, … up to `largest`, and `largest` itself."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({*powers, largest}) if largest else []


def _counts(summary: GroupSummary) -> tuple[int, int]:
    solved = summary.reward_terms.get(SOLVED)
    if solved is None:
        return 0, 0
    known = summary.valid & ~np.isnan(solved)
    return int(known.sum()), int((solved[known] >= 1.0).sum())


PATIENCE_STEPS = 3  # in a row without signal, after which a run warns
_KEY = "learner/share_computed"  # of the step's tokens: those with an advantage, or all if there is a KL
_WHY = (
    "all completions of each prompt earned the same reward. Read some (rayapp view RUN) and score an answer that you "
    "know to "
    "be right (rayapp score): docs/quick-start.md, 'The line of a step'."
)


class SignalWatch:
    """Counts the steps of a run that taught nothing."""

    def __init__(self) -> None:
        self.num_steps = self.num_silent = self.num_silent_last = 0

    def record(self, metrics: Mapping[str, Any]) -> bool:
        """Count this step; return True if it is the last of PATIENCE_STEPS steps in a row without signal."""
        if _KEY in metrics:
            is_silent = _is_silent(metrics)
            self.num_steps += 1
            self.num_silent += is_silent
            self.num_silent_last = self.num_silent_last + 1 if is_silent else 0
            return is_silent and self.num_silent_last == PATIENCE_STEPS
        return False

    def warning(self) -> str:
        """Return a warning about the last steps; empty if they have signal."""
        if self.num_silent_last < PATIENCE_STEPS:
            return ""
        return f"warning: no signal in the last {self.num_silent_last} steps, so the policy learns nothing: {_WHY}"

    def summary(self) -> str:
        """Return a warning about all steps, for the end of a run; empty if most of them had signal."""
        if self.num_steps and self.num_silent == self.num_steps:
            return f"warning: no step had signal ({self.num_steps} of {self.num_steps}), so nothing was learned: {_WHY}"
        if self.num_silent > self.num_steps / 2:
            return f"warning: {self.num_silent} of {self.num_steps} steps had no signal: {_WHY}"
        return ""


def _is_silent(metrics: Mapping[str, Any]) -> bool:
    """Return True without a signal from rewards, and without a teacher, which needs none."""
    are_equal = metrics.get("reward/std", 1.0) < 1e-6 and "distillation/kl" not in metrics
    return bool(metrics[_KEY] == 0.0 or are_equal)


MISMATCH = "rollout_probs_diff/mean"
_GROWTH, _LEAST_MISMATCH = 4.0, 1e-3


class MismatchWatch:
    """Warns once if engine and learner agree less after a sync than in the run's first step, when both had the start
    model's files: the sync then sends other weights than the learner trains, such as rounded ones."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._has_warned = False

    def record(self, metrics: Mapping[str, Any]) -> str:
        """Return the warning that this step gives; empty for none. Steps on groups of older versions don't count."""
        now = metrics.get(MISMATCH)
        if now is None or metrics.get("staleness/token_mean", metrics.get("staleness/max", 0.0)) > 0:
            return ""
        if self._first is None:
            self._first = now
        if self._has_warned or now <= max(_GROWTH * self._first, _LEAST_MISMATCH):
            return ""
        self._has_warned = True
        return (
            f"warning: the probabilities of engine and learner differ by {now:.2g} on average ({MISMATCH}), by "
            f"{self._first:.2g} in the first step: the servers sample from another policy than the learners train. Use "
            "one format for learner.compute_dtype and server.dtype, or algorithm.rollout_correction.level=token"
        )


def warning_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the warning that holds after these steps; empty for none."""
    watch = SignalWatch()
    for record in records:
        watch.record(record)
    return watch.warning()
