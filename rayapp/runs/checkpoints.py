"""The checkpoints of one run: written under a temporary name, renamed when complete, deleted by age and score.

A checkpoint counts only with its manifest, which names every file with size and checksum and is written last. Sizes are
always checked, checksums before a run resumes. `groups/` (asynchronous runs) holds finished groups that wait for
training, and ids of groups that were trained early.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import CheckpointError, InputError, RunFolderError
from rayapp.core.files import explain_full_disk, put_in_place, remove_pending, write_text
from rayapp.core.types import Group
from rayapp.runs.layout import step_name, steps_in
from rayapp.runs.trajectories import read_groups, write_trajectories
from rayapp.storage.base import XXH3, hash_files
from rayapp.storage.folders import MANIFEST

log = logging.getLogger(__name__)
# Manifest of a refused checkpoint, with the reason; the folder stays until the next save, for inspection.
REFUSED = "manifest.refused.json"
RESUMABLE = frozenset({"model", "optimizer"})  # that a run needs to resume exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    version: int  # optimizer steps done
    path: Path
    next_group_id: int  # that a resumed run generates
    contents: tuple[str, ...] = ("model", "optimizer")  # `checkpoint.save_contents` of the run that wrote it
    score: float | None = None  # mean reward of the evaluation, or of the step, that it was saved after

    @property
    def is_resumable(self) -> bool:
        return frozenset(self.contents) >= RESUMABLE


class CheckpointFolder:
    """`checkpoints/` of a run, with one writer. `in_use` is True for a checkpoint that must not be deleted now."""

    def __init__(
        self,
        path: Path,
        section: CheckpointSection,
        *,
        in_use: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        self.path = path
        self._section = section
        self._in_use = in_use
        self._verified: set[Path] = set()

    def whole(self) -> list[Checkpoint]:
        found = [_read(path) for path in steps_in(self.path)]
        return sorted((c for c in found if c is not None), key=lambda c: c.version)

    def latest(self) -> Checkpoint | None:
        return max(self.whole(), key=lambda c: c.version, default=None)

    def verified(self) -> Checkpoint | None:
        """Return the newest complete checkpoint with intact files; log each skipped one with the reason. Reads every
        byte once. RunFolderError: there are checkpoints, and none is usable."""
        while (newest := self.latest()) is not None and newest.path not in self._verified:
            found = damage(newest.path)
            if found is None:
                self._verified.add(newest.path)
                self._tell_passed_over(newest)
            else:
                self.refuse(newest.path, found)
        if newest is None and self._tell_passed_over(None):
            raise RunFolderError(
                f"no checkpoint in {self.path} can be used, and starting over would delete what the run has recorded. "
                f"Put a complete checkpoint there, choose another run.name, or delete {self.path} to start over."
            )
        return newest

    def refuse(self, path: Path, why: str) -> None:
        """Mark the checkpoint at `path` as unusable: no run resumes from it, and the next save deletes it."""
        self._verified.discard(path)
        with suppress(FileNotFoundError):  # the uploading thread has already refused it
            manifest = json.loads((path / MANIFEST).read_text())
            write_text(path / REFUSED, json.dumps(manifest | {"refused": why}, indent=1))
            (path / MANIFEST).unlink()

    def _tell_passed_over(self, used: Checkpoint | None) -> bool:
        torn = [path for path in steps_in(self.path) if _read(path) is None]
        newer = [path for path in torn if used is None or path.name > used.path.name]
        for path in newer:
            instead = f"; {used.path.name} is used instead" if used is not None else ""
            log.warning("checkpoint %s is refused: %s%s", path, why_torn(path), instead)
        return bool(newer)

    def what_is_safe(self) -> str:
        newest = self.latest()
        if newest is None:
            return "There is no complete checkpoint yet: the next run starts over."
        return f"The next start continues from the last complete checkpoint, {newest.path.name}, which is intact."

    def clear_pending(self) -> None:
        """Remove leftovers of earlier attempts to save. Call it only while no save is running."""
        remove_pending(self.path)

    def begin(self, version: int) -> Path:
        self.clear_pending()
        pending = self._pending(version)
        with explain_full_disk(pending, self.what_is_safe):
            pending.mkdir(parents=True)
        return pending

    def commit(self, version: int, *, next_group_id: int, score: float | None = None) -> Checkpoint:
        """Make the pending folder the newest checkpoint, and delete those neither among the newest nor the best."""
        pending, target = self._pending(version), self.path / step_name(version)
        with explain_full_disk(pending, self.what_is_safe):
            files = sorted(path for path in pending.rglob("*") if path.is_file())
            if not files:
                raise CheckpointError(
                    f"{pending} is empty although the learners have saved: they wrote on another machine. Put the run "
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
            put_in_place(pending, target)  # an existing folder is incomplete: complete checkpoints are never rewritten
        self._prune()
        checkpoint = _read(target)
        assert checkpoint is not None, f"{target} is incomplete immediately after it was committed"
        return checkpoint

    def _pending(self, version: int) -> Path:
        return self.path / f".pending-{version:06d}"

    def _prune(self) -> None:
        kept = {c.path for c in to_keep(self.whole(), self._section.keep_last, self._section.keep_best)}
        for folder in steps_in(self.path):
            if folder not in kept and not self._in_use(folder):
                _remove(folder)


def to_keep(checkpoints: Sequence[Checkpoint], keep_last: int, keep_best: int) -> list[Checkpoint]:
    """Return the newest `keep_last` and the `keep_best` with the highest scores (of equals the older), oldest first.

    Example: scores of versions 2, 4, 6, 8 are 0.1, 0.9, 0.3, 0.2; keep_last 1 and keep_best 1 -> versions 4 and 8.
    """
    in_order = sorted(checkpoints, key=lambda c: c.version)
    scored = [(c.score, -c.version, c) for c in in_order if c.score is not None]
    best = [c for _, _, c in sorted(scored, key=lambda entry: entry[:2], reverse=True)[:keep_best]]
    kept = {c.version for c in (*in_order[len(in_order) - keep_last if keep_last < len(in_order) else 0 :], *best)}
    return [c for c in in_order if c.version in kept]


def _remove(folder: Path) -> None:
    """Delete the manifest first, so that a kill in between leaves nothing that looks complete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def damage(path: Path) -> str | None:
    """Return how a complete checkpoint's files differ from the manifest; None if they don't. Reads every byte."""
    manifest = json.loads((path / MANIFEST).read_text())
    expected = manifest[XXH3]
    try:
        found = hash_files(path, manifest["files"])
    except OSError as error:
        return f"it can't be read: {error}"
    wrong = [name for name, digest in found.items() if digest != expected.get(name)]
    more = f" (and {len(wrong) - 1} other files)" if len(wrong) > 1 else ""
    return f"the checksum of {wrong[0]}{more} is wrong" if wrong else None


