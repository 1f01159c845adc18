"""The checkpoints of one run: written aside, whole before they count, pruned by age and by score.

    checkpoints/  .pending-000012/          being written; nothing reads it
                  step=000010/{learner/, hf_model/, manifest.json}

A checkpoint counts only with its manifest, which names every file with its size and is written last, before the folder
is renamed. Called by `RunFolder` and the driver; the learners write the files. Never reads a tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.config_sections import CheckpointSection
from rayapp.durable import explain_full_disk, fsync, write_text
from rayapp.errors import CheckpointError

MANIFEST = "manifest.json"
RESUMABLE = frozenset({"model", "optimizer"})
"""What a run needs to go on exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint."""

    version: int
    """Optimizer steps done."""
    path: Path
    next_group_id: int
    """First group that the resumed run generates."""
    contents: tuple[str, ...] = ("model", "optimizer")
    """`checkpoint.save_contents` of the run that wrote it."""
    score: float | None = None
    """Of the step it was saved after, by `checkpoint.best_metric`; None where the step has no such metric."""

    @property
    def is_resumable(self) -> bool:
        return frozenset(self.contents) >= RESUMABLE


class CheckpointFolder:
    """`checkpoints/` of a run; one writer, who holds the run's lock.

    Args:
        path: of the folder; made when the first checkpoint is.
        section: how many to keep, and what is in each.
        in_use: true for a checkpoint that must stay for now, whatever its age.
    """

    def __init__(
        self, path: Path, section: CheckpointSection, *, in_use: Callable[[Path], bool] = lambda path: False
    ) -> None:
        self.path = path
        self._section = section
        self._in_use = in_use

    def whole(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first; torn ones are passed over."""
        found = [_read(path) for path in self.path.glob("step=*")]
        return sorted((c for c in found if c is not None), key=lambda c: c.version)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        return max(self.whole(), key=lambda c: c.version, default=None)

    def begin(self, version: int) -> Path:
        """An empty folder to write checkpoint `version` into. What earlier attempts left behind is removed."""
        for leftover in self.path.glob(".pending-*"):
            shutil.rmtree(leftover)
        pending = self._pending(version)
        with explain_full_disk(pending):
            pending.mkdir(parents=True)
        return pending

    def commit(self, version: int, *, next_group_id: int, score: float | None = None) -> Checkpoint:
        """Make the pending folder the newest checkpoint, and drop those that are neither recent nor best."""
        pending, target = self._pending(version), self.path / f"step={version:06d}"
        with explain_full_disk(pending):
            files = sorted(path for path in pending.rglob("*") if path.is_file())
            if not files:
                raise CheckpointError(
                    f"{pending} is empty though the learners have saved: they wrote on another machine. Put the run "
                    "folder (run.output_dir; with s3:// run.staging_dir) on a disk that the driver and the learners "
                    "share."
                )
            for path in files:
                fsync(path)
            manifest = {
                "version": version,
                "next_group_id": next_group_id,
                "contents": list(self._section.save_contents),
                "score": score,
                "files": {str(path.relative_to(pending)): path.stat().st_size for path in files},
            }
            write_text(pending / MANIFEST, json.dumps(manifest, indent=1))
            _remove(target)  # a torn one; a whole one is never written twice
            pending.rename(target)
            fsync(self.path)
        self._prune()
        checkpoint = _read(target)
        assert checkpoint is not None, f"{target} is not whole right after it was committed"
        return checkpoint

    def _pending(self, version: int) -> Path:
        return self.path / f".pending-{version:06d}"

    def _prune(self) -> None:
        kept = {c.path for c in to_keep(self.whole(), self._section.keep_last, self._section.keep_best)}
        for folder in self.path.glob("step=*"):
            if folder not in kept and not self._in_use(folder):
                _remove(folder)


def to_keep(checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """The newest `keep_last`, and the `keep_best` of the highest score; of equals the older. Oldest first.

    Example: scores of versions 2, 4, 6, 8 are 0.1, 0.9, 0.3, 0.2; keep_last 1 and keep_best 1 -> versions 4 and 8.
    """
    in_order = sorted(checkpoints, key=lambda c: c.version)
    scored = [(c.score, -c.version, c) for c in in_order if c.score is not None]
    best = [c for _, _, c in sorted(scored, key=lambda entry: entry[:2], reverse=True)[:keep_best]]
    kept = {c.version for c in (*in_order[len(in_order) - keep_last if keep_last < len(in_order) else 0 :], *best)}
    return [c for c in in_order if c.version in kept]


def _remove(folder: Path) -> None:
    """Delete a checkpoint. Its manifest goes first, so that a kill in between leaves nothing that looks whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _read(path: Path) -> Checkpoint | None:
    """None unless every file that the manifest names is there in full."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        whole = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
        return parse_manifest(path, manifest) if whole else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def parse_manifest(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """The checkpoint at `path`, as its manifest describes it. Raises KeyError or TypeError: it is no manifest."""
    # Manifests of before save_contents have neither key: they held the model and the optimizer, and no score.
    return Checkpoint(
        version=manifest["version"],
        path=path,
        next_group_id=manifest["next_group_id"],
        contents=tuple(manifest.get("contents", ("model", "optimizer"))),
        score=manifest.get("score"),
    )
