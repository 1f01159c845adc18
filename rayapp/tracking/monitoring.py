"""Writes what Prometheus and Grafana read: `python -m rayapp.tracking.monitoring`. A test says when it must run again.

configs/monitoring/ is for a workstation; the Helm chart can only read files below itself, so it gets copies.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from rayapp.tracking.alerts import rule_file
from rayapp.tracking.dashboard import dashboard

CONFIGS = Path(__file__).parents[2] / "configs"
NOTE = "# Made by `python -m rayapp.tracking.monitoring`; what is in it is decided in rayapp/tracking/.\n"


def files() -> dict[Path, str]:
    """Every file and its text."""
    alerts = NOTE + yaml.safe_dump(rule_file(), sort_keys=False, allow_unicode=True, width=1000)
    board = json.dumps(dashboard(), indent=1) + "\n"
    chart = CONFIGS / "kuberay" / "chart" / "files"
    return {
        CONFIGS / "monitoring" / "alerts.yaml": alerts,
        CONFIGS / "monitoring" / "grafana-dashboard.json": board,
        chart / "alerts.yaml": alerts,
        chart / "grafana-dashboard.json": board,
    }


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
