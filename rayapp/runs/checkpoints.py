"""The checkpoints of one run: written aside, whole before they count, pruned by age and by score.

    checkpoints/  .pending-000012/          being written; nothing reads it
                  step=000010/{learner/, hf_model/, manifest.json}

A checkpoint counts only with its manifest, which names every file with its size and checksum and is written last,
before the folder is renamed. Sizes are looked at always, checksums before a run goes on from it. Called by `RunFolder`
and the driver; the learners write the files. Never reads a tensor.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import CheckpointError, RunFolderError
from rayapp.core.files import explain_full_disk, put_in_place, remove_pending, write_text
from rayapp.storage.folders import MANIFEST
from rayapp.storage.hashing import SHA256, XXH3, hash_files

log = logging.getLogger(__name__)
REFUSED = "manifest.refused.json"
"""A manifest's name, with why, after its checkpoint was refused: the folder stays until the next save, for people."""
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
    """`checkpoint.best_metric` of the step it was saved after; None where the step has no such metric."""

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
        self._verified: set[Path] = set()

    def whole(self) -> list[Checkpoint]:
        """Every whole checkpoint, oldest first; torn ones are passed over."""
        found = [_read(path) for path in self.path.glob("step=*")]
        return sorted((c for c in found if c is not None), key=lambda c: c.version)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        return max(self.whole(), key=lambda c: c.version, default=None)

    def verified(self) -> Checkpoint | None:
        """The newest whole checkpoint whose files are what was written; each that is passed over is told, with why.

        Blocks: reads every byte of it, once.

        Raises:
            RunFolderError: there are checkpoints, and none of them can be used.
        """
        while (newest := self.latest()) is not None and newest.path not in self._verified:
            found = damage(newest.path)
            if found is None:
                self._verified.add(newest.path)
                self._tell_passed_over(newest)
            else:
                self.refuse(newest, found)
        if newest is None and self._tell_passed_over(None):
            raise RunFolderError(
                f"no checkpoint in {self.path} can be used, and starting anew would delete what the run has recorded. "
                f"Put a whole one there, or choose another run.name, or delete {self.path} to start anew."
            )
        return newest

    def refuse(self, checkpoint: Checkpoint, why: str) -> None:
        """Never go on from this one: it counts as torn from now on, and goes with the next save."""
        manifest = json.loads((checkpoint.path / MANIFEST).read_text())
        write_text(checkpoint.path / REFUSED, json.dumps(manifest | {"refused": why}, indent=1))
        (checkpoint.path / MANIFEST).unlink()

    def _tell_passed_over(self, used: Checkpoint | None) -> bool:
        """One line for each checkpoint that can't be used and is newer than the one that is; true if there was any."""
        torn = [path for path in sorted(self.path.glob("step=*")) if _read(path) is None]
        newer = [path for path in torn if used is None or path.name > used.path.name]
        for path in newer:
            instead = f"; {used.path.name} is used instead" if used is not None else ""
            log.warning("checkpoint %s is refused: %s%s", path, _why_torn(path), instead)
        return bool(newer)

    def what_is_safe(self) -> str:
        """For people: from where the next start goes on."""
        newest = self.latest()
        if newest is None:
            return "There is no whole checkpoint yet: the next start begins anew."
        return f"The last whole checkpoint, {newest.path.name}, is intact: the next start goes on from it."

    def clear_pending(self) -> None:
        """Remove what attempts to save have left behind; nothing may be saved now."""
        remove_pending(self.path)

    def begin(self, version: int) -> Path:
        """An empty folder to write checkpoint `version` into. What earlier attempts left behind is removed."""
        self.clear_pending()
        pending = self._pending(version)
        with explain_full_disk(pending, self.what_is_safe):
            pending.mkdir(parents=True)
        return pending

    def commit(self, version: int, *, next_group_id: int, score: float | None = None) -> Checkpoint:
        """Make the pending folder the newest checkpoint, and drop those that are neither recent nor best."""
        pending, target = self._pending(version), self.path / f"step={version:06d}"
        with explain_full_disk(pending, self.what_is_safe):
            files = sorted(path for path in pending.rglob("*") if path.is_file())
            if not files:
                raise CheckpointError(
                    f"{pending} is empty though the learners have saved: they wrote on another machine. Put the run "
                    "folder (run.output_dir; with s3:// run.staging_dir) on a disk that the driver and the learners "
                    "share."
                )
            names = [path.relative_to(pending).as_posix() for path in files]
            manifest = {
                "version": version,
                "next_group_id": next_group_id,
                "contents": list(self._section.save_contents),
                "score": score,
                "files": {name: (pending / name).stat().st_size for name in names},
                XXH3: hash_files(pending, names),
            }
            write_text(pending / MANIFEST, json.dumps(manifest, indent=1))
            put_in_place(pending, target)  # what is there is torn: a whole one is never written twice
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


def damage(path: Path) -> str | None:
    """What is wrong with the files of a whole checkpoint; None when they are what was written. Reads every byte.

    One of before there were checksums can't be verified, which is told.
    """
    manifest = json.loads((path / MANIFEST).read_text())
    algorithm = next((name for name in (XXH3, SHA256) if name in manifest), None)
    if algorithm is None:
        log.warning("%s was saved without checksums, by an older version: it can't be verified", path)
        return None
    expected = manifest[algorithm]
    try:
        found = hash_files(path, manifest["files"], algorithm)
    except OSError as error:
        return f"it can't be read: {error}"
    wrong = [name for name, digest in found.items() if digest != expected.get(name)]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more} is not what was written, by its checksum" if wrong else None


def _why_torn(path: Path) -> str:
    try:
        if (path / REFUSED).exists():
            return str(json.loads((path / REFUSED).read_text())["refused"])
        files = json.loads((path / MANIFEST).read_text())["files"]
        wrong = [
            f"{name} should have {size} bytes, and {_has(path / name)}"
            for name, size in files.items()
            if _size(path / name) != size
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"its {MANIFEST} can't be read ({type(error).__name__})"
    return wrong[0] if wrong else f"its {MANIFEST} is no manifest"


def _has(path: Path) -> str:
    size = _size(path)
    return "is missing" if size is None else f"has {size}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _read(path: Path) -> Checkpoint | None:
    """None unless every file that the manifest names is there in full."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        whole = all(_size(path / name) == size for name, size in manifest["files"].items())
        return parse_manifest(path, manifest) if whole else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def parse_manifest(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """The checkpoint at `path`, as its manifest describes it. Raises KeyError, TypeError, ValueError: it is none."""
    # Manifests of before save_contents have neither key: they held the model and the optimizer, and no score.
    return Checkpoint(
        version=int(manifest["version"]),
        path=path,
        next_group_id=int(manifest["next_group_id"]),
        contents=tuple(manifest.get("contents", ("model", "optimizer"))),
        score=manifest.get("score"),
    )
