"""`train`, `sft` and `evaluate`. On Ctrl-C or an error, they first end every process that they started, and then raise.

If this thread has a running event loop, as in a notebook, they run in a separate thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayapp.api.arguments import ConfigLike, Overrides, RewardLike, TaskLike, make_job
from rayapp.api.run import Run
from rayapp.config.config import Config, with_values
from rayapp.core.errors import InputError
from rayapp.core.names import giving
from rayapp.core.own_thread import work_apart
from rayapp.runs.checkpoints import Checkpoint, CheckpointFolder, damage, why_torn
from rayapp.runs.layout import step_of

if TYPE_CHECKING:
    import pandas as pd

    from rayapp.config.foreign_keys import GivenRun
    from rayapp.driver.loop import OnStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    metrics: Mapping[str, float]  # of a training step, as far as they apply, and `pass_at_K/<task>`
    table: Any  # Arrow table of all completions with their verdicts (docs/run-folder.md)

    def trajectories(self) -> pd.DataFrame:
        """Return `table` as a pandas frame."""
        frame: pd.DataFrame = self.table.to_pandas(maps_as_pydicts="strict")
        return frame


def train(
    config: ConfigLike | GivenRun = None,
    overrides: Overrides = (),
    *,
    tasks: Sequence[TaskLike] | TaskLike | None = None,
    reward: RewardLike | None = None,
    agent: str | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train as `rayapp train` does, including the warm-up. Called again, it continues from the last checkpoint.

    Args:
        config: a YAML file, settings as a mapping, a `Config`, the result of `trl_config`, or None for the defaults.
        overrides: settings that replace the config's: `["train.num_steps=5"]` or `{"train": {"num_steps": 5}}`.
        tasks: names, files, or task objects (`rayapp.CodingTask`) that replace the config's tasks.
        reward: function that scores answers to data rows, or its name.
        agent: single_turn_agent, tool_agent or external_agent.
        on_step: function (or coroutine function) of a step's number and metrics, called before the next step.

    UserError: an argument or setting can't be used. KeyboardInterrupt: finished steps are saved.
    """
    job = make_job(config, overrides, tasks=tasks, reward=reward, agent=agent)

    def work() -> Run:
        from rayapp.driver.loop import run_training

        with giving(job.objects):
            run_training(job.config, on_step)
        return Run(job.config.run_uri)

    return work_apart(work)


def sft(config: ConfigLike = None, overrides: Overrides = (), *, tasks: Sequence[TaskLike] | None = None) -> Run:
    """Run only the supervised steps on demonstrations (section `warmup`), as `rayapp sft` does. Return the run
    `<run.name>-sft`, whose `model` is the trained one."""
    job = make_job(config, overrides, tasks=tasks)

    def work() -> Run:
        from rayapp.driver.sft import run_sft, sft_config

        with giving(job.objects):
            run_sft(job.config)
        return Run(sft_config(job.config).run_uri)

    return work_apart(work)


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
    """Sample and score completions of every task or evaluation row. Nothing is trained.

    Args:
        model: a model folder or a checkpoint (`checkpoints/step=…`) that replaces the config's model.
        samples: completions per task or row; by default `eval.samples_per_task`.
        out: folder for the completions and verdicts, which `rayapp view` shows.
    """
    job = make_job(config, overrides, tasks=tasks, reward=reward, agent=agent)
    changed: dict[str, dict[str, Any]] = {}
    if model is not None:
        changed["model"] = {"path": str(model)}
    if samples is not None:
        changed["eval"] = {"samples_per_task": samples}

    def work() -> Evaluation:
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory(prefix="rayapp-eval-") as scratch:
            folder = Path(out) if out is not None else Path(scratch) / "eval"
            with giving(job.objects):
                metrics = evaluation_of(with_values(job.config, **changed), folder)
            return Evaluation(metrics=metrics, table=pq.read_table(folder / "evaluations", partitioning=None))

    return work_apart(work)


def evaluation_of(config: Config, out: Path | None) -> dict[str, float]:
    """Evaluate the config's model, which may be a checkpoint of a run. Return the metrics."""
    from rayapp.driver.evaluation import run_evaluation

    with with_checkpoint_as_model(config) as ready:
        return run_evaluation(ready, out)


@contextmanager
def with_checkpoint_as_model(config: Config) -> Iterator[Config]:
    """Yield the config. If `model.path` is a checkpoint, it is replaced by its `hf_model`, or by a temporary folder
    made with the base model that the run's config.yaml names."""
    path = Path(config.model.path)
    if step_of(path.name) is None or not path.is_dir():
        yield config
        return
    checkpoint = _whole(path, config)
    if (path / "hf_model").is_dir():
        yield with_values(config, model={"path": str(path / "hf_model")})
        return
    if "model" not in checkpoint.contents:
        raise InputError(
            f"checkpoint {path} has no weights to evaluate, only {', '.join(checkpoint.contents)}: its run's "
            "checkpoint.save_contents lacks `model`. Choose a checkpoint of another run."
        )
    with tempfile.TemporaryDirectory(prefix="rayapp-eval-") as folder:
        _convert(path, Path(folder))
        yield with_values(config, model={"path": folder})


def _whole(path: Path, config: Config) -> Checkpoint:
    found = {one.path.name: one for one in CheckpointFolder(path.parent, config.checkpoint).whole()}
    if path.name not in found:
        raise InputError(
            f"checkpoint {path} is incomplete: {why_torn(path)}. Complete checkpoints of this run: "
            f"{', '.join(found) or 'none'}."
        )
    if wrong := damage(path):
        raise InputError(f"checkpoint {path} can't be evaluated: {wrong}. Choose another checkpoint.")
    return found[path.name]


def _convert(path: Path, out: Path) -> None:
    from rayapp.learner.state.hf_folder import checkpoint_to_hf  # loads torch, which takes seconds

    checkpoint_to_hf(_config_of_run(path), path / "learner", out)


def _config_of_run(checkpoint: Path) -> Config:
    from rayapp.config.loading import load_config
    from rayapp.driver.sft import after_warmup

    file = checkpoint.parent.parent / "config.yaml"
    if not file.is_file():
        raise InputError(
            f"checkpoint {checkpoint} can't be read without {file}, which names its base model. Use the checkpoint "
            "in its run's folder, not a copy elsewhere."
        )
    return after_warmup(load_config(file))
