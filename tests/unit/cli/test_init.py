"""`rayapp init`: every file of the project that it writes works as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayapp.cli.main import run


def test_the_project_has_rows_a_reward_and_a_task_that_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "mine"]) == 0
    monkeypatch.chdir("mine")
    assert run(["data", "rows", "data/rows.jsonl", "--out", "data"]) == 0
    assert run(["config", "show", "config.yaml"]) == 0
    assert "name: mine" in capfd.readouterr().out
    assert run(["score", "rewards.py:compute_score", "--data", "data/train.parquet"]) == 0
    (tmp_path / "answer.py").write_text("def double(x):\n    return x + x\n")
    capfd.readouterr()
    assert run(["score", "tasks/double.yaml", str(tmp_path / "answer.py")]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["reward"] == 1.0


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rewards.py").write_text("mine")
    assert run(["init", str(tmp_path)]) == 2
    assert "exists already: nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
