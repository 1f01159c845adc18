"""What `make bench` counts as a loss, and the earlier record that it compares with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks.__main__ import BENCHMARKS, HERE, judge
from benchmarks.history import MAX_LOSS, Compared, check, compare, digest, last_record, record_path, table
from benchmarks.report import parse_report


def report(ratios: dict[str, Any], *, commit: str = "a" * 40, cores: int = 2, **settings: Any) -> dict[str, Any]:
    machine = {"commit": commit, "cpu": "some cpu", "cores": cores, "gpu": "", "load_before": 0.1}
    return {"settings": settings, "machine": machine, "ratios": ratios, "seconds": 12.0}


def keep(folder: Path, kept: dict[str, Any], recorded_at: str) -> None:
    folder.mkdir(exist_ok=True)
    record_path(folder, kept).write_text(json.dumps(kept | {"recorded_at": recorded_at}))


@pytest.mark.parametrize(
    ("before", "now", "is_lost"),
    [
        (2.0, 2.0, False),
        (2.0, 1.9, False),  # 5% exactly: the rule says more than that
        (2.0, 1.89, True),
        (2.0, 4.0, False),
        (1e-3, 0.5e-3, True),
        (None, 1.0, False),
        (1.0, None, True),
    ],
)
def test_a_ratio_is_lost_when_more_than_a_twentieth_of_it_is_gone(
    before: float | None, now: float | None, is_lost: bool
) -> None:
    assert MAX_LOSS == 0.05
    assert Compared(name="r", now=now, before=before).is_lost is is_lost


def test_every_ratio_of_either_report_is_compared() -> None:
    found = compare(report({"kept": 1.0, "new": 5.0}), report({"kept": 2.0, "gone": 3.0}))
    assert [(each.name, each.now, each.before) for each in found] == [
        ("kept", 1.0, 2.0),
        ("new", 5.0, None),
        ("gone", None, 3.0),
    ]
    assert [each.name for each in found if each.is_lost] == ["kept", "gone"]
    lines = table(found).splitlines()
    assert "-50.0%  LOST" in lines[0]
    assert lines[1].endswith("new")
    assert "not reported any more" in lines[2]


def test_without_a_record_nothing_is_lost() -> None:
    assert not any(each.is_lost for each in compare(report({"a": 1.0}), None))


def test_the_newest_record_of_the_same_machine_kind_and_settings_is_compared_with(tmp_path: Path) -> None:
    keep(tmp_path, report({"a": 3.0}, commit="3" * 40), "2026-11-20T10:00:00+00:00")
    keep(tmp_path, report({"a": 4.0}, commit="4" * 40), "2026-11-21T10:00:00+00:00")
    keep(tmp_path, report({"a": 5.0}, commit="5" * 40, cores=64), "2026-11-22T10:00:00+00:00")
    keep(tmp_path, report({"a": 6.0}, commit="6" * 40, rounds=9), "2026-11-22T10:00:00+00:00")
    found = last_record(tmp_path, report({"a": 1.0}, commit="7" * 40))
    assert found is not None
    assert found["ratios"] == {"a": 4.0}
    assert last_record(tmp_path, report({"a": 1.0}, cores=8)) is None
    assert last_record(tmp_path / "absent", report({"a": 1.0})) is None


def test_a_record_is_named_after_its_commit_and_what_it_may_be_compared_with() -> None:
    one, other = report({"a": 1.0}, rounds=2), report({"a": 9.0}, rounds=2, commit="b" * 40)
    other["machine"]["load_before"] = 7.0
    assert digest(one) == digest(other), "load, commit and ratios don't make reports incomparable"
    assert record_path(Path("records"), one).name == f"{'a' * 12}-{digest(one)}.json"
    assert digest(one) != digest(report({"a": 1.0}, rounds=3))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"settings": {}, "machine": {}}, "no ratios"),
        (report({}), "no ratio"),
        (report({"a": 0.0}), "positive"),
        (report({"a": float("nan")}), "positive"),
        (report({"a": "1"}), "positive"),
        (report({"a": True}), "positive"),
    ],
)
def test_a_report_that_can_not_be_compared_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(wrong)
    check(report({"a": 1.0}))


def test_the_report_is_found_in_what_libraries_print_beside_it() -> None:
    noise = 'INFO starting\n{"an": "object of a library"}\n'
    printed = noise + json.dumps(report({"a": 1.0}), indent=2) + "\nINFO {done}\n"
    assert parse_report(printed)["ratios"] == {"a": 1.0}
    with pytest.raises(ValueError, match="no JSON object with ratios"):
        parse_report(noise)


def recorded(folder: Path) -> list[float]:
    return [json.loads(path.read_text())["ratios"]["a"] for path in sorted((folder / "driver").glob("*.json"))]


def test_a_loss_fails_and_is_recorded_only_when_it_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, worse = report({"a": 2.0}, commit="a" * 40), report({"a": 1.0}, commit="b" * 40)
    for each in (first, worse):
        each["machine"]["uncommitted"] = False
    assert judge("driver", first, accept=False, records=tmp_path)
    assert recorded(tmp_path) == [2.0]
    # Twice: if a loss were recorded, the second call would compare with it and pass.
    for _ in range(2):
        assert not judge("driver", worse, accept=False, records=tmp_path)
        assert "a lost more than 5%" in capsys.readouterr().out
    assert recorded(tmp_path) == [2.0]
    assert judge("driver", worse, accept=True, records=tmp_path)
    assert recorded(tmp_path) == [2.0, 1.0]


def test_a_lost_ratio_is_measured_once_more_and_the_better_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "driver", report({"a": 2.0, "b": 1.0}), "2026-11-01")
    measured = [report({"a": 1.0, "b": 1.0}), report({"a": 1.98, "b": 0.9})]
    monkeypatch.setattr(runner, "run", lambda name, arguments: measured.pop(0))

    assert runner.measure("driver", [], tmp_path)["ratios"] == {"a": 1.98, "b": 1.0}
    assert not measured

    measured += [report({"a": 2.0, "b": 1.0}), report({"a": 9.0, "b": 9.0})]
    assert runner.measure("driver", [], tmp_path)["ratios"] == {"a": 2.0, "b": 1.0}


def test_what_was_measured_with_uncommitted_changes_is_compared_but_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = report({"a": 2.0})
    changed["machine"]["uncommitted"] = True
    assert judge("driver", changed, accept=False, records=tmp_path)
    assert "uncommitted changes" in capsys.readouterr().out
    assert not (tmp_path / "driver").exists()


def test_every_recorded_benchmark_is_a_file_that_makes_a_report() -> None:
    for name in BENCHMARKS:
        assert '"ratios"' in (text := (HERE / f"{name}.py").read_text()) or "print_report(" in text, name
