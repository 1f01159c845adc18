"""The folder of one run: who may write it, what a resumed run keeps, and nothing in it that looks whole and isn't.

    outputs/<run>/  run.lock  format.json  config.yaml  metrics.jsonl  rewards.png
                    trajectories/step=000001.parquet   evaluations/step=000010.parquet
                    checkpoints/step=000010/{learner/, manifest.json}   final/

Everything is written aside and renamed; checkpoints are in `checkpoints.py`. The driver owns the folder through a lock
on `run.lock`, which dies with its process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rayapp.config.config import Config
from rayapp.config.loading import to_yaml
from rayapp.core.errors import RunFolderError
from rayapp.core.files import (
    aside,
    explain_full_disk,
    explain_unwritable,
    locked,
    put_in_place,
    remove_pending,
    remove_tree,
    write_text,
)
from rayapp.core.types import FloatArray, Group
from rayapp.runs.checkpoints import CheckpointFolder
from rayapp.runs.compatibility import check_same_training
from rayapp.runs.format import check_format, write_format
from rayapp.runs.mirror.layout import EVALUATIONS, EXPORTED, FINAL, TRAJECTORIES
from rayapp.runs.mirror.mirror import RunMirror, mirroring
from rayapp.runs.tracking.jsonl import read_records
from rayapp.runs.trajectories import write_trajectories, writing_trajectories

RECORDED = (TRAJECTORIES, EVALUATIONS)
"""Folders with a file for each step."""
RAY_COPIES = "working_dir_files"
"""Folder of a Ray node that holds what jobs uploaded."""


class RunFolder:
    """An open run folder; make one with `RunFolder.open`.

    Args:
        path: exists, and its lock is held.
        config: of the run.
        mirror: sends it to object storage; None for a folder that stays here.
    """

    def __init__(self, path: Path, config: Config, mirror: RunMirror | None = None) -> None:
        self.path = path
        self.uri = mirror.uri if mirror is not None else str(path)
        """Where people find it."""
        self._config = config
        self._mirror = mirror
        in_use = mirror.is_reading if mirror is not None else lambda checkpoint: False
        self.checkpoints = CheckpointFolder(path / "checkpoints", config.checkpoint, in_use=in_use)

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Iterator[RunFolder]:
        """Lock the folder, check that this run may go on in it, and keep it for the length of the block.

        One on s3:// is first brought here, to `run.staging_dir`, and sent there while the block runs (`mirror`).

        Raises:
            RunFolderError: another process runs in it, run.resume forbids what is there, it can't be written, it would
                be deleted with a Ray job, a newer version wrote it, or none of its checkpoints can be used.
            StorageFullError: the disk is full, now or while the block runs.
            StorageError: object storage can't be used; at the end StorageIncompleteError, when not all of it is there.
        """
        path = config.run_folder
        if not path.is_absolute() and RAY_COPIES in Path.cwd().parts:
            raise RunFolderError(
                f"run.output_dir is {config.run.output_dir!r}, below {Path.cwd()}: Ray made this copy for the "
                "job and deletes it after the job. Give an absolute path, e.g. run.output_dir=/var/outputs."
            )
        checkpoints = CheckpointFolder(path / "checkpoints", config.checkpoint)
        with explain_full_disk(path, checkpoints.what_is_safe), ExitStack() as opened:
            with explain_unwritable(path):
                path.mkdir(parents=True, exist_ok=True)
                opened.enter_context(locked(path / "run.lock"))
                # What a process that was killed was writing: the lock is held, so nobody writes now.
                for place in (path, path / "checkpoints", *(path / name for name in RECORDED)):
                    remove_pending(place)
            folder = cls(path, config, opened.enter_context(mirroring(config, path)))
            check_format(path)
            folder._check_resume()
            with explain_unwritable(path):
                write_format(path)
                write_text(path / "config.yaml", to_yaml(config))
            yield folder

    def _check_resume(self) -> None:
        resume = self._config.run.resume
        has_run = (self.path / "metrics.jsonl").exists() or self.checkpoints.latest() is not None
        if resume == "never" and has_run:
            raise RunFolderError(
                f"{self.path} holds a run already, and run.resume is never. Choose another run.name, delete the "
                "folder, or go on with run.resume=auto."
            )
        checkpoint = self.checkpoints.verified()
        if resume == "must" and checkpoint is None:
            raise RunFolderError(
                f"run.resume is must, but {self.path} holds no whole checkpoint. Use auto to start anew."
            )
        if checkpoint is not None and not checkpoint.is_resumable:
            raise RunFolderError(
                f"{checkpoint.path} holds {', '.join(checkpoint.contents)} (checkpoint.save_contents): without model "
                "and optimizer a run can't go on from it as if it had not stopped. Choose another run.name, with "
                "model.path set to its hf_model folder if it has one."
            )
        stored = self.path / "config.yaml"
        if (checkpoint is not None or self.exported_step is not None) and stored.exists():
            check_same_training(self._config, stored)

    @property
    def is_finished(self) -> bool:
        """True once the last step is saved and exported: there is nothing left to do for this config."""
        checkpoint = self.checkpoints.latest()
        if checkpoint is None or checkpoint.version < self._config.train.num_steps:
            return False
        # A run that was given more steps and died before it exported has the model of its first end there.
        return self.exported_step == checkpoint.version

    @property
    def exported_step(self) -> int | None:
        """The step of the model in `final/`; None where there is none, or its marker can't be read."""
        try:
            return int(json.loads((self.path / FINAL / EXPORTED).read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def storage_metrics(self) -> dict[str, float]:
        """`storage/*` of a run on s3://.

        Raises:
            RunFolderError: another run has taken the remote folder over.
        """
        return self._mirror.metrics() if self._mirror is not None else {}

    def truncate_after(self, version: int) -> None:
        """Forget metrics and trajectories of steps that the resumed run takes again."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_bytes().splitlines()
            kept = [line + b"\n" for line in lines for record in read_records([line]) if record["step"] <= version]
            with aside(metrics) as temporary:
                temporary.write_bytes(b"".join(kept))
        for folder in RECORDED:
            for file in (self.path / folder).glob("step=*.parquet"):
                if int(file.stem.removeprefix("step=")) > version:
                    file.unlink(missing_ok=True)
        # After they are gone here: what the mirror forgets while they are there, it would send again.
        if self._mirror is not None:
            self._mirror.truncate_after(version)

    async def write_trajectories(
        self, step: int, groups: Sequence[Group], learner_log_probs: Mapping[int, FloatArray]
    ) -> None:
        """Write `trajectories/step=NNNNNN.parquet`, off the event loop."""
        path = self.path / TRAJECTORIES / f"step={step:06d}.parquet"

        def write() -> None:
            with self.explain_full_disk(path):
                path.parent.mkdir(exist_ok=True)
                write_trajectories(path, step, groups, learner_log_probs)

        await asyncio.to_thread(write)

    @contextmanager
    def recording_evaluation(self, step: int) -> Iterator[Callable[[Sequence[Group]], None] | None]:
        """Call what it gives with each part of the evaluation after `step`: `evaluations/step=NNNNNN.parquet`. None
        where the run keeps no trajectories."""
        if not self._config.tracking.trajectories:
            yield None
            return
        path = self.path / EVALUATIONS / f"step={step:06d}.parquet"
        with self.explain_full_disk(path):
            path.parent.mkdir(exist_ok=True)
            with writing_trajectories(path, step) as write:
                yield write

    @contextmanager
    def pending_final(self, step: int | None = None) -> Iterator[Path]:
        """An empty folder that becomes `final/` when the block succeeds: the model after this step, or the last."""
        pending, final = self.path / ".pending-final", self.path / FINAL
        with self.explain_full_disk(pending):
            remove_tree(pending)
            pending.mkdir()
            try:
                yield pending
                marker = {"run": self.path.name, "step": self._config.train.num_steps if step is None else step}
                write_text(pending / EXPORTED, json.dumps(marker))
                put_in_place(pending, final)
            finally:
                remove_tree(pending)

    def explain_full_disk(self, path: Path) -> AbstractContextManager[None]:
        """See `rayapp.core.files`; says which checkpoint is safe."""
        return explain_full_disk(path, self.checkpoints.what_is_safe)
