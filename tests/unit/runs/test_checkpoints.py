"""A save that is interrupted anywhere leaves a complete checkpoint, and pruning keeps the configured ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config.config import Config
from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import RunFolderError
from rayapp.runs.checkpoints import Checkpoint, CheckpointFolder, to_keep
from rayapp.runs.folder import RunFolder
from rayapp.storage.folders import MANIFEST

FILE_EVENTS = ("open", "os.", "shutil.", "pathlib.")
KILLED, FINISHED = 9, 0


def save(folder: CheckpointFolder, version: int, score: float | None = None) -> Path:
    """A checkpoint whose files contain their version."""
    pending = folder.begin(version)
    (pending / "learner").mkdir()
    for name in ("a", "b"):
        (pending / "learner" / name).write_text(f"{name} of {version} " * version)
    return folder.commit(version, next_group_id=2 * version, score=score).path


def content_of(checkpoint: Checkpoint) -> list[str]:
    return [(checkpoint.path / "learner" / name).read_text() for name in ("a", "b")]


def killed_at(event_number: int, work: Callable[[], object]) -> int:
    """Run `work` in a child that dies, without a chance to clean up, at its `event_number`-th touch of a file."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    seen = 0

    def count(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(FILE_EVENTS):
            seen += 1
            if seen == event_number:
                os._exit(KILLED)

    try:
        sys.addaudithook(count)
        work()
        os._exit(FINISHED)
    finally:
        os._exit(3)


def kill_a_save_at_every_touch(root: Path, *, has_torn_one: bool) -> list[int]:
    """Kill a save at every touch of a file. Returns the exit codes; the last save finishes. Raises AssertionError if
    one left less than it may."""
    exit_codes: list[int] = []
    for number in range(1, 400):
        folder = CheckpointFolder(root / str(number), CheckpointSection(keep_last=1))
        save(folder, 1)
        if has_torn_one:  # as if an earlier attempt at version 2 had lost a file
            torn = folder.path / "step=000002"
            (torn / "learner").mkdir(parents=True)
            (torn / MANIFEST).write_text('{"version": 2, "next_group_id": 4, "files": {"learner/a": 3}}')

        exit_codes.append(killed_at(number, lambda folder=folder: save(folder, 2)))  # type: ignore[misc]

        found = folder.latest()
        assert found is not None, f"killed at event {number}: no checkpoint is left"
        texts = content_of(found)
        assert texts == [f"{name} of {found.version} " * found.version for name in ("a", "b")], f"{number}: {texts}"
        assert found.next_group_id == 2 * found.version
        save(folder, 3)  # leftovers do not stand in the way
        assert [c.version for c in folder.whole()] == [3]
        assert sorted(path.name for path in folder.path.iterdir()) == ["step=000003"]
        if exit_codes[-1] == FINISHED:
            break
    return exit_codes


@pytest.mark.parametrize("has_torn_one", [False, True])
def test_a_save_killed_at_any_touch_of_a_file_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, *, has_torn_one: bool
) -> None:
    # This file in a process of its own. Here it would fork what other tests have left behind, torch's and Ray's threads
    # too, and a child whose collector then met their objects once died of SIGSEGV, not of the save.
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), *(["torn"] if has_torn_one else [])],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )

    assert done.returncode == 0, done.stderr
    exit_codes = json.loads(done.stdout)
    assert exit_codes[-1] == FINISHED
    # Two files to write, to sync and to read back, a manifest, two renames and a folder to remove: far more than 15.
    assert len(exit_codes) > 15
    assert set(exit_codes[:-1]) == {KILLED}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, CheckpointSection(keep_last=1, keep_best=1))
    for version, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.3)):
        save(folder, version, score)
    # 2 is the best; 3 has no score; 4 is the newest.
    assert [(c.version, c.score) for c in folder.whole()] == [(2, 0.9), (4, 0.3)]


def test_a_torn_checkpoint_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, CheckpointSection(keep_last=2))
    save(folder, 1)
    (save(folder, 2) / "learner" / "b").unlink()
    save(folder, 3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step=000001", "step=000003"]


scores = st.lists(st.none() | st.floats(-1.0, 1.0), min_size=1, max_size=12)


@given(scores=scores, keep_last=st.integers(1, 4), keep_best=st.integers(0, 4))
def test_what_is_kept_is_the_newest_and_the_best_and_nothing_else(
    scores: list[float | None], keep_last: int, keep_best: int
) -> None:
    checkpoints = [Checkpoint(version=v, path=Path(str(v)), next_group_id=0, score=s) for v, s in enumerate(scores)]
    kept = to_keep(checkpoints, keep_last, keep_best)
    assert checkpoints[-keep_last:] == [c for c in kept if c in checkpoints[-keep_last:]]
    others = [c for c in checkpoints if c not in kept and c.score is not None]
    best = sorted((c.score for c in kept if c.score is not None), reverse=True)[:keep_best]
    assert len(best) == min(keep_best, sum(s is not None for s in scores))
    assert all(c.score <= min(best) for c in others if best and c.score is not None)
    assert len(kept) <= keep_last + keep_best


def test_a_checkpoint_without_an_optimizer_is_not_resumed_from(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"run": {"output_dir": str(tmp_path), "name": "r"}, "checkpoint": {"save_contents": ["hf_model"]}}
    )
    with RunFolder.open(config) as opened:
        save(opened.checkpoints, 1)
    with pytest.raises(RunFolderError, match="holds only hf_model"), RunFolder.open(config):
        pass


if __name__ == "__main__":
    print(json.dumps(kill_a_save_at_every_touch(Path(sys.argv[1]), has_torn_one="torn" in sys.argv[2:])))
