"""Another reward over what a run has sampled already: nothing is generated, and the run stays as it is.

    trajectories/step=… --read_groups--> verdict | a function | a judge --> Rescored: before and after of each

By the code that training scores with, on what the trajectories hold: messages, answer, and the row's ground truth.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayapp.api.arguments import ConfigLike, Overrides, load
from rayapp.api.run import Purpose, Run
from rayapp.config.agent import RewardSection
from rayapp.config.config import Config, sources_of
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError, one_error
from rayapp.core.files import aside
from rayapp.core.own_thread import work_apart
from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import Group, Reward, RolloutStatus, Trajectory
from rayapp.rollout.data_groups import answer_rewards
from rayapp.rollout.order import evaluation_seed, scoring_seed
from rayapp.rollout.overlong_penalty import PENALTY_TERM
from rayapp.sandbox.pool.in_process import open_pool
from rayapp.tasks.answers import Answer, score_answer
from rayapp.tasks.judges.judging import Judges
from rayapp.tasks.loading import load_tasks

if TYPE_CHECKING:
    import pandas as pd

VERDICT, JUDGE = "verdict", "judge:"
Scorer = Callable[[Group, Sequence[Trajectory]], Awaitable[list[Reward]]]
"""From trajectories of a group to what they are worth now."""
_GROUPS_AT_ONCE = 16
ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True)
class Rescored:
    """What another reward says; see `rescore`."""

    rows: list[dict[str, Any]] = field(repr=False)
    """Of each trajectory: step, group_id, index, source, task, the beginning of its answer, before and after (None
    where there is no reward), and of the new reward terms, failure_kind and detail."""

    @property
    def frame(self) -> pd.DataFrame:
        """The rows for pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    @property
    def summary(self) -> dict[str, float]:
        """trajectories; failed, those without a new reward, also by kind; of those that have both: mean_before,
        mean_after, changed, rank_correlation (Spearman's, the mean of the groups in which both rewards differ). With
        judges also what they cost."""
        both = self._both
        found = {
            "trajectories": float(len(self.rows)),
            "failed": float(sum(row["after"] is None for row in self.rows)),
            "changed": float(sum(abs(row["after"] - row["before"]) > 1e-9 for row in both)),
        }
        if both:
            found |= {f"mean_{when}": float(np.mean([row[when] for row in both])) for when in ("before", "after")}
        if correlations := list(_correlations(both)):
            found["rank_correlation"] = float(np.mean(correlations))
        kinds = Counter(row["failure_kind"] for row in self.rows if row["after"] is None)
        found |= {f"failed/{kind}": float(count) for kind, count in sorted(kinds.items())}
        names = {name for row in self.rows for name in row["terms"] if name.startswith("judged/")}
        return found | {name: sum(row["terms"].get(name, 0.0) for row in self.rows) for name in sorted(names)}

    def largest(self, number: int = 10) -> list[dict[str, Any]]:
        """The rows that changed most."""
        changed = [row for row in self._both if row["after"] != row["before"]]
        return sorted(changed, key=lambda row: -abs(row["after"] - row["before"]))[:number]

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a parquet file, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        rows = [row | {"terms": list(row["terms"].items())} for row in self.rows]
        with aside(target) as pending:
            pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), pending, compression="zstd")

    @property
    def _both(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["before"] is not None and row["after"] is not None]


def rescore(
    run: str | os.PathLike[str],
    reward: str,
    *,
    steps: range | None = None,
    purpose: Purpose = "train",
    config: ConfigLike = None,
    overrides: Overrides = (),
) -> Rescored:
    """Another reward over the trajectories of a run.

    Args:
        run: a run folder, or s3://bucket/prefix of one.
        reward: `judge:NAME`, one of the config's judges; a function with verl's signature, by name; or `verdict`, what
            the config's tasks and rules say now.
        steps: None: all that are recorded.
        purpose: eval: what evaluations sampled.
        config: in place of the run's own.
        overrides: of it, e.g. `{"reward.method": "flexible"}`.
    Raises:
        UserError: the run, a step, the config or the reward can't be used.
    """
    opened = Run(run)
    used = load(config if config is not None else opened.config, overrides)
    return work_apart(lambda: run_until_done(_rescored(opened, used, reward, steps, purpose)))


