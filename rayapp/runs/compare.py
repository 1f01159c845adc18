"""Lists runs, and compares them: keys that differ, and curves side by side, with a band over seeds.

Runs whose configuration differs only in `run.seed`, `run.name` and `run.output_dir` form one set: a set has one column
and one line, its mean, and a band from the lowest to the highest seed. Reads only `config.yaml`, `metrics.jsonl` and
`costs.json`.
"""

from __future__ import annotations

import base64
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, select_autoescape

from rayapp.core.files import write_text
from rayapp.runs.folder import flat_keys
from rayapp.runs.plots import Line, draw_lines
from rayapp.runs.tracking.metrics import read_records
from rayapp.runs.view.curves import PANELS, Panel, curve, keys_of, keys_of_panel
from rayapp.runs.view.report import HEADLINES, headlines
from rayapp.runs.view.run import run_state
from rayapp.runs.view.source import open_source

OF_A_SEED = frozenset({"run.seed", "run.name", "run.output_dir"})
"""Keys in which the runs of one set may differ."""
_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The small files of a run."""

    name: str
    config: dict[str, Any]
    """Values by key, flat: `train.num_steps`."""
    records: list[dict[str, Any]]
    cost: float | None
    """Cost so far in the unit of `budget.currency`; None if nothing was counted."""

    @property
    def state(self) -> str:
        return run_state(self.records, self.config.get("train.num_steps"), now=time.time())

    @property
    def step(self) -> int:
        """Last logged step; 0 before the first."""
        return int(self.records[-1]["step"]) if self.records else 0

    def last(self, key: str) -> float | None:
        """Return a metric's last value; None if no step has it."""
        return next((float(record[key]) for record in reversed(self.records) if key in record), None)


def read_run(uri: str) -> RecordedRun:
    """Read the run at a path or s3://bucket/prefix. Raises: InputError: there is no run."""
    source = open_source(uri)
    try:
        config = yaml.safe_load(source.read_bytes("config.yaml") or b"")
    except yaml.YAMLError:
        config = None
    return RecordedRun(
        name=source.name,
        config=dict(flat_keys(config)) if isinstance(config, dict) else {},
        records=list(read_records((source.read_bytes("metrics.jsonl") or b"").splitlines())),
        cost=_cost(source.read_bytes("costs.json")),
    )


def _cost(text: bytes | None) -> float | None:
    try:
        return sum(map(float, json.loads(text).values())) if text else None
    except (ValueError, TypeError, AttributeError):
        return None


COLUMNS = ("run", "state", "step", "reward", "solved", "cost")


def list_rows(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of COLUMNS for each run; `-` for an unknown value."""
    for run in runs:
        steps = f"{run.step}/{run.config.get('train.num_steps', '?')}"
        cost = "-" if run.cost is None else f"{run.cost:.2f} {run.config.get('budget.currency', '')}".strip()
        reward, solved = (_shown(run.last(key)) for key in ("reward/mean", "reward/solved/mean"))
        yield run.name, run.state, steps, reward, solved, cost


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """Runs that differ only in their seed."""

    runs: list[RecordedRun] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the first run, with the number of seeds if there are several."""
        return f"{self.runs[0].name} ({len(self.runs)} seeds)" if len(self.runs) > 1 else self.runs[0].name

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config


def sets_of(runs: Sequence[RecordedRun]) -> list[RunSet]:
    """Group runs by their configuration without the keys OF_A_SEED, in the order given. A run without a configuration
    is a set of its own."""
    found: dict[str, RunSet] = {}
    for number, run in enumerate(runs):
        own = {key: value for key, value in run.config.items() if key not in OF_A_SEED}
        key = json.dumps(own, sort_keys=True, default=str) if own else str(number)
        found.setdefault(key, RunSet()).runs.append(run)
    return list(found.values())


def differences(sets: Sequence[RunSet]) -> list[tuple[str, list[str]]]:
    """Return the keys that differ between the sets, with the value of each set."""
    keys = sorted({key for each in sets for key in each.config} - OF_A_SEED)
    rows = ((key, [str(each.config.get(key, _ABSENT)) for each in sets]) for key in keys)
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def figures(sets: Sequence[RunSet]) -> list[tuple[str, list[str]]]:
    """Return the key numbers of each set: mean over the last tenth of the steps, and the spread over seeds."""
    found: list[tuple[str, list[str]]] = [("steps", [", ".join(str(run.step) for run in each.runs) for each in sets])]
    for name in HEADLINES.values():
        values = [
            [one["last"] for run in each.runs for one in headlines(run.records) if one["name"] == name] for each in sets
        ]
        if any(values):
            found.append((name, [_with_spread(each) for each in values]))
    costs = [[run.cost for run in each.runs if run.cost is not None] for each in sets]
    if any(costs):
        found.append(("cost", [_with_spread(each) for each in costs]))
    return found


def _with_spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return _shown(values[0] if values else None)
    return f"{statistics.fmean(values):.3g} ± {statistics.stdev(values):.2g}"


def line_of(runs: RunSet, key: str) -> Line:
    """Return the mean, lowest and highest value of a metric over the set's runs, at each step that a run has."""
    values: dict[float, list[float]] = {}
    for run in runs.runs:
        points = curve(run.records, key, max_points=max(1, len(run.records)))
        for step, value in zip(points["steps"], points["values"], strict=True):
            values.setdefault(step, []).append(value)
    steps = sorted(values)
    at = [values[step] for step in steps]
    return Line(
        label=runs.name,
        steps=steps,
        mean=list(map(statistics.fmean, at)),
        low=list(map(min, at)),
        high=list(map(max, at)),
    )


def compared_panels(sets: Sequence[RunSet]) -> Iterator[tuple[Panel, str, list[Line]]]:
    """Yield each panel of the run's page with its first metric that a run has, and the lines of this metric."""
    known = keys_of([record for each in sets for run in each.runs for record in run.records])
    for panel in PANELS:
        for key in keys_of_panel(panel, known)[:1]:
            yield panel, key, [line for each in sets if (line := line_of(each, key)).steps]


def write_comparison(sets: Sequence[RunSet], out: Path) -> Path:
    """Write `comparison.html`, one self-contained file, to a folder. Returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    plots = []
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "plot.png"
        for panel, key, lines in compared_panels(sets):
            draw_lines(panel, key, lines, picture)
            plots.append((key, base64.b64encode(picture.read_bytes()).decode()))
    environment = Environment(
        loader=PackageLoader("rayapp", "runs/view/templates"), autoescape=select_autoescape(default=True)
    )
    page = environment.get_template("comparison.html.jinja").render(
        sets=sets, differences=differences(sets), figures=figures(sets), plots=plots
    )
    write_text(out / "comparison.html", page)
    return out / "comparison.html"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def comparison_lines(sets: Sequence[RunSet]) -> Iterator[str]:
    """Yield the comparison as text: key numbers, then keys that differ."""
    names = [each.name for each in sets]
    yield from table(("last tenth of the steps", *names), [(name, *values) for name, values in figures(sets)])
    yield ""
    different = [(key, *values) for key, values in differences(sets)]
    yield from table(("keys that differ", *names), different) if different else ("no key differs",)


def existing_runs(uris: Sequence[str]) -> list[RecordedRun]:
    """Read each run once, in the order given."""
    return [read_run(uri) for uri in dict.fromkeys(uris)]
