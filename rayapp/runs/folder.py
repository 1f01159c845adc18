"""The folder of one run: its lock, the records that a resumed run keeps, and only complete files.

Every file is written under a temporary name and renamed. The driver owns the folder through a lock on `run.lock`, which
ends with its process. A run resumes only if its configuration leads to the same training and `format.json` has a known
format (without the file: 1).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import renamed_keys, to_yaml
from rayapp.config.sections import CheckpointSection
from rayapp.core import __version__
from rayapp.core.errors import RunFolderError
from rayapp.core.files import (
    Location,
    aside,
    explain_full_disk,
    explain_unwritable,
    locked,
    put_in_place,
    remove_pending,
    remove_tree,
    write_text,
)
from rayapp.core.names import load_extra
from rayapp.core.types import FloatArray, Group
from rayapp.runs.checkpoints import CheckpointFolder
from rayapp.runs.layout import (
    CHECKPOINTS,
    EVALUATIONS,
    FINAL,
    PARQUET,
    PROFILES,
    RECORDED,
    TRAJECTORIES,
    step_name,
    steps_in,
)
from rayapp.runs.tracking.metrics import read_records
from rayapp.runs.trajectories import write_trajectories, writing_trajectories
from rayapp.storage.models.adapters import EXPORTED

log = logging.getLogger(__name__)


def _of(section: str, *keys: str) -> tuple[str, ...]:
    return tuple(f"{section}.{key}" for key in keys)


# Keys that change where and how long a run executes and what it records, but not the training. train.num_steps may also
# differ, unless the learning rate depends on it.
FREE_KEYS = (
    *("budget", "cluster", "checkpoint", "eval", "tracking", "recovery", "sandbox"),
    *_of("run", "output_dir", "staging_dir", "resume", "allow_changed"),
    "data.cache_dir",
    "server.start_timeout_s",
    "train.profile_steps",
    "learner.offload_when_idle",
    *_of("rollout", "group_deadline_s", "max_failed_ratio"),
    *_of("judges", "base_url", "api_key_env", "response_format", "timeout_s", "requests_per_minute"),
    *_of("judges", "max_concurrent", "input_price", "output_price"),
)
# Keys that differ between machines: the training is then not equal to the last bit, which a warning says.
MACHINE_KEYS = (
    "rollout.num_workers",
    *_of("server", "num_servers", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gib"),
    *_of("server", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "cpu_threads", "weight_transport"),
    "server.weight_bucket_mib",
    "model_servers.tensor_parallel_size",
    *_of("learner", "num_learners", "max_tokens_per_microbatch", "share_prefixes", "activation_checkpointing"),
    *_of("learner", "compile", "log_prob_chunk_tokens", "cpu_threads", "cpu_offload"),
)
# Index within a key: what may differ, may differ in every source and judge.
_IN_A_LIST = re.compile(r"^sources\[\d+\]\.|\[\d+\]")


def check_same_training(config: Config, stored: Path) -> None:
    """Raise RunFolderError if keys that change the training differ from those of the run folder, with both values."""
    made_with = yaml.safe_load(stored.read_text()) or {}
    if old := renamed_keys(made_with):
        raise RunFolderError(
            f"{stored.parent} was made by an older version of rayapp: its key {next(iter(old))} is now called "
            f"{next(iter(old.values()))}. Continue with that version, or choose another run.name."
        )
    now = dict(flat_keys(config.model_dump(mode="json")))
    # A key that the run's older version didn't have counts with its default value.
    usual = {key: value for key, value in flat_keys(Config().model_dump(mode="json")) if key in now}
    before = usual | dict(flat_keys(made_with))
    free = FREE_KEYS if config.learner.optimizer.schedule != "constant" else (*FREE_KEYS, "train.num_steps")
    changed = {
        key: f"{key}: {before.get(key)!r} before, {now.get(key)!r} now{_reason(key, config.learner.optimizer.schedule)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_among(key, free)
    }
    meant = (*MACHINE_KEYS, *config.run.allow_changed)
    refused = {key: line for key, line in changed.items() if not _is_among(key, meant)}
    if refused:
        raise RunFolderError(
            f"{stored.parent} was made with another configuration:\n  "
            + "\n  ".join(refused.values())
            + "\nContinue with the old values, or choose another run.name (to start from this run's weights, set "
            "model.path to its final/ folder). If you intend the change, set "
            f"run.allow_changed='[{', '.join(refused)}]'."
        )
    for line in changed.values():
        log.warning(
            "the run resumes with a changed %s. From this step on the run does not repeat to the last bit.", line
        )


def _is_among(key: str, free: Sequence[str]) -> bool:
    key = _IN_A_LIST.sub("", key)
    return any(key == each or key.startswith(f"{each}.") for each in free)


def _reason(key: str, schedule: str) -> str:
    if key != "train.num_steps":
        return ""
    return f" (learner.optimizer.schedule is {schedule}: each step's learning rate follows)"


def flat_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values, including those of sections in a list, as `sources[0].name`."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat_keys(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                yield from flat_keys(each, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


FORMAT_FILE = "format.json"
FORMAT = 1


def check_format(folder: Path) -> None:
    file = folder / FORMAT_FILE
    if file.exists():
        check_format_text(file.read_bytes(), str(folder))


def check_format_text(text: bytes, where: str) -> None:
    """Raise RunFolderError if the text of `format.json` of the run at `where` is of a newer version, or malformed."""
    try:
        raw = json.loads(text)
        found, writer = int(raw["format"]), str(raw.get("written_by", "another version"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{where}/{FORMAT_FILE} can't be read ({error!r}): the folder is damaged, or is not a run's folder"
        ) from None
    if found > FORMAT:
        raise RunFolderError(
            f"{where} was written by a newer version ({writer}, format {found}); this version reads format {FORMAT}. "
            "Nothing was changed: use the newer version."
        )


def write_format(folder: Path) -> None:
    text = json.dumps({"format": FORMAT, "written_by": f"rayapp {__version__}"})
    file = folder / FORMAT_FILE
    if not file.exists() or file.read_text() != text:
        write_text(file, text)


MACHINE_FILE = "machine.json"


def note_machine(folder: Path, config: Config, processor: str, *, note: Callable[[str], None]) -> None:
    """Record instruction set (`gpu` on GPUs) and number formats (without `auto`) with which the run goes on. If they
    differ from the recorded ones, the run does not repeat to the last bit, which is noted."""
    now = {
        "processor": processor,
        "learner.compute_dtype": config.learner.compute_dtype,
        "server.dtype": config.server.dtype,
    }
    file = folder / MACHINE_FILE
    before = json.loads(file.read_text()) if file.exists() else now
    write_text(file, json.dumps(now))
    changed = [f"{key} {before.get(key)} before, {value} now" for key, value in now.items() if before.get(key) != value]
    if changed:
        note(f"the run goes on with {'; '.join(changed)}: from here on it does not repeat to the last bit")


RAY_COPIES = "working_dir_files"  # of a Ray node, for files uploaded with jobs


class Mirror(Protocol):
    """The copy of a run in object storage, which is kept up to date."""

    uri: str

    def metrics(self) -> dict[str, float]: ...

    def truncate_after(self, version: int) -> None: ...

    def is_reading(self, checkpoint: Path) -> bool: ...


@contextmanager
def _mirroring(uri: str, path: Path, section: CheckpointSection, *, must_be_new: bool) -> Iterator[Mirror | None]:
    if not Location.parse(uri).is_remote:
        yield None
        return
    with load_extra("s3.mirror:mirroring")(uri, path, section, must_be_new=must_be_new) as mirror:
        yield mirror


class RunFolder:
    """An open run folder, whose lock is held; make one with `RunFolder.open`. `mirror` copies it to object storage."""

    def __init__(self, path: Path, config: Config, mirror: Mirror | None = None) -> None:
        self.path = path
        self.uri = mirror.uri if mirror is not None else str(path)  # for messages
        self._config = config
        self._mirror = mirror
        in_use = mirror.is_reading if mirror is not None else lambda path: False
        self.checkpoints = CheckpointFolder(path / CHECKPOINTS, config.checkpoint, in_use=in_use)

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Iterator[RunFolder]:
        """Lock the folder, check that this run may continue in it, and hold it for the length of the block.

        A folder on s3:// is first fetched to `run.staging_dir`, and mirrored while the block runs. RunFolderError says
        why the folder can't be used; a full disk is a StorageFullError, also in the block; an incomplete upload a
        StorageIncompleteError.
        """
        path = config.run_folder
        if not path.is_absolute() and RAY_COPIES in Path.cwd().parts:
            raise RunFolderError(
                f"run.output_dir is {config.run.output_dir!r}, a relative path in {Path.cwd()}. Ray deletes that "
                "folder when the job ends. Give an absolute path, e.g. run.output_dir=/var/outputs."
            )
        checkpoints = CheckpointFolder(path / "checkpoints", config.checkpoint)
        with explain_full_disk(path, checkpoints.what_is_safe), ExitStack() as opened:
            with explain_unwritable(path):
                path.mkdir(parents=True, exist_ok=True)
                opened.enter_context(locked(path / "run.lock"))
                # Remove unfinished files of a killed process: this process holds the lock, so no other one writes now.
                for place in (path, path / "checkpoints", *(path / name for name in RECORDED)):
                    remove_pending(place)
            mirroring = _mirroring(config.run_uri, path, config.checkpoint, must_be_new=config.run.resume == "never")
            folder = cls(path, config, opened.enter_context(mirroring))
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
                f"{self.path} already holds a run, but run.resume is never. Choose another run.name, delete the "
                "folder, or continue the run with run.resume=auto."
            )
        checkpoint = self.checkpoints.verified()
        if resume == "must" and checkpoint is None:
            raise RunFolderError(
                f"run.resume is must, but {self.path} has no complete checkpoint. Use run.resume=auto to start over."
            )
        if checkpoint is not None and not checkpoint.is_resumable:
            raise RunFolderError(
                f"{checkpoint.path} can't be continued: it holds only {', '.join(checkpoint.contents)}, and a run "
                "continues only from model and optimizer (checkpoint.save_contents). Choose another run.name, and "
                "set model.path to this checkpoint's hf_model folder if it has one."
            )
        stored = self.path / "config.yaml"
        if (checkpoint is not None or self.exported_step is not None) and stored.exists():
            check_same_training(self._config, stored)

    @property
    def is_finished(self) -> bool:
        """True once the last step is saved and exported: this config has nothing left to do."""
        checkpoint = self.checkpoints.latest()
        if checkpoint is None or checkpoint.version < self._config.train.num_steps:
            return False
        # If train.num_steps was raised and the run died before its export, `final/` still has the model of the run's
        # earlier end.
        return self.exported_step == checkpoint.version

    @property
    def exported_step(self) -> int | None:
        """Step of the model in `final/`; None if there is none."""
        try:
            return int(json.loads((self.path / FINAL / EXPORTED).read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def storage_metrics(self) -> dict[str, float]:
        """Return `storage/*` metrics of a run on s3://. RunFolderError: another run has taken it over."""
        return self._mirror.metrics() if self._mirror is not None else {}

    def truncate_after(self, version: int) -> int:
        """Delete metrics and trajectories of steps that the resumed run repeats. Return how many steps had metrics."""
        metrics, num_cut = self.path / "metrics.jsonl", 0
        if metrics.exists():
            lines = metrics.read_bytes().splitlines()
            kept = [line + b"\n" for line in lines for record in read_records([line]) if record["step"] <= version]
            num_cut = len(lines) - len(kept)
            with aside(metrics) as temporary:
                temporary.write_bytes(b"".join(kept))
        for folder in RECORDED:
            for file in steps_in(self.path / folder, PARQUET, after=version):
                file.unlink(missing_ok=True)
        for profile in steps_in(self.path / PROFILES, after=version):
            remove_tree(profile)
        # Do this after deleting the local files: otherwise the mirror would upload them again.
        if self._mirror is not None:
            self._mirror.truncate_after(version)
        return num_cut

    async def write_trajectories(
        self, step: int, groups: Sequence[Group], learner_log_probs: Mapping[int, FloatArray]
    ) -> None:
        """Write `trajectories/step=NNNNNN.parquet`, off the event loop."""
        path = self.path / TRAJECTORIES / step_name(step, PARQUET)

        def write() -> None:
            with self.explain_full_disk(path):
                path.parent.mkdir(exist_ok=True)
                write_trajectories(path, step, groups, learner_log_probs)

        await asyncio.to_thread(write)

    @contextmanager
    def recording_evaluation(self, step: int) -> Iterator[Callable[[Sequence[Group]], None]]:
        """Record the evaluation after `step`. Yield a function that takes its parts."""
        path = self.path / EVALUATIONS / step_name(step, PARQUET)
        with self.explain_full_disk(path):
            path.parent.mkdir(exist_ok=True)
            with writing_trajectories(path, step) as write:
                yield write

    @contextmanager
    def pending_final(self, step: int | None = None) -> Iterator[Path]:
        """Make a folder that becomes `final/`, for the model after `step` (None: the last), if the block succeeds."""
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
        return explain_full_disk(path, self.checkpoints.what_is_safe)
