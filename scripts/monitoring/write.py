"""Writes the files of Prometheus and Grafana: `python -m scripts.monitoring.write`. A test finds stale files.

The files are in the Helm chart, because a chart can read only files in its own folder.
configs/monitoring/prometheus.yml refers to these files.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from scripts.monitoring.alerts import rule_file
from scripts.monitoring.dashboard import dashboard

CONFIGS = Path(__file__).parents[2] / "configs"
NOTE = "# Made by `python -m scripts.monitoring.write`; edit scripts/monitoring/ to change it.\n"


def files() -> dict[Path, str]:
    """Return path -> text of every file."""
    alerts = NOTE + yaml.safe_dump(rule_file(), sort_keys=False, allow_unicode=True, width=1000)
    board = json.dumps(dashboard(), indent=1) + "\n"
    chart = CONFIGS / "kuberay" / "chart" / "files"
    return {
        chart / "alerts.yaml": alerts,
        chart / "grafana-dashboard.json": board,
    }


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
