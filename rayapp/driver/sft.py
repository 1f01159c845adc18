"""Supervised fine-tuning on demonstrations: `rayapp sft CONFIG`, and the warm-up before a training's first step.

The supervised steps are a run of their own, `<output_dir>/<run.name>-sft`. The training then starts from its `final/`
as from any model: reference model, adapters and servers load it, and the optimizer is new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rayapp.config.config import Config, with_values
from rayapp.config.keys import all_tasks
from rayapp.config.learner import OptimizerSection
from rayapp.config.sections import RolloutSection, TrainSection
from rayapp.core.aio import finish_then_cancel, run_until_done
from rayapp.core.errors import ConfigError, LearnersLostError, RestartsUsedUpError
from rayapp.core.files import Location
from rayapp.core.logs import about, start_logs
from rayapp.core.timing import Phases
from rayapp.core.types import Trajectory
from rayapp.driver.budget import read_costs, within_budget
from rayapp.driver.cluster import LearnerGroup, one_connection, open_learners
from rayapp.driver.run import restore
from rayapp.driver.saving import CheckpointSaver, saving, saving_when_stopped, saying_what_is_saved
from rayapp.rollout.demonstrations import Demonstrations, read_demonstrations
from rayapp.rollout.order import index_in_epochs
from rayapp.runs.folder import RunFolder, note_machine
from rayapp.runs.plots import write_reward_plot
from rayapp.runs.tracking.trackers import RunTracker, make_trackers
from rayapp.storage.models.check import check_model
from rayapp.storage.models.fetch import with_local_model


def run_sft(config: Config) -> None:
    if not config.warmup.num_steps:
        raise ConfigError(
            "warmup.num_steps is 0, so there is nothing to do: set warmup.num_steps and warmup.files (docs/sft.md)"
        )
    start_logs(config.run.name, config.tracking.log_format)
    check_model(with_local_model(config))
    with one_connection():
        warm_up(config)


def warm_up(config: Config) -> tuple[Config, float]:
    """Train on the demonstrations from the start or from the last checkpoint, unless that is done already. Return the
    config of the training that follows, with the trained model; and the cost of the supervised steps."""
    section = sft_config(config)
    if not section.run_folder.exists():
        _demonstrations(section)  # read them first, so that a refused row leaves no empty run folder
    with RunFolder.open(section) as folder:
        if folder.exported_step == section.train.num_steps:
            print(f"{folder.uri} has completed its {section.train.num_steps} steps on demonstrations", flush=True)
        else:
            run_until_done(_run(section, folder))
        cost = sum(read_costs(folder.path).values())
    return after_warmup(config), cost


def sft_config(config: Config) -> Config:
    """Return the config of the supervised run. Keys that only GRPO reads have their defaults there."""
    limits = {key: getattr(config.rollout, key) for key in ("max_prompt_tokens", "max_completion_tokens")}
    learner = config.learner.model_copy(update={"optimizer": OptimizerSection(lr=config.warmup.lr)})
    return Config(
        run=config.run.model_copy(update={"name": sft_name(config)}),
        model=config.model,
        tasks=all_tasks(config),
        data=config.data.model_copy(update={"shuffle": True, "truncation": "error"}),
        agent=config.agent,
        rollout=RolloutSection(**limits),
        train=TrainSection(num_steps=config.warmup.num_steps, groups_per_step=1),
        budget=config.budget,
        warmup=config.warmup,
        learner=learner,
        checkpoint=config.checkpoint.model_copy(update={"keep_best": 0, "final_dtype": "float32"}),
        cluster=config.cluster,
        recovery=config.recovery,
        tracking=config.tracking,
    )


def sft_name(config: Config) -> str:
    name = f"{config.run.name}-sft"
    if len(name) > 63:
        raise ConfigError(f"run.name {config.run.name!r} is too long for a run with a warm-up: at most 59 characters")
    return name


def after_warmup(config: Config) -> Config:
    """Return the config with the model that the warm-up exported; unchanged without a warm-up."""
    if not config.warmup.num_steps:
        return config
    root = Location.parse(config.run.output_dir)
    trained = root.join(sft_name(config)).join("final")
    return with_values(config, model={"path": str(trained)})


def rows_of_step(step: int, *, num_rows: int, rows_per_step: int, seed: int) -> list[int]:
    """Return the rows of step `step`, counted from 1. Pure, so that a resumed run takes the next rows. Each epoch takes
    every row once, in its own order; a step may span two epochs."""
    first = (step - 1) * rows_per_step
    places = range(first, first + rows_per_step)
    return [index_in_epochs(place, number=num_rows, seed=seed, what="demonstrations") for place in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    learned: Sequence[Trajectory]
    held_out: Sequence[Trajectory]
    pictures: Mapping[str, bytes]  # of all rows, by SHA-256


@dataclass(slots=True, kw_only=True)
class _Learning:
    config: Config
    folder: RunFolder
    tracker: RunTracker
    learners: LearnerGroup
    saver: CheckpointSaver
    rows: _Rows
    version: int

    async def begin_checkpoint(self, version: int) -> None:
        await self.saver.begin(version, next_group_id=0)

    async def step(self, step: int) -> None:
        phases = Phases(on_change=self.tracker.phase)
        warmup, last = self.config.warmup, self.config.train.num_steps
        rows, seed = self.rows.learned, self.config.run.seed
        chosen = rows_of_step(step, num_rows=len(rows), rows_per_step=warmup.rows_per_step, seed=seed)
        with phases("train"):
            metrics = await self.learners.supervised_step(step, [rows[i] for i in chosen], self.rows.pictures)
        self.version = step
        metrics |= {"sft/epoch": step * warmup.rows_per_step / len(rows)}
        if step == last:
            with phases("eval"):
                metrics |= await self.validation()
        every = self.config.checkpoint.every_steps
        # Save no checkpoint at the end, because the run is then complete and the model is in final/.
        if every and step % every == 0 and step < last:
            with phases("checkpoint"):
                await self.begin_checkpoint(step)
        self.tracker.log(step, metrics | await self.saver.check() | phases.metrics(()))

    async def validation(self) -> dict[str, float]:
        if not self.rows.held_out:
            return {}
        loss = await self.learners.supervised_loss(self.rows.held_out, self.rows.pictures)
        return {"sft/validation_loss": loss}


def _demonstrations(section: Config) -> tuple[Demonstrations, Demonstrations]:
    local, files = with_local_model(section), section.warmup.eval_files
    found = read_demonstrations(local, section.warmup.files)
    return found, read_demonstrations(local, files) if files else Demonstrations()


async def _run(section: Config, folder: RunFolder) -> None:
    found, held_out = await asyncio.to_thread(_demonstrations, section)
    with make_trackers(section, folder) as tracker, saying_what_is_saved(folder, tracker.note):
        tracker.note(_what_is_learned(section, found))
        rows = _Rows(learned=found.rows, held_out=held_out.rows, pictures=found.pictures | held_out.pictures)
        await _learn_through_losses(section, folder, tracker, rows)
    write_reward_plot(folder.path)


def _what_is_learned(config: Config, found: Demonstrations) -> str:
    warmup = config.warmup
    source = ", ".join(warmup.files) if warmup.files else f"the tasks {', '.join(config.tasks)}"
    left_out = f", {found.num_left_out} longer than warmup.max_tokens left out" if found.num_left_out else ""
    epochs = warmup.num_steps * warmup.rows_per_step / len(found.rows)
    return (
        f"supervised steps on {len(found.rows)} demonstrations of {source}{left_out}: {warmup.num_steps} steps of "
        f"{warmup.rows_per_step}, {epochs:.3g} epochs"
    )


async def _learn_through_losses(config: Config, folder: RunFolder, tracker: RunTracker, rows: _Rows) -> None:
    for restart in range(config.recovery.max_restarts + 1):
        try:
            async with (
                within_budget(config, folder, tracker, with_servers=False) as on_lease,
                open_learners(config, report=tracker.note, on_lease=on_lease) as learners,
            ):
                await _learn(config, folder, tracker, learners, rows)
                return
        except LearnersLostError as error:
            if restart == config.recovery.max_restarts:
                raise RestartsUsedUpError(
                    f"the learners were lost {restart + 1} times, and recovery.max_restarts is {restart}. Last reason: "
                    f"{error} Start the run again: it continues from its last checkpoint."
                ) from None
            tracker.note(f"lost the learners: {error} Restarting them from the last checkpoint.")


async def _learn(config: Config, folder: RunFolder, tracker: RunTracker, learners: LearnerGroup, rows: _Rows) -> None:
    note_machine(folder.path, learners.config, learners.processor, note=tracker.note)
    version, _, _ = await restore(learners, folder, note=tracker.note)
    saver = CheckpointSaver(learners, folder)
    state = _Learning(
        config=config, folder=folder, tracker=tracker, learners=learners, saver=saver, rows=rows, version=version
    )
    async with saving(saver), saving_when_stopped(saver, folder, state, partial(_Learning.begin_checkpoint, state)):
        if version == 0 and (before := await state.validation()):
            tracker.log(0, before)
        for step in range(version + 1, config.train.num_steps + 1):
            with about(step=step):
                # A stop waits for a step that has begun, because half a step can't be saved.
                await finish_then_cancel(state.step(step))
        await saver.finish()
    tracker.phase("exporting")
    started = time.monotonic()
    with folder.pending_final() as pending:
        await learners.export_hf(pending)
    tracker.note(f"model after the demonstrations: {folder.uri}/final ({time.monotonic() - started:.1f} s)")
