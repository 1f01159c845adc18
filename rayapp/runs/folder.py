"""The folder of one run: its lock, the records that a resumed run keeps, and only complete files.

    outputs/<run>/  run.lock  format.json  config.yaml  metrics.jsonl  rewards.png
                    trajectories/step=000001.parquet   evaluations/step=000010.parquet
                    checkpoints/step=000010/{learner/, manifest.json}   final/

Every file is written under a temporary name and renamed; `checkpoints.py` does so for checkpoints. The driver owns the
folder through a lock on `run.lock`, which ends with its process.
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
from rayapp.runs.compatibility import check_format, check_same_training, write_format
from rayapp.runs.mirror.layout import EVALUATIONS, EXPORTED, FINAL, TRAJECTORIES
from rayapp.runs.mirror.mirror import RunMirror, mirroring
from rayapp.runs.tracking.metrics import read_records
from rayapp.runs.trajectories import write_trajectories, writing_trajectories

RECORDED = (TRAJECTORIES, EVALUATIONS)
"""Folders with a file for each step."""
RAY_COPIES = "working_dir_files"
"""Folder of a Ray node for files uploaded with jobs."""


class RunFolder:
    """An open run folder; make one with `RunFolder.open`.

    Args:
        path: the folder, which exists and whose lock is held.
        config: configuration of the run.
        mirror: copies the folder to object storage; None for a run on a local disk.
    """

    def __init__(self, path: Path, config: Config, mirror: RunMirror | None = None) -> None:
        self.path = path
        self.uri = mirror.uri if mirror is not None else str(path)
        """Place of the run in messages for people."""
        self._config = config
        self._mirror = mirror
        self.checkpoints = CheckpointFolder(path / "checkpoints", config.checkpoint)
        if mirror is not None:
            self.checkpoints = CheckpointFolder(
                self.checkpoints.path, config.checkpoint, in_use=mirror.is_reading, fetch_again=mirror.fetch_again
            )

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Iterator[RunFolder]:
        """Lock the folder, check that this run may continue in it, and hold it for the length of the block.

        A folder on s3:// is first fetched to `run.staging_dir`, and mirrored while the block runs (`mirror`).

        Raises:
            RunFolderError: another process runs in it, run.resume forbids its content, it can't be written, it would be
                deleted with a Ray job, a newer version wrote it, or none of its checkpoints is usable.
            StorageFullError: the disk is full, now or while the block runs.
            StorageError: object storage is not usable; at the end StorageIncompleteError if the upload is incomplete.
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
                # Remove unfinished files of a killed process: this process holds the lock, so no other one writes now.
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
                "folder, or continue the run with run.resume=auto."
            )
        checkpoint = self.checkpoints.verified()
        if resume == "must" and checkpoint is None:
            raise RunFolderError(
                f"run.resume is must, but {self.path} holds no whole checkpoint. Use auto to start over."
            )
        if checkpoint is not None and not checkpoint.is_resumable:
            raise RunFolderError(
                f"{checkpoint.path} holds {', '.join(checkpoint.contents)} (checkpoint.save_contents): without model "
                "and optimizer a run can't continue exactly from this checkpoint. Choose another run.name, with "
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
        # If train.num_steps was raised and the run died before its export, `final/` still has the model of its first
        # end.
        return self.exported_step == checkpoint.version

    @property
    def exported_step(self) -> int | None:
        """Return the step of the model in `final/`; None if there is no model, or its marker is unreadable."""
        try:
            return int(json.loads((self.path / FINAL / EXPORTED).read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def storage_metrics(self) -> dict[str, float]:
        """Return `storage/*` metrics of a run on s3://.

        Raises:
            RunFolderError: another run has taken the remote folder over.
        """
        return self._mirror.metrics() if self._mirror is not None else {}

    def truncate_after(self, version: int) -> int:
        """Delete metrics and trajectories of steps that the resumed run repeats. Returns how many steps had metrics."""
        metrics, num_cut = self.path / "metrics.jsonl", 0
        if metrics.exists():
            lines = metrics.read_bytes().splitlines()
            kept = [line + b"\n" for line in lines for record in read_records([line]) if record["step"] <= version]
            num_cut = len(lines) - len(kept)
            with aside(metrics) as temporary:
                temporary.write_bytes(b"".join(kept))
        for folder in RECORDED:
            for file in (self.path / folder).glob("step=*.parquet"):
                if int(file.stem.removeprefix("step=")) > version:
                    file.unlink(missing_ok=True)
        # After the local files are gone: otherwise the mirror would send them again.
        if self._mirror is not None:
            self._mirror.truncate_after(version)
        return num_cut

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
        """Record the evaluation after `step` in `evaluations/step=NNNNNN.parquet`. Yields a function to call with each
        part of it; None if the run keeps no trajectories."""
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
        """Make an empty folder that becomes `final/` if the block succeeds: the model after this step, or the last."""
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
        """Turn a full disk into an error that names the last safe checkpoint; see `rayapp.core.files`."""
        return explain_full_disk(path, self.checkpoints.what_is_safe)
