"""`rayapp report RUN`: a run as one self-contained HTML file, and PNG plots.

It shows the panels of `rayapp view` over metrics.jsonl, and a few completions. It only reads the run, and writes only
to the given folder. The template engine escapes everything that a model wrote.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from rayapp.core.errors import InputError
from rayapp.core.files import write_text
from rayapp.runs.plots import draw_panels
from rayapp.runs.view.groups import GroupFilter, Page, find_groups
from rayapp.runs.view.run import ViewedRun, panels_of
from rayapp.runs.view.source import open_source

MAX_EXAMPLE_CHARS = 4000
HEADLINES = {
    "reward/mean": "reward",
    "reward/pass_rate/mean": "share of tests passed",
    "reward/solved/mean": "share of completions that pass every test",
    "learner/entropy": "entropy, nats per token (near 0: the same text again and again)",
    "length/response/mean": "tokens of a completion",
    "timing_s/step": "seconds of a step",
}
SETTINGS = (
    "model.path", "tasks", "sources", "algorithm.adv_estimator", "algorithm.policy_loss", "algorithm.kl_loss_coef",
    "rollout.group_size", "rollout.temperature", "rollout.max_completion_tokens", "train.num_steps",
    "train.groups_per_step", "train.max_staleness", "learner.optimizer.lr", "server.num_servers", "run.seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Paths of the written files."""

    page: Path
    plots: tuple[Path, ...]


def write_report(uri: str, out: Path | None) -> Report:
    """Write `report.html` and one PNG a panel.

    Args:
        uri: a run folder, or s3://….
        out: folder for them; None is `report/` in the run folder, or in the working folder for a run on S3.

    Raises:
        InputError: no such run, or it has no step yet.
    """
    run = ViewedRun(open_source(uri))
    while run.refresh():
        pass
    records = run.records()
    if not records:
        raise InputError(f"{uri} has no step in metrics.jsonl yet: there is nothing to report")
    out = out or (Path(uri) if "://" not in uri else Path.cwd() / run.name) / "report"
    out.mkdir(parents=True, exist_ok=True)
    panels = list(panels_of(records))
    plots = draw_panels(panels, out)
    meanings = {panel.title: panel.meaning for panel, _ in panels}
    page = out / "report.html"
    write_text(page, _render(run, records, plots, meanings))
    return Report(page=page, plots=tuple(plots.values()))


def headlines(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the key numbers over the first and the last tenth of the run.

    Example: steps with reward 0, …, 1 -> {"name": "reward", "first": 0.0, "last": 1.0}.
    """
    found = []
    for key, name in HEADLINES.items():
        values = [record[key] for record in records if isinstance(record.get(key), int | float)]
        tenth = max(1, len(values) // 10)
        if values:
            first, last = values[:tenth], values[-tenth:]
            found.append({"name": name, "first": sum(first) / tenth, "last": sum(last) / tenth})
    return found


def examples(run: ViewedRun) -> list[dict[str, Any]]:
    """Return, for each task, the best completion of its first and of its last group."""
    chosen: list[dict[str, Any]] = []
    for task in run.facets()["tasks"]:
        for when, descending in (("first", False), ("last", True)):
            page = Page(sort="step", descending=descending, limit=1)
            rows = find_groups(run.index, GroupFilter(task=task, purpose="train"), page)["rows"]
            if not rows:  # a task that occurs only in evaluations
                continue
            row = rows[0]
            group = run.group(row["step"], row["group_id"])
            best = max(group["trajectories"], key=lambda one: (one["valid"], one["reward"]))
            text = group["prefill"] + best["completion"]
            chosen.append(best | {"task": task, "when": when, "step": row["step"], "text": text[:MAX_EXAMPLE_CHARS]})
    return chosen


def settings(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of interest that the configuration has."""
    found = []
    for key in SETTINGS:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value != []:
            found.append((key, ", ".join(map(_shown, value)) if isinstance(value, list) else value))
    return found


def _shown(value: Any) -> str:
    """Return the name of a source, as used in its metrics; return other values unchanged."""
    return str(value["name"] if isinstance(value, dict) else value)


def _render(
    run: ViewedRun, records: list[dict[str, Any]], plots: Mapping[str, Path], meanings: Mapping[str, str]
) -> str:
    environment = Environment(
        loader=PackageLoader("rayapp", "runs/view/templates"), autoescape=select_autoescape(default=True)
    )
    environment.filters["when"] = lambda stamp: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(stamp))
    images = {title: base64.b64encode(path.read_bytes()).decode() for title, path in plots.items()}
    return environment.get_template("report.html.jinja").render(
        run=run.summary(),
        first=records[0],
        last=records[-1],
        headlines=headlines(records),
        settings=settings(run.config()),
        facets=run.facets(),
        images=images,
        meanings=meanings,
        examples=examples(run),
        profiles=run.profiles(),
    )
