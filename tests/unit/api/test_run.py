"""A run folder as data frames, tables and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayapp
from rayapp.core.errors import InputError
from support.synthetic_run import write_run


@pytest.fixture
def run(tmp_path: Path) -> rayapp.Run:
    write_run(tmp_path / "r", num_trajectories=32, per_step=16)
    return rayapp.open_run(tmp_path / "r")


def test_metrics_are_a_row_for_each_step(run: rayapp.Run) -> None:
    frame = run.metrics

    assert list(frame.index) == [1, 2]
    assert frame["reward/mean"].between(-1, 1).all()


def test_trajectories_of_one_step_and_of_all_are_tables_and_frames(run: rayapp.Run) -> None:
    assert (run.table(1).num_rows, run.table().num_rows) == (16, 32)
    frame = run.trajectories([2])
    assert set(frame["step"]) == {2}
    assert isinstance(frame["reward_terms"][0], dict)
    with pytest.raises(InputError, match=r"no trajectories of the steps 9; recorded steps: 1, 2"):
        run.table(9)
    with pytest.raises(InputError, match="has no evaluations; recorded steps: none"):
        run.table(purpose="eval")


def test_a_plot_is_a_picture_of_what_the_run_has(run: rayapp.Run) -> None:
    figure = run.plot("reward/mean")

    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="none of the metrics nothing/such"):
        run.plot("nothing/such")


def test_a_run_without_checkpoints_or_model_says_so(run: rayapp.Run, tmp_path: Path) -> None:
    assert run.checkpoints == []
    assert run.model is None
    with pytest.raises(InputError, match="is not a run folder"):
        rayapp.open_run(tmp_path / "nowhere")
