"""`rayapp report`: one self-contained file with the run's numbers, in which no model's text is executed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rayapp.cli.main import run as run_command
from rayapp.core.errors import InputError
from rayapp.runs.trajectories import write_trajectories
from rayapp.runs.view.curves import MEANINGS
from rayapp.runs.view.report import headlines, settings, write_report
from support.runs import HOSTILE_TEXTS, hostile_group


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    write_trajectories(folder / "trajectories" / "step=000001.parquet", 1, [hostile_group(0)])
    steps = [{"step": step, "time": 1.8e9, "reward/mean": step / 20, "learner/entropy": 1.0} for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (folder / "config.yaml").write_text("train: {num_steps: 20}\ntasks: [a, b]\nmodel: {path: m<b>}\n")
    return folder


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_report_needs_nothing_else_and_runs_nothing(run: Path) -> None:
    page = Tags(write_report(str(run), None).page.read_text())

    assert not {"script", "svg", "a", "iframe", "link"} & {tag for tag, _ in page.tags}
    sources = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == 2  # the panels that have data: reward and entropy
    assert all(source and source.startswith("data:image/png;base64,") for source in sources)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert any(HOSTILE_TEXTS[-1][:40] in text for text in page.texts)  # the best completion, as text
    assert MEANINGS["Entropy"] in page.texts  # each curve with what it means


def test_plots_are_whole_png_files_beside_it(run: Path) -> None:
    written = write_report(str(run), None)

    assert sorted(path.name for path in written.plots) == ["entropy.png", "reward.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.plots)
    assert sorted(path.name for path in written.page.parent.iterdir()) == ["entropy.png", "report.html", "reward.png"]


def test_headlines_are_means_of_the_first_and_the_last_tenth() -> None:
    records = [{"step": step, "reward/mean": float(step)} for step in range(1, 21)]

    assert headlines(records) == [{"name": "reward", "first": 1.5, "last": 19.5}]  # (1 + 2) / 2 and (19 + 20) / 2


def test_settings_are_those_that_the_run_has() -> None:
    assert settings({"tasks": ["a", "b"], "train": {"num_steps": 5}}) == [("tasks", "a, b"), ("train.num_steps", 5)]


def test_a_run_without_a_step_has_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")

    with pytest.raises(InputError, match="nothing to report"):
        write_report(str(tmp_path), None)


def test_the_command_says_where_the_report_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", str(run), "--out", str(tmp_path / "elsewhere")]) == 0

    assert re.match(rf"{tmp_path}/elsewhere/report.html\n2 plots", capsys.readouterr().out)
    assert not (run / "report").exists()
