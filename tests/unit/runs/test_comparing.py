"""`rayapp list` and `rayapp compare`: runs side by side, seeds of one configuration together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayapp.cli.main import run as run_command
from rayapp.runs.compare import differences, line_of, read_run, sets_of

HOSTILE = "<script>alert(1)</script>"


def write(folder: Path, *, lr: float, seed: int, rewards: list[float], cost: float = 0.0) -> str:
    folder.mkdir(parents=True)
    steps = [{"step": i, "time": 1.8e9, "reward/mean": value} for i, value in enumerate(rewards, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (folder / "config.yaml").write_text(
        f"run: {{name: {folder.name}, seed: {seed}}}\nlearner: {{optimizer: {{lr: {lr}}}}}\n"
        f"train: {{num_steps: {len(rewards)}}}\nbudget: {{currency: EUR}}\n"
    )
    if cost:
        (folder / "costs.json").write_text(json.dumps({"gpu": cost, "judges": 0.5}))
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        write(tmp_path / "slow0", lr=1e-6, seed=0, rewards=[0.0, 0.2], cost=2.0),
        write(tmp_path / "slow1", lr=1e-6, seed=1, rewards=[0.2, 0.6, 0.8]),
        write(tmp_path / HOSTILE.replace("/", "_"), lr=3e-6, seed=0, rewards=[0.5, 1.0]),
    ]


def test_the_list_has_each_run_with_its_state_and_cost(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["list", str(tmp_path)]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}

    assert lines["run"] == ["state", "step", "reward", "solved", "cost"]
    assert lines["slow0"] == ["finished", "2/2", "0.2", "-", "2.50", "EUR"]
    assert lines["slow1"] == ["finished", "3/3", "0.8", "-", "-"]


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(runs: list[str], tmp_path: Path) -> None:
    same_steps = write(tmp_path / "slow2", lr=1e-6, seed=2, rewards=[0.4, 1.0])
    first, other = sets_of([read_run(run) for run in (runs[0], same_steps, runs[2])])

    assert [run.name for run in first.runs] == ["slow0", "slow2"]
    line = line_of(first, "reward/mean")
    assert (line.steps, line.low, line.high) == ([1, 2], [0.0, 0.2], [0.4, 1.0])
    assert line.mean == pytest.approx([0.2, 0.6])
    assert differences([first, other]) == [("learner.optimizer.lr", ["1e-06", "3e-06"])]


def test_the_comparison_is_a_table_and_a_page_that_runs_nothing(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["compare", *runs, "--out", str(tmp_path / "out")]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "out" / "comparison.html").read_text()

    rows = [line.split() for line in said.splitlines()]
    assert ["learner.optimizer.lr", "1e-06", "1e-06", "3e-06"] in rows
    assert ["train.num_steps", "2", "3", "2"] in rows
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert 'alt="reward/mean over optimizer steps"' in page
    assert page.count("data:image/png;base64,") == 1


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["compare", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
