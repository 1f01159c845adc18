"""A step's rollouts in numbers: slash-named scalars from group summaries. Meanings and units: docs/run-folder.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rayapp.core.types import FloatArray, GroupSummary

_COUNTS = ("verdict/", "judged/")


def summarize_step(summaries: Sequence[GroupSummary], *, version: int) -> dict[str, float]:
    """Metrics of the groups that one step trains on. Invalid trajectories are in no reward number.

    Args:
        version: policy version that is about to be trained; staleness counts from it.
    """
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
    return metrics | {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(np.max(staleness))}


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
    """True for what is recorded beside a reward's own terms: no rewards, and counted by `_tools` and `_verdicts`."""
    return _is_of_tools(name) or name.startswith(_COUNTS)


def _is_of_tools(name: str) -> bool:
    return name in ("num_turns", "tool/calls", "tool/time_s", "tool/wait_s") or name.startswith("tool/failed")


def _verdicts(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Trajectories of which something is true that whoever trusts their verdicts should know, and what judges cost."""
    names = {name for summary in summaries for name in summary.reward_terms if name.startswith(_COUNTS)}
    return {name: float(sum(np.nansum(_term(summary, name)) for summary in summaries)) for name in sorted(names)}


def _tools(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Turns and tool calls of the agent loop, of all trajectories, whether they are trained on or not."""
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
    """Nothing for no values: a mean of nothing would be drawn as a fall to zero."""
    if not values.size:
        return {}
    return {f"{name}/{of}": float(getattr(values, of)()) for of in ("mean", "std", "min", "max")}


def _groups(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Groups that can't teach anything: all rewards equal, or no valid one."""
    rewards = [summary.rewards[summary.valid] for summary in summaries]
    return {
        "groups/count": float(len(summaries)),
        "groups/zero_variance": float(np.mean([r.size > 0 and np.ptp(r) == 0 for r in rewards])),
        "groups/all_invalid": float(np.mean([r.size == 0 for r in rewards])),
    }


def _lengths(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    responses = np.concatenate([summary.num_response_tokens for summary in summaries])
    return {
        "length/response/mean": float(responses.mean()),
        "length/response/max": float(responses.max()),
        "length/prompt/mean": float(np.mean([summary.num_prompt_tokens for summary in summaries])),
        "tokens/response": float(responses.sum()),
        "tokens/total": float(sum(int(summary.num_tokens.sum()) for summary in summaries)),
    }


def _statuses(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """Shares of all trajectories, the invalid ones included."""
    total = sum(summary.rewards.size for summary in summaries)
    counted = {
        "status": Counter(status for summary in summaries for status in summary.statuses),
        "reward_status": Counter(status for summary in summaries for status in summary.reward_statuses),
        "failure": Counter(kind for summary in summaries for kind in summary.failure_kinds if kind),
    }
    shares = {f"{name}/{key}": n / total for name, counts in counted.items() for key, n in sorted(counts.items())}
    invalid = sum(int((~summary.valid).sum()) for summary in summaries)
    return shares | {"rollout/invalid": invalid / total}
