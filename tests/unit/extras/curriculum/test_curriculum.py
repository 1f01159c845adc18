"""The curriculum prefers prompts that teach, and a resumed run draws the same prompts as one that never stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.config.config import Config
from rayapp.core.errors import CheckpointError
from rayapp.core.types import Group, GroupSummary
from rayapp.driver.loop import begin_checkpoint
from rayapp.driver.saving import CheckpointSaver
from rayapp.driver.store import TrajectoryStore
from rayapp.extras.curriculum.curriculum import FILE, Curriculum
from rayapp.rollout.order import GroupRequest, prompt_index
from rayapp.runs.folder import RunFolder
from support import make

NUM_PROMPTS = 6
SOLVED_BY = (0.0, 0.1, 0.5, 0.5, 0.9, 1.0)
"""Chance that one of its 16 trajectories is solved, by prompt."""


def curriculum(counts: dict[str, tuple[float, float]] | None = None, seed: int = 3) -> Curriculum:
    return Curriculum(num_prompts=NUM_PROMPTS, seed=seed, min_weight=0.1, counts=counts)


def never(group_id: int) -> bool:
    """Return False: a synchronous run generates again what finished since its last step."""
    return False


def summary(
    solved: list[float], *, group_id: int = 0, valid: list[bool] | None = None, has_term: bool = True
) -> GroupSummary:
    given = np.array(valid if valid is not None else [True] * len(solved))
    if not has_term:
        return make.summary(solved, valid=given, group_id=group_id)
    terms = {"solved": np.array(solved, np.float32)}
    return make.summary([0.0] * len(solved), valid=given, reward_terms=terms, group_id=group_id)


def play(history: Curriculum, steps: range, *, groups_per_step: int = 2, backwards: bool = False) -> list[int]:
    """Draw and finish the groups of these steps; a group's result follows from its id, as sampling's seeds do."""
    drawn = []
    for step in steps:
        ids = list(range(step * groups_per_step, (step + 1) * groups_per_step))
        places = {group_id: history.draw(group_id) for group_id in ids}
        drawn += [places[group_id] for group_id in ids]
        for group_id in reversed(ids) if backwards else ids:
            draws = np.random.default_rng(group_id).random(16)
            solved = (draws < SOLVED_BY[places[group_id]]).astype(float)
            history.record(places[group_id], summary(solved.tolist(), group_id=group_id))
        history.end_step()
    return drawn


def test_weights_are_those_of_the_formula() -> None:
    found = curriculum({"0": (16, 0), "1": (16, 16), "2": (16, 8), "3": (160, 0)}).weights()
    # One solved and one failed more: shares 1/18, 17/18, 9/18 and 1/162; 4 p (1 - p) = 0.2099, 0.2099, 1, 0.0245.
    np.testing.assert_allclose(found, [0.2099, 0.2099, 1.0, 0.1, 1.0, 1.0], atol=1e-4)


def test_prompts_that_are_sometimes_solved_come_more_often() -> None:
    drawn = np.bincount(play(curriculum(), range(600)), minlength=NUM_PROMPTS)
    # In the end the weights are 0.1, 0.36, 1, 1, 0.36, 0.1 of 2.92: 41 and 411 of 1200 groups.
    assert drawn[[2, 3]].min() > 3 * drawn[[0, 5]].max()
    assert drawn[[0, 5]].min() > 10
    assert drawn[[1, 4]].min() > drawn[[0, 5]].max()


@settings(deadline=None, max_examples=20)
@given(stop=st.integers(0, 12), seed=st.integers(0, 100), backwards=st.booleans())
def test_a_resumed_run_draws_what_one_that_never_stopped_draws(stop: int, seed: int, *, backwards: bool) -> None:
    expected = play(curriculum(seed=seed), range(12))
    first = curriculum(seed=seed)
    found = play(first, range(stop), backwards=backwards)
    first.draw(999)  # groups of a step that was lost leave nothing behind ...
    counts = json.loads(first.state(never)[FILE])["counts"]
    first.record(0, summary([1.0]))  # ... nor do results of groups that are generated again
    assert json.loads(first.state(never)[FILE]) == {"num_prompts": NUM_PROMPTS, "counts": counts, "results": []}
    found += play(curriculum({place: tuple(each) for place, each in counts.items()}, seed), range(stop, 12))  # type: ignore[misc]
    assert found == expected
    assert play(curriculum(seed=seed + 1), range(12)) != expected


async def test_groups_that_a_checkpoint_keeps_are_counted_once_by_the_run_that_goes_on(tmp_path: Path) -> None:
    history, config = curriculum(), Config.model_validate({"run": {"output_dir": str(tmp_path), "name": "r"}})
    store: TrajectoryStore[object] = TrajectoryStore(groups_per_step=2, max_staleness=1, version=0, num_groups=8)
    ids, _ = await store.reserve()
    assert ids == [0, 1, 2, 3]
    for group_id in (0, 1, 2):  # group 2 waits for the next step; group 3 is still being generated
        result = summary([1.0, 0.0], group_id=group_id)
        history.record(group_id, result)
        await store.finish(result, group_id)
        if group_id == 1:
            await store.take(2)
            history.end_step()
            await store.release(1)
    history.record(3, summary([1.0, 1.0], group_id=3))  # on its way into the store: it is generated again

    async def fetch(groups: Sequence[Any]) -> list[Group]:
        return []

    with RunFolder.open(config) as folder:
        cluster = SimpleNamespace(is_synchronous=False, fetch_groups=fetch)
        saver = CheckpointSaver(Learners(), folder, asynchronous=False)
        run: Any = SimpleNamespace(store=store, cluster=cluster, curriculum=history, saver=saver)
        await begin_checkpoint(run, 1)
        checkpoint = folder.checkpoints.latest()
    assert checkpoint is not None
    resumed = Curriculum.open(config, [NUM_PROMPTS], checkpoint.path)
    resumed.end_step()
    assert json.loads(resumed.state(never)[FILE])["counts"] == {place: [2.0, 1.0] for place in "012"}


def test_a_reward_stands_in_for_the_term_and_what_is_not_valid_is_left_out() -> None:
    history = curriculum()
    history.record(1, summary([2.0, 0.25, 1.0, -1.0], valid=[True, True, False, True], has_term=False))
    history.end_step()
    # Cut to [0, 1]: 1 + 0.25 + 0 of three.
    assert json.loads(history.state(never)[FILE])["counts"] == {"1": [3.0, 1.25]}
    assert history.metrics()["curriculum/tried"] == pytest.approx(1 / NUM_PROMPTS)


def test_a_request_without_a_curriculum_goes_by_its_id_and_one_with_it_by_the_prompt() -> None:
    assert GroupRequest(group_id=9, policy_version=0).place == 9
    drawn = GroupRequest(group_id=9, policy_version=0, prompt=2)
    assert drawn.place == 2
    assert {prompt_index(place, num_prompts=NUM_PROMPTS, seed=0) for place in range(NUM_PROMPTS)} == set(range(6))


class Learners:
    """Writes at once."""

    def holds(self, version: int) -> bool:
        return True

    async def begin_checkpoint(self, folder: Path, version: int) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(version))

    async def checkpoint_done(self) -> bool:
        return True


async def test_its_counts_are_in_the_checkpoint(tmp_path: Path) -> None:
    sections = {"run": {"output_dir": str(tmp_path), "name": "r"}, "algorithm": {"curriculum": {"enabled": True}}}
    config = Config.model_validate(sections)
    history = Curriculum.open(config, [NUM_PROMPTS], None)
    play(history, range(5))
    with RunFolder.open(config) as folder:
        await CheckpointSaver(Learners(), folder, asynchronous=False).begin(
            5, next_group_id=10, files=history.state(never)
        )
        checkpoint = folder.checkpoints.latest()

    assert checkpoint is not None
    resumed = Curriculum.open(config, [NUM_PROMPTS], checkpoint.path)
    assert play(resumed, range(5, 9)) == play(history, range(5, 9))
    with pytest.raises(CheckpointError, match="over 6 prompts or sources, but this run has 7"):
        Curriculum.open(config, [7], checkpoint.path)
    (checkpoint.path / FILE).unlink()
    with pytest.raises(CheckpointError, match="was saved without a curriculum"):
        Curriculum.open(config, [NUM_PROMPTS], checkpoint.path)
