"""`rayapp models check` reports which checks a family passes."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from rayapp.cli.main import run

pytestmark = pytest.mark.slow


def test_models_check_says_what_holds_of_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "check", "gpt_oss", "--no-engine"]) == 0
    lines = [re.split(r" +", line, maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["gpt_oss", "ok", what] for what in ("learner", "adapters", "final/")]
    assert re.match(r"log-probs differ by \S+, gradients by \S+ of the largest; packed with shared pre", lines[0][3])


def test_models_check_gives_the_reason_of_one_that_can_not_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "check", "bloom", "--no-engine"]) == 1
    assert "its attention adds a bias by distance" in capsys.readouterr().out


def test_what_was_not_tried_again_stays_in_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, engine = tmp_path / "models.json", {"holds": True, "detail": "as before", "date": "2026-01-01"}
    file.write_text(json.dumps({"olmo": {"engine": engine, "learner": {"holds": False}}}))
    assert run(["models", "check", "bloom", "olmo", "--no-engine", "--record", str(file)]) == 1
    record = json.loads(file.read_text())
    assert list(record) == ["bloom", "olmo"]
    assert record["olmo"]["engine"] == engine
    assert record["olmo"]["learner"]["holds"]
    assert record["olmo"]["learner"]["date"] == f"{datetime.now(UTC).date()}"
    assert f"transformers {version('transformers')}, torch" in record["olmo"]["learner"]["with"]
    assert not record["bloom"]["learner"]["holds"]


def test_models_check_knows_no_such_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "check", "lama"]) == 1
    assert "'lama' is neither a model folder nor a known family: bamba, " in capsys.readouterr().out
