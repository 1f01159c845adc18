"""`rayapp data from-run`: what a run did well, as demonstrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayapp.cli.main import run as rayapp
from rayapp.core.errors import InputError
from rayapp.core.types import Fork, Group, Reward, Trajectory
from rayapp.rollout.demonstrations import _of_tokens
from rayapp.runs.trajectories import Selection, select_from_run, write_trajectories
from support import make


def group(group_id: int, prompt: str, *rewards: float) -> Group:
    rows = (make.trajectory([5, 6, 10 * group_id + i], 2, reward=reward) for i, reward in enumerate(rewards))
    return make.group(*rows, group_id=group_id, text=prompt)


def failed(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, reward=Reward.invalid("sandbox_gone", "it died"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    first, second = group(0, "a", 1.0, 0.5, 1.0), group(1, "b", 0.2, 1.0)
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    write_trajectories(folder / "step=000001.parquet", 1, [first, second])
    again = replace(first, trajectories=(first.trajectories[0], failed(group(7, "a", 1.0).trajectories[0])))
    write_trajectories(folder / "step=000002.parquet", 2, [again])
    return tmp_path / "run"


def test_only_good_trajectories_are_taken_each_once_and_none_that_failed(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "best.parquet"
    count = select_from_run(run, out, Selection(min_reward=1.0))
    assert (count.num_read, count.num_written, count.num_repeated) == (7, 3, 1)
    rows = pq.read_table(out).to_pylist()
    assert [row["token_ids"] for row in rows] == [[5, 6, 0], [5, 6, 2], [5, 6, 11]]
    assert all(row["response_mask"] == [False, False, True] for row in rows)


def test_a_rollout_that_forks_is_learned_from_as_the_tree_that_it_is(tmp_path: Path) -> None:
    first = group(0, "a", 1.0)
    tree = replace(first.trajectories[0], forks=(Fork(start=2, after=0),))
    folder = tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    write_trajectories(folder / "step=000001.parquet", 1, [replace(first, trajectories=(tree,))])
    out = tmp_path / "best.parquet"
    select_from_run(tmp_path / "run", out, Selection(min_reward=1.0))

    (row,) = pq.read_table(out).to_pylist()
    vocabulary = range(1000)
    assert _of_tokens(row, vocabulary).forks == (Fork(start=2, after=0),)
    start_rule, after_rule = r"each `start` must be from 1 to 2, and greater than", "each `after` must be less than"
    for wrong, rule in (
        ({"start": 3, "after": 0}, start_rule),
        ({"start": 1, "after": 1}, after_rule),
        ({"start": 0, "after": -1}, start_rule),
    ):
        with pytest.raises(ValueError, match=rule):
            _of_tokens(row | {"forks": [wrong]}, vocabulary)


def test_the_command_says_how_many_it_took(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rayapp(["data", "from-run", str(run), "--min-reward", "1", "--out", str(tmp_path / "best.parquet")]) == 0
    assert "3 of 7 trajectories with a reward of 1 or more, 1 repeated ones left out" in capsys.readouterr().out


def test_a_prompt_may_be_held_to_so_many_and_steps_to_a_range(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.parquet"
    assert select_from_run(run, out, Selection(min_reward=0.0, max_per_prompt=1)).num_written == 2
    assert select_from_run(run, out, Selection(min_reward=1.0, first_step=2)).num_written == 1


def test_when_nothing_is_good_enough_no_file_is_left(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "best.parquet"
    with pytest.raises(InputError, match=r"none of the 7 trajectories .* a reward of 2 or more. Lower --min-reward"):
        select_from_run(run, out, Selection(min_reward=2.0))
    assert not list(tmp_path.glob("*best*"))
    with pytest.raises(InputError, match="has no recorded steps"):
        select_from_run(tmp_path, out, Selection(min_reward=1.0))
