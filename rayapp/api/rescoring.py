"""Computes another reward for a run's recorded trajectories. Nothing is generated, and the run is not changed.

    trajectories/step=… --read_groups--> verdict | a function | a judge --> Rescored: before and after of each

The code that scores is the code of training. Its inputs come from the trajectories: messages, answer, and the row's
ground truth.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from rayapp.core.names import load_extra
from rayapp.core.own_thread import work_apart
from rayapp.core.protocols import AgentTask, EnvironmentRow, SandboxSource, Task
from rayapp.core.types import Group, Prompt, Reward, RolloutStatus, Trajectory
from rayapp.rollout.order import evaluation_seed, scoring_seed
from rayapp.rollout.sources import answer_rewards
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.answers import Answer, score_answer
from rayapp.tasks.loading import load_tasks
from rayapp.tasks.verdict import PENALTY_TERM, ToolRewards, settled, verdict

if TYPE_CHECKING:
    import pandas as pd

VERDICT, JUDGE = "verdict", "judge:"
Scorer = Callable[[Group, Sequence[Trajectory]], Awaitable[list[Reward]]]
"""Function of a group and some of its trajectories that returns the new rewards of these trajectories."""
_GROUPS_AT_ONCE = 16
ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True)
class Rescored:
    """Result of `rescore`."""

    rows: list[dict[str, Any]] = field(repr=False)
    """One row for each trajectory: step, group_id, index, source, task, the beginning of the answer, the rewards
    `before` and `after` (None without a reward), and terms, failure_kind and detail of the new reward."""

    @property
    def frame(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    @property
    def summary(self) -> dict[str, float]:
        """Counts and means: the number of `trajectories`; the number of `failed` ones (without a new reward), in total
        and by failure kind; over the trajectories with both rewards, mean_before, mean_after, changed, and
        rank_correlation (Spearman's, mean over the groups in which both rewards vary). With judges, also the judges'
        cost.
        """
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
        """Return the `number` rows whose rewards changed most."""
        changed = [row for row in self._both if row["after"] != row["before"]]
        return sorted(changed, key=lambda row: -abs(row["after"] - row["before"]))[:number]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a parquet file, atomically."""
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
    """Compute another reward for the trajectories of a run.

    Args:
        run: a run folder, or s3://bucket/prefix of one.
        reward: `judge:NAME` (one of the config's judges), the name of a function with verl's signature, or `verdict`
            (the config's current tasks and rules).
        steps: steps to score; None scores all recorded steps.
        purpose: train for trajectories of training steps, eval for those of evaluations.
        config: config to use instead of the run's own.
        overrides: settings that replace those of the config, e.g. `{"reward.method": "flexible"}`.
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
                # Read groups while others are scored: all tokens of a run may not fit in memory.
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
    """Return True if the trajectory was played to its end. It may have no verdict."""
    is_played = not trajectory.status.is_error or trajectory.status is RolloutStatus.ERROR_REWARD
    # The answer exists: the sandbox died during scoring, not during the agent's turns.
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
                f"trajectories of {run.uri} have the source {group.prompt.source!r}, but the config's sources are "
                f"{', '.join(map(repr, by_source))}. Use the config of this run."
            )
        return await asyncio.gather(*(by_source[group.prompt.source].score(group, each) for each in trajectories))

    yield score


@asynccontextmanager
async def _by_judge(run: Run, config: Config, name: str) -> AsyncIterator[Scorer]:
    chosen = [each for each in config.judges if each.name == name]
    if not chosen:
        there = ", ".join(each.name for each in config.judges) or "none"
        raise InputError(
            f"judge {name!r} is not in the config's `judges` ({there}). Choose one of them, or another config with "
            "--config."
        )
    judges = load_extra("judges.judging:Judges")(chosen, config.run_folder if "://" in run.uri else Path(run.uri))
    judging = judges.of(RewardSection(judges={name: 1.0}, verdict_weight=0.0))

    async def score(group: Group, trajectories: Sequence[Trajectory]) -> list[Reward]:
        prompt, texts = group.prompt, [each.completion_text for each in trajectories]
        known = [Reward(value=0.0, terms=_solved(each.reward)) for each in trajectories]
        scores = [judging.with_scores(prompt, text, reward) for text, reward in zip(texts, known, strict=True)]
        compared = await judging.with_comparisons(prompt, texts, await asyncio.gather(*scores))
        return [settled(reward) for reward in compared]

    try:
        yield score
    finally:
        await judges.close()


def _solved(reward: Reward) -> dict[str, float]:
    return {"solved": reward.terms["solved"]} if reward.valid and "solved" in reward.terms else {}


class _Verdicts:
    """Scores the trajectories of one source.

    Args:
        function: name of a reward function to use instead of the source's rules and tasks; empty for these.
    """

    def __init__(self, config: Config, function: str, sandboxes: SandboxSource, seed: int) -> None:
        custom = {"custom": function} if function else {}
        self._reward = config.reward.model_copy(update=custom)
        self._answers = answer_rewards(config.model_copy(update={"reward": self._reward}))
        if self._answers.custom is not None:
            self._answers.custom.load()
        is_by_tasks = not (function or config.uses_data)
        names = dict.fromkeys((*config.tasks, *config.eval.tasks)) if is_by_tasks else ()
        self._tasks = RecordedTasks(load_tasks(tuple(names)) if names else ())
        self._sandboxes = sandboxes
        self._seed = seed

    async def score(self, group: Group, trajectory: Trajectory) -> Reward:
        tests = scoring_seed(group.group_id, seed=self._seed)
        task = self._tasks.of(group.prompt)
        if isinstance(task, EnvironmentRow):
            task.refuse()
        found = await (
            self._by_task(task, group, trajectory, tests) if task else self._by_row(group, trajectory, tests)
        )
        return replace(found, value=found.value + trajectory.reward.terms.get(PENALTY_TERM, 0.0))

    async def _by_task(self, task: Task, group: Group, trajectory: Trajectory, seed: int) -> Reward:
        return await verdict(
            lambda: task.score(group.prompt, trajectory.completion_text, self._sandboxes, seed=seed),
            weights=self._answers.weights,
            tools=_recorded_tools(trajectory.reward),
        )

    async def _by_row(self, group: Group, trajectory: Trajectory, seed: int) -> Reward:
        prompt = group.prompt
        if prompt.ground_truth is None and self._answers.custom is None:
            raise InputError(
                f"trajectories of {prompt.task} in group {group.group_id} have no ground_truth. Possible reasons: the "
                "config lacks this task, the row's ground_truth is longer than 64 KiB, or an older version of rayapp "
                "wrote them. Score them with a judge, or with a function that needs no ground_truth."
            )
        answer = Answer(
            completion_text=trajectory.completion_text,
            data_source=prompt.task,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )
        tools = _recorded_tools(trajectory.reward)
        return await score_answer(answer, self._answers, self._sandboxes, seed=seed, tools=tools)


def _recorded_tools(reward: Reward) -> ToolRewards | None:
    """Return the rewards that tools gave to a recorded trajectory; None if its reward has no terms for tools."""
    terms = reward.terms
    if "tool" not in terms:
        return None
    return ToolRewards(calls=terms["tool"], verdicts=terms.get("tool_verdict", 0.0))


class RecordedTasks:
    """Finds the task of a recorded prompt.

    Args:
        tasks: tasks to search. Several may have the same name, like the problems of a benchmark.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._named: dict[str, list[Task]] = {}
        for task in tasks:
            self._named.setdefault(task.name, []).append(task)
        self._asked = {
            name: [(task, _asked(task)) for task in named] for name, named in self._named.items() if len(named) > 1
        }

    def of(self, prompt: Prompt) -> Task | None:
        """Return the task of a recorded prompt; None if no task has its name. Raises: InputError: several tasks have
        this name, and the prompt belongs to none or to several of them.
        """
        if prompt.task not in self._asked:
            return next(iter(self._named.get(prompt.task, ())), None)
        told = _told(prompt.messages)
        found = [task for task, asked in self._asked[prompt.task] if told and told in asked]
        if not found or any(task != found[0] for task in found):
            matching = f"{len(found)} different ones have" if found else "none of them has"
            raise InputError(
                f"recorded prompt {prompt.text!r:.80}: its task is unknown, because {len(self._named[prompt.task])} "
                f"tasks have the name {prompt.task!r} and {matching} this prompt. Use the run's own task file, a "
                "judge, or a function."
            )
        return found[0]


def _asked(task: Task) -> list[list[tuple[str, object]]]:
    """Return the lists of messages with which the task may have begun: the messages of its prompt, and those that an
    agent starts with.
    """
    found = [_told(task.render(_NoTokenizer()).messages)]
    return [*found, _told(task.agent_start().messages)] if isinstance(task, AgentTask) else found


def _told(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
    return [(str(each["role"]), each["content"]) for each in messages]


class _NoTokenizer:
    """Replacement for a tokenizer, for prompts that are rendered only to get their messages."""

    chat_template = "none"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        return ""


def _correlations(rows: Sequence[dict[str, Any]]) -> list[float]:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group_id"]), []).append(row)
    pairs = [tuple(_ranks([row[when] for row in group]) for when in ("before", "after")) for group in groups.values()]
    return [float(np.corrcoef(before, after)[0, 1]) for before, after in pairs if np.ptp(before) and np.ptp(after)]


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the ranks of the values, from 1 on. Equal values get the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


def _schema() -> Any:
    import pyarrow as pa

    numbers = [("step", pa.int32()), ("group_id", pa.int64()), ("index", pa.int32())]
    numbers += [("before", pa.float64()), ("after", pa.float64()), ("terms", pa.map_(pa.string(), pa.float64()))]
    texts = [(name, pa.string()) for name in ("source", "task", "answer", "failure_kind", "detail")]
    return pa.schema([*numbers, *texts])
