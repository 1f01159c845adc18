"""What `make bench` counts as a loss, and the earlier record that it compares with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, HERE, judge
from benchmarks.history import Compared, last_record, record_path


def report(ratios: dict[str, Any], *, commit: str, cores: int = 2, **settings: Any) -> dict[str, Any]:
    machine = {
        "commit": commit * 40,
        "cpu": "some cpu",
        "cores": cores,
        "gpu": "",
        "load_before": 0.1,
        "uncommitted": False,
    }
    return {"settings": settings, "machine": machine, "ratios": ratios, "seconds": 12.0}


def test_a_loss_of_more_than_a_twentieth_fails_and_is_recorded_only_when_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [(2.0, 1.9, False), (2.0, 1.89, True), (2.0, 4.0, False), (None, 1.0, False), (1.0, None, True)]
    found = [Compared(name="r", before=before, now=now).is_lost for before, now, _ in cases]
    assert found == [is_lost for _, _, is_lost in cases]

    first, worse = report({"a": 2.0}, commit="a"), report({"a": 1.0}, commit="b")
    assert judge("driver", first, accept=False, records=tmp_path)
    # Twice: if a loss were recorded, the second call would compare with it and pass.
    for _ in range(2):
        assert not judge("driver", worse, accept=False, records=tmp_path)
        assert "a lost more than 5%" in capsys.readouterr().out
    assert judge("driver", worse, accept=True, records=tmp_path)
    kept = [json.loads(path.read_text())["ratios"]["a"] for path in sorted((tmp_path / "driver").glob("*.json"))]
    assert kept == [2.0, 1.0]


def test_the_newest_record_of_the_same_machine_kind_and_settings_is_compared_with(tmp_path: Path) -> None:
    kept = [
        report({"a": 3.0}, commit="3"),
        report({"a": 4.0}, commit="4"),
        report({"a": 5.0}, commit="5", cores=64),
        report({"a": 6.0}, commit="6", rounds=9),
    ]
    for day, each in enumerate(kept):
        record_path(tmp_path, each).write_text(json.dumps(each | {"recorded_at": f"2026-11-2{day}"}))

    found = last_record(tmp_path, report({"a": 1.0}, commit="7"))

    assert found is not None
    assert found["ratios"] == {"a": 4.0}
    assert last_record(tmp_path, report({"a": 1.0}, commit="7", cores=8)) is None


def test_every_recorded_benchmark_is_a_file_that_makes_a_report() -> None:
    for name in BENCHMARKS:
        assert '"ratios"' in (text := (HERE / f"{name}.py").read_text()) or "print_report(" in text, name