async def _rescored(run: Run, config: Config, reward: str, steps: range | None, purpose: Purpose) -> Rescored:
    seed = config.run.seed if purpose == "train" else evaluation_seed(config.run.seed)
    recorded = run.groups(steps, purpose=purpose)
    at_once = asyncio.Semaphore(_GROUPS_AT_ONCE)
    running = []

    async def rows(step: int, group: Group, score: Scorer) -> list[dict[str, Any]]:
        try:
            return await _rows(step, group, score)
        finally:
            at_once.release()

    pool_of = open_pool(config.sandbox.without_stock, f"rescore-{os.getpid()}")
    async with pool_of as (pool, _), _scoring(run, config, reward, pool, seed) as score:
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                # Read as they are scored: a run's tokens may not fit in memory.
                while (each := await asyncio.to_thread(next, recorded, None)) is not None:
                    await at_once.acquire()
                    running.append(tasks.create_task(rows(*each, score)))
    return Rescored([row for task in running for row in task.result()])


async def _rows(step: int, group: Group, score: Scorer) -> list[dict[str, Any]]:
    members = [(index, each) for index, each in enumerate(group.trajectories) if _can_be_scored(each)]
    rewards = await score(group, [each for _, each in members])
    same = {"step": step, "group_id": group.group_id, "source": group.prompt.source, "task": group.prompt.task}
    return [
        same
        | {"index": index, "answer": each.completion_text[:ANSWER_CHARS]}
        | {"before": _value(each.reward), "after": _value(now)}
        | {"terms": now.terms, "failure_kind": now.failure_kind, "detail": now.detail}
        for (index, each), now in zip(members, rewards, strict=True)
    ]


def _can_be_scored(trajectory: Trajectory) -> bool:
    """Whether it came to its end, with a verdict or without."""
    is_played = not trajectory.status.is_error or trajectory.status is RolloutStatus.ERROR_REWARD
    # A sandbox that died under the verdict, not under the agent.
    lost_verdict = trajectory.status is RolloutStatus.ERROR_SANDBOX and trajectory.reward.failure_kind != "sandbox"
    return (is_played or lost_verdict) and trajectory.num_response_tokens > 0


def _value(reward: Reward) -> float | None:
    return reward.value if reward.valid else None


@asynccontextmanager
async def _scoring(run: Run, config: Config, reward: str, sandboxes: SandboxSource, seed: int) -> AsyncIterator[Scorer]:
    if reward.startswith(JUDGE):
        async with _by_judge(run, config, reward.removeprefix(JUDGE)) as by_judge:
            yield by_judge
        return
    function = "" if reward == VERDICT else reward
    by_source = {source.name: _Verdicts(source.config, function, sandboxes, seed) for source in sources_of(config)}

    async def score(group: Group, trajectories: Sequence[Trajectory]) -> list[Reward]:
        if group.prompt.source not in by_source:
            raise InputError(
                f"trajectories of {run.uri} are of source {group.prompt.source!r}, but those of the config are "
                f"{', '.join(map(repr, by_source))}"
            )
        return await asyncio.gather(*(by_source[group.prompt.source].score(group, each) for each in trajectories))

    yield score


