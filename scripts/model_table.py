"""Writes the table of docs/models.md from docs/models.json: `python -m scripts.model_table`. A test finds a stale
table.

`PYTHONPATH=tests python -m support.family_check FAMILY --record docs/models.json` writes docs/models.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayapp.storage.models.families import FAMILIES

DOCS = Path(__file__).parents[1] / "docs"
HEADING = "## Families\n"
CHECKS = ("learner", "adapters", "final/", "engine")


def render(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, with the versions of the packages that produced it."""
    versions = "; ".join(sorted({check["with"] for checks in record.values() for check in checks.values()}))
    lines = [
        "Made by `support.family_check --record docs/models.json`, then `python -m scripts.model_table`, on CPU with",
        f"{versions}. The figures are in `docs/models.json`. Engine: vLLM with `final/` and after",
        "two syncs. Parsers are those that `agent.tool_parser: auto` tries first.",
        "",
        "| model_type | beside plain attention | learner | adapters | final/ | engine | parsers | tried |",
        "|---|---|---|---|---|---|---|---|",
        *_rows(record),
    ]
    return "\n".join(lines) + "\n"


def _rows(record: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, family in sorted(FAMILIES.items()):
        checks = record[name]
        tried = max(check["date"] for check in checks.values())
        if family.refused:
            yield f"| {name} | | refused: {family.refused} | | | | | {tried} |"
            continue
        cells = ["ok" if checks[what]["holds"] else f"**no**: {checks[what]['detail']}" for what in CHECKS]
        yield f"| {name} | {', '.join(family.needs)} | {' | '.join(cells)} | {', '.join(family.parsers)} | {tried} |"


def page(text: str, record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page's text with a new table in place of its last part."""
    return f"{text[: text.index(HEADING)]}{HEADING}\n{render(record)}"


if __name__ == "__main__":
    file = DOCS / "models.md"
    file.write_text(page(file.read_text(), json.loads((DOCS / "models.json").read_text())))
