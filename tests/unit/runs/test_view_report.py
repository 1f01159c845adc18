"""`rayapp report`: one self-contained file with the run's numbers, in which no model's text is executed."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rayapp.cli.main import run as run_command
from rayapp.core.errors import InputError
from rayapp.runs.profiles import Profile, profile_lines, summarize, trace_events, write_profile
from rayapp.runs.trajectories import write_trajectories
from rayapp.runs.view.curves import MEANINGS
from rayapp.runs.view.report import headlines, settings, write_report
from rayapp.runs.view.run import ViewedRun
from rayapp.runs.view.source import open_source
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


def gpu_trace() -> bytes:
    """Half a second on a GPU, in two streams that overlap for a tenth of a second; times in microseconds."""

    def event(name: str, category: str, track: int, start_s: float, seconds: float) -> dict[str, Any]:
        times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
        return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": track} | times

    events = [
        {"ph": "M", "name": "process_name", "pid": 0},
        event("aten::linear", "cpu_op", 1, 0.0, 0.2),
        event("aten::mm", "cpu_op", 1, 0.05, 0.1),
        event("gemm", "kernel", 7, 0.1, 0.2),
        event("gemm", "kernel", 7, 0.3, 0.1),
        event("all_gather<script>", "kernel", 8, 0.35, 0.15),
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
    return gzip.compress(text.encode())


def test_a_profile_of_a_gpu_counts_kernels_and_the_time_without_any(run: Path) -> None:
    timings = {"timing_s/step": 2.0, "timing_s/rollout": 0.5, "timing_s/train": 1.5, "timing_s/learner/optimizer": 0.5}
    profile = Profile(process="learner-0", trace=gpu_trace(), covers="8 of 9 micro-batches", paused_s=0.1)
    found = write_profile(run, 7, [profile], timings)

    (process,) = found.processes
    assert [(one.name, one.calls) for one in process.operators] == [("gemm", 2), ("all_gather<script>", 1)]
    assert [one.share for one in process.operators] == pytest.approx([2 / 3, 1 / 3])
    assert (process.device, process.recorded_s, process.busy_s) == ("gpu", pytest.approx(0.4), pytest.approx(0.4))
    assert list(profile_lines(found, "runs/x/profiles")) == [
        "profile of step 7, 2.0 s: train 75%, optimizer 25%, rollout 25%",
        "learner-0: gpu busy for 100% of 0.4 s (8 of 9 micro-batches): gemm 67%, all_gather<script> 33%",
        "traces for chrome://tracing or Perfetto: runs/x/profiles",
    ]
    report = Tags(write_report(str(run), None).page.read_text())
    assert "Where the time of step 7 went: 2.0 s" in report.texts
    assert "all_gather<script>" in report.texts


def test_an_operators_own_time_is_without_the_operators_that_it_calls() -> None:
    events = [event for event in trace_events(gpu_trace()) if event.get("cat") != "kernel"]
    trace = gzip.compress(json.dumps({"traceEvents": events}).replace("[{", "[ {", 1).encode())
    found = summarize(Profile(process="learner-0", trace=trace, covers=""))

    assert {one.name: round(one.seconds, 6) for one in found.operators} == {"aten::linear": 0.1, "aten::mm": 0.1}
    assert (found.device, found.busy_s) == ("cpu", pytest.approx(0.2))


def test_a_damaged_summary_is_left_out(run: Path) -> None:
    folder = run / "profiles" / "step=000003"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"step": 3}')

    assert ViewedRun(open_source(str(run))).profiles() == []
