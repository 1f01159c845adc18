"""Groups that a checkpoint kept come back unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, VersionSpan
from rayapp.runs.checkpoints import FOLDER, KeptGroups
from support import make


def group(group_id: int) -> Group:
    spans = (VersionSpan(policy_version=3, num_tokens=1), VersionSpan(policy_version=4, num_tokens=1))
    turn = make.turn(2, 4, text="ab", policy_version=3, started_at_s=1.0, generate_s=0.5, version_spans=spans)
    sampled = make.trajectory(
        [5, 9, 7, 2], 2, reward=0.5, terms={"solved": 0.0}, policy_version=3, max_policy_version=4, turns=(turn,),
        rollout_log_probs=np.array([0, 0, -0.5, -1.5], np.float32),
    )  # fmt: skip
    return make.group(sampled, group_id=group_id)


def test_waiting_groups_come_back_with_the_versions_that_sampled_them(tmp_path: Path) -> None:
    kept = KeptGroups(waiting=(group(4), group(7)), done_ahead=(5, 6))

    kept.write(tmp_path, version=4)
    found = KeptGroups.read(tmp_path)

    assert found.done_ahead == (5, 6)
    assert [g.group_id for g in found.waiting] == [4, 7]
    before, after = kept.waiting[0].trajectories[0], found.waiting[0].trajectories[0]
    assert after.turns == before.turns
    np.testing.assert_array_equal(after.token_ids, before.token_ids)
    np.testing.assert_array_equal(after.rollout_log_probs, before.rollout_log_probs)
    summaries = [summarize_group(each, time_total_s=0.0) for each in found.waiting]
    assert [(s.group_id, s.min_policy_version) for s in summaries] == [(4, 3), (7, 3)]


def test_ids_alone_are_kept_too(tmp_path: Path) -> None:
    KeptGroups(done_ahead=(2,)).write(tmp_path, version=1)
    assert KeptGroups.read(tmp_path) == KeptGroups(done_ahead=(2,))


def test_a_synchronous_run_keeps_nothing_and_writes_nothing(tmp_path: Path) -> None:
    KeptGroups().write(tmp_path, version=1)
    assert not (tmp_path / FOLDER).exists()
    assert KeptGroups.read(tmp_path) == KeptGroups()
