"""Pure functions on trajectories with forks (trees of tokens), and on group summaries (the numbers that the driver
keeps).

    token_ids  p q r a b c d e   forks (start 5, after 2)      p q r a b
    index      0 1 2 3 4 5 6 7                                 p q r c d e

Between forks, each token follows the token before it. A *branch* is a full sequence from a first token to a last one.
Groups themselves stay in Ray's object store.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayapp.core.types import AllowedTokens, Fork, Group, GroupSummary, Trajectory, VersionSpan

Int64Array = NDArray[np.int64]


def path_to(index: int, forks: Sequence[Fork]) -> Int64Array:
    """Return the indices of the tokens before `index` in its branch, in order, followed by `index`; empty for -1."""
    starts = [0, *(fork.start for fork in forks)]
    parts = list[Int64Array]()
    while index >= 0:
        run = bisect_right(starts, index) - 1
        parts.append(np.arange(starts[run], index + 1))
        index = forks[run - 1].after if run else -1
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)


def branches(num_tokens: int, forks: Sequence[Fork]) -> list[Int64Array]:
    """Return the token indices of each branch. Every token is in at least one branch; no branch is a prefix of another.

    Example: 8 tokens and the fork in the module's docstring -> [0 1 2 3 4] and [0 1 2 5 6 7].
    """
    if not forks:
        return [np.arange(num_tokens)]
    lasts = [fork.start - 1 for fork in forks] + [num_tokens - 1]
    gone_on_from = {fork.after for fork in forks}
    return [path_to(last, forks) for last in lasts if last not in gone_on_from]


def before(index: int, forks: Sequence[Fork]) -> Int64Array:
    return path_to(index, forks)[:-1]


def join_allowed(parts: Sequence[tuple[AllowedTokens | None, int]]) -> AllowedTokens | None:
    """Return the masks of consecutive runs of tokens as one `AllowedTokens`, each distinct mask once; None without any.
    `parts`: for each run its masks (None: every token was allowed) and its number of tokens."""
    known = [part.masks for part, _ in parts if part is not None]
    if not known:
        return None
    starts = iter(np.cumsum([0, *map(len, known)]))
    indices = [
        np.full(size, -1) if part is None else np.where(part.mask_of < 0, -1, part.mask_of + next(starts))
        for part, size in parts
    ]
    mask_of = np.concatenate(indices)
    is_masked = mask_of >= 0
    if not is_masked.any():
        return None
    used, place = np.unique(mask_of[is_masked], return_inverse=True)
    rows = np.ascontiguousarray(np.concatenate(known)[used])
    _, first, same = np.unique(rows.view(f"V{rows.shape[1] * 4}")[:, 0], return_index=True, return_inverse=True)
    distinct = np.full(mask_of.size, -1, np.int32)
    distinct[is_masked] = same.reshape(-1)[place.reshape(-1)]
    return AllowedTokens(masks=rows[first], mask_of=distinct)


_MAX_FLOAT32 = 3.4028234e38


def storable(value: Any) -> float:
    """Return a number as a float. ValueError, TypeError or OverflowError: it is not finite as a 32-bit float, which
    summaries and learners use."""
    if not (math.isfinite(value) and abs(value) <= _MAX_FLOAT32):
        raise ValueError(f"{value!r:.80} must be finite as a 32-bit float")
    return float(value)


def summarize_group(group: Group, *, time_total_s: float) -> GroupSummary:
    trajectories = group.trajectories
    rewards = [t.reward for t in trajectories]
    begun = [t.num_prompt_tokens for t in trajectories if t.num_response_tokens]
    names = sorted({name for reward in rewards for name in reward.terms})
    return GroupSummary(
        group_id=group.group_id,
        task=group.prompt.task,
        rewards=np.array([r.value if r.valid else 0.0 for r in rewards], np.float32),
        valid=np.array([t.is_trainable for t in trajectories], np.bool_),
        num_tokens=np.array([t.num_tokens for t in trajectories], np.int32),
        num_response_tokens=np.array([t.num_response_tokens for t in trajectories], np.int32),
        num_prompt_tokens=int(group.prompt.token_ids.size),
        statuses=tuple(t.status.value for t in trajectories),
        reward_statuses=tuple(r.status for r in rewards),
        failure_kinds=tuple(r.failure_kind for r in rewards),
        reward_terms={name: np.array([r.terms.get(name, np.nan) for r in rewards], np.float32) for name in names},
        min_policy_version=min(t.min_policy_version for t in trajectories),
        time_generate_s=max((t.time_generate_s for t in trajectories), default=0.0),
        time_total_s=time_total_s,
        source=group.prompt.source,
        mean_prompt_tokens=float(np.mean(begun)) if begun else float(group.prompt.token_ids.size),
        tokens_by_version=tuple(map(_tokens_by_version, trajectories)),
    )


def _tokens_by_version(trajectory: Trajectory) -> Mapping[int, int]:
    counts: Counter[int] = Counter()
    for turn in trajectory.turns:
        whole = VersionSpan(policy_version=turn.policy_version, num_tokens=turn.end - turn.start)
        for span in turn.version_spans or (whole,):
            counts[span.policy_version] += span.num_tokens
    return dict(counts)


def storable_terms(raw: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numeric terms of a reward. Terms that are NaN or strings are left out. ValueError: a term is infinite,
    or too large for a 32-bit float."""
    return {str(name): number for name, value in raw.items() if (number := _number(str(name), value)) is not None}


def _number(name: str, value: object) -> float | None:
    """Return a term; None for NaN and no numbers: verl's functions may add strings, such as the parsed answer."""
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):  # an array of several numbers also has __float__
        return None
    if math.isnan(number):
        return None
    try:
        return storable(number)
    except ValueError:
        raise ValueError(f"a {name} that is not finite as a 32-bit float") from None