def why_torn(path: Path) -> str:
    """Return why a checkpoint is not complete, as a clause about its files."""
    try:
        if (path / REFUSED).exists():
            return str(json.loads((path / REFUSED).read_text())["refused"])
        files = json.loads((path / MANIFEST).read_text())["files"]
        wrong = [
            f"{name} should have {size} bytes, but {_has(path / name)}"
            for name, size in files.items()
            if _size(path / name) != size
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"its {MANIFEST} can't be read ({type(error).__name__})"
    return wrong[0] if wrong else f"its {MANIFEST} is not a manifest"


def _has(path: Path) -> str:
    size = _size(path)
    return "is missing" if size is None else f"has {size}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint; None unless every file in the manifest is there with its size."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        whole = all(_size(path / name) == size for name, size in manifest["files"].items())
        return parse_manifest(path, manifest) if whole else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def parse_manifest(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Build the checkpoint at `path` from its manifest. KeyError, TypeError, ValueError: it is not a manifest."""
    if not isinstance(manifest[XXH3], dict):
        raise TypeError(f"{path / MANIFEST} has no checksums")
    return Checkpoint(
        version=int(manifest["version"]),
        path=path,
        next_group_id=int(manifest["next_group_id"]),
        contents=tuple(manifest["contents"]),
        score=manifest["score"],
    )


FOLDER, WAITING, AHEAD = "groups", "waiting.parquet", "ahead.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroups:
    waiting: tuple[Group, ...] = ()
    done_ahead: tuple[int, ...] = ()  # trained or dropped although a group with a lower id is not trained yet

    def write(self, checkpoint: Path, version: int) -> None:
        if not self.waiting and not self.done_ahead:
            return
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_trajectories(folder / WAITING, version, self.waiting)
        write_text(folder / AHEAD, json.dumps(list(self.done_ahead)))

    @classmethod
    def read(cls, checkpoint: Path) -> KeptGroups:
        folder = checkpoint / FOLDER
        if not folder.exists():
            return cls()
        try:
            ahead: list[int] = json.loads((folder / AHEAD).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / AHEAD} can't be read: {error}. The checkpoint is damaged.") from None
        return cls(waiting=tuple(read_groups(folder / WAITING)), done_ahead=tuple(ahead))