@asynccontextmanager
async def _by_judge(run: Run, config: Config, name: str) -> AsyncIterator[Scorer]:
    chosen = [each for each in config.judges if each.name == name]
    if not chosen:
        there = ", ".join(each.name for each in config.judges) or "none"
        raise InputError(f"there is no judge {name!r}: the config's are {there}. Name another config with --config.")
    judges = Judges(chosen, config.run_folder if "://" in run.uri else Path(run.uri))
    judging = judges.of(RewardSection(judges={name: 1.0}, verdict_weight=0.0))

    async def score(group: Group, trajectories: Sequence[Trajectory]) -> list[Reward]:
        prompt, texts = group.prompt, [each.completion_text for each in trajectories]
        known = [Reward(value=0.0, terms=_solved(each.reward)) for each in trajectories]
        scores = [judging.with_scores(prompt, text, verdict) for text, verdict in zip(texts, known, strict=True)]
        return await judging.with_comparisons(prompt, texts, await asyncio.gather(*scores))

    try:
        yield score
    finally:
        await judges.close()


def _solved(reward: Reward) -> dict[str, float]:
    return {"solved": reward.terms["solved"]} if reward.valid and "solved" in reward.terms else {}


class _Verdicts:
    """The verdicts of one source.

    Args:
        function: in place of its rules and tasks; empty: those.
    """

    def __init__(self, config: Config, function: str, sandboxes: SandboxSource, seed: int) -> None:
        custom = {"custom": function} if function else {}
        self._reward = config.reward.model_copy(update=custom)
        self._answers = answer_rewards(config.model_copy(update={"reward": self._reward}))
        if self._answers.custom is not None:
            self._answers.custom.load()
        is_by_tasks = not (function or config.uses_data)
        self._tasks = (
            {task.name: task for task in load_tasks((*config.tasks, *config.eval.tasks))} if is_by_tasks else {}
        )
        self._sandboxes = sandboxes
        self._seed = seed

    async def score(self, group: Group, trajectory: Trajectory) -> Reward:
        tests = scoring_seed(group.group_id, seed=self._seed)
        task = self._tasks.get(group.prompt.task)
        found = await (
            self._by_task(task, group, trajectory, tests) if task else self._by_row(group, trajectory, tests)
        )
        return replace(found, value=found.value + trajectory.reward.terms.get(PENALTY_TERM, 0.0))

    async def _by_task(self, task: Task, group: Group, trajectory: Trajectory, seed: int) -> Reward:
        found = await task.score(group.prompt, trajectory.completion_text, self._sandboxes, seed=seed)
        terms = trajectory.reward.terms
        tools = self._reward.tool_weight * terms.get("tool", 0.0)
        return replace(
            found, value=found.value + tools + self._reward.tool_verdict_weight * terms.get("tool_verdict", 0.0)
        )

    async def _by_row(self, group: Group, trajectory: Trajectory, seed: int) -> Reward:
        prompt, terms = group.prompt, trajectory.reward.terms
        if prompt.ground_truth is None and self._answers.custom is None:
            raise InputError(
                f"trajectories of {prompt.task} in group {group.group_id} hold no ground_truth: an older version wrote "
                "them, the row's has over 64 KiB, or the config has no such task. A judge, or a function that needs "
                "none, can score them."
            )
        answer = Answer(
            completion_text=trajectory.completion_text,
            data_source=prompt.task,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            tool_reward=terms.get("tool", 0.0),
            tool_verdict=terms.get("tool_verdict", 0.0),
        )
        return await score_answer(answer, self._answers, self._sandboxes, seed=seed)


def _correlations(rows: Sequence[dict[str, Any]]) -> list[float]:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group_id"]), []).append(row)
    pairs = [tuple(_ranks([row[when] for row in group]) for when in ("before", "after")) for group in groups.values()]
    return [float(np.corrcoef(before, after)[0, 1]) for before, after in pairs if np.ptp(before) and np.ptp(after)]


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Equal values have the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def _schema() -> Any:
    import pyarrow as pa

    numbers = [("step", pa.int32()), ("group_id", pa.int64()), ("index", pa.int32())]
    numbers += [("before", pa.float64()), ("after", pa.float64()), ("terms", pa.map_(pa.string(), pa.float64()))]
    texts = [(name, pa.string()) for name in ("source", "task", "answer", "failure_kind", "detail")]
    return pa.schema([*numbers, *texts])
