"""Writes the table of docs/models.md from docs/models.json: `python -m scripts.model_table`. A test finds a stale
table.

`PYTHONPATH=tests python -m support.family_check FAMILY --record docs/models.json` writes docs/models.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayapp.storage.models.families import FAMILIES

DOCS = Path(__file__).parents[1] / "docs"
HEADING = "## Families\n"
CHECKS = ("learner", "adapters", "final/", "engine")


def render(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the list of families that pass every check, and a table of the others with the reason."""
    versions = "; ".join(sorted({check["with"] for checks in record.values() for check in checks.values()}))
    dates = sorted({check["date"] for checks in record.values() for check in checks.values()})
    tried = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"Tried on a CPU with {versions} ({tried}).",
        "The figures are in `docs/models.json`; `python -m scripts.model_table` writes this section.",
        "",
        f"**Learner, adapters, `final/` and vLLM agree**: {', '.join(_whole(record))}.",
        "",
        "| model_type | what does not work |",
        "|---|---|",
        *(f"| {', '.join(names)} | {reason} |" for reason, names in _others(record).items()),
    ]
    return "\n".join(lines) + "\n"


def _whole(record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name in sorted(FAMILIES) if _reason(name, record[name]) == ""]


def _others(record: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the families that fail a check, by reason."""
    found: dict[str, list[str]] = {}
    for name in sorted(FAMILIES):
        if reason := _reason(name, record[name]):
            found.setdefault(reason, []).append(name)
    return found


def _reason(name: str, checks: Mapping[str, Any]) -> str:
    """Return why a family is refused, or which checks fail and why; empty if all pass."""
    if FAMILIES[name].refused:
        return f"refused: {FAMILIES[name].refused}"
    return " ".join(f"{what}: {checks[what]['detail']}" for what in CHECKS if not checks[what]["holds"])


def page(text: str, record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page's text with a new table in place of its last part."""
    return f"{text[: text.index(HEADING)]}{HEADING}\n{render(record)}"


if __name__ == "__main__":
    file = DOCS / "models.md"
    file.write_text(page(file.read_text(), json.loads((DOCS / "models.json").read_text())))
