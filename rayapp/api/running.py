"""`train`, `sft` and `evaluate`, each also to be awaited. Ctrl-C, a cancellation and any error end every process they
started before they come out.

In a script they run in its thread, where signals come. Where an event loop runs already (a notebook) they have a thread
of their own, which the caller waits for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayapp.api.arguments import ConfigLike, Overrides, RewardLike, TaskLike, make_job
from rayapp.api.run import Run
from rayapp.config.config import with_values
from rayapp.core.names.given import giving
from rayapp.core.own_thread import awaited, work_apart

if TYPE_CHECKING:
    import pandas as pd

    from rayapp.driver.loop import OnStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `evaluate` found."""

    metrics: Mapping[str, float]
    """As of a training step, with `pass_at_K/<task>`."""
    table: Any
    """Arrow table of every completion with its verdict; the columns are those of docs/run-folder.md."""

    def trajectories(self) -> pd.DataFrame:
        """The same for pandas."""
        frame: pd.DataFrame = self.table.to_pandas(maps_as_pydicts="strict")
        return frame


def train(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    tasks: Sequence[TaskLike] | TaskLike | None = None,
    reward: RewardLike | None = None,
    agent: str | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train as `rayapp train` does, with the warm-up; called again it goes on from the last checkpoint.

    Args:
        config: a YAML file, settings as a mapping, a `Config`, or None for the defaults.
        overrides: settings that win over it: `["train.num_steps=5"]` or `{"train": {"num_steps": 5}}`.
        tasks: in place of the config's: names, files, or task objects (`rayapp.CodingTask`).
        reward: scores the answers to rows of data: a function, or the name of one.
        agent: who plays: single_turn_agent, tool_agent, or the name of a plug-in.
        on_step: called with each step's number and metrics, in between; may be a coroutine function. Of a run that is
            awaited it is called in another thread.
    Returns:
        The run, to be read.
    Raises:
        UserError: something can't be used; nothing was started, or all of it has ended.
        KeyboardInterrupt: Ctrl-C; the steps done are saved, and every process has ended.
    """
    job = make_job(config, overrides, tasks=tasks, reward=reward, agent=agent)

    def work() -> Run:
        from rayapp.driver.loop import run_training

        with giving(job.objects):
            run_training(job.config, on_step)
        return Run(job.config.run_uri)

    return work_apart(work)


train_async = awaited(train)


def sft(config: ConfigLike = None, overrides: Overrides = (), *, tasks: Sequence[TaskLike] | None = None) -> Run:
    """Supervised steps on demonstrations as `rayapp sft` takes them: the section `warmup`, alone.

    Returns:
        The run of the supervised steps, `<run.name>-sft`; its model is `run.model`.
    Raises:
        UserError, KeyboardInterrupt: as `train`.
    """
    job = make_job(config, overrides, tasks=tasks)

    def work() -> Run:
        from rayapp.driver.offline.sft import run_sft, sft_config

        with giving(job.objects):
            run_sft(job.config)
        return Run(sft_config(job.config).run_uri)

    return work_apart(work)


sft_async = awaited(sft)


def evaluate(
    config: ConfigLike = None,
    overrides: Overrides = (),
    *,
    model: str | Path | None = None,
    tasks: Sequence[TaskLike] | TaskLike | None = None,
    reward: RewardLike | None = None,
    agent: str | None = None,
    samples: int | None = None,
    out: str | Path | None = None,
) -> Evaluation:
    """Sample and score completions of every task or evaluation row; nothing is trained.

    Args:
        model: a model folder or a checkpoint (`checkpoints/step=…`) in place of the config's.
        samples: completions of each; default `eval.samples_per_task`.
        out: folder for what was sampled, which `rayapp view` shows.
    Raises:
        UserError, KeyboardInterrupt: as `train`.
    """
    job = make_job(config, overrides, tasks=tasks, reward=reward, agent=agent)
    changed: dict[str, dict[str, Any]] = {}
    if model is not None:
        changed["model"] = {"path": str(model)}
    if samples is not None:
        changed["eval"] = {"samples_per_task": samples}

    def work() -> Evaluation:
        import pyarrow.parquet as pq

        from rayapp.api.checkpoint_model import with_checkpoint_as_model
        from rayapp.driver.evaluation import run_evaluation

        with tempfile.TemporaryDirectory(prefix="rayapp-eval-") as scratch:
            folder = Path(out) if out is not None else Path(scratch) / "eval"
            with giving(job.objects), with_checkpoint_as_model(with_values(job.config, **changed)) as ready:
                metrics = run_evaluation(ready, folder)
            return Evaluation(metrics=metrics, table=pq.read_table(folder / "evaluations", partitioning=None))

    return work_apart(work)


evaluate_async = awaited(evaluate)
