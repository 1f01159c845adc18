"""docs/models.md shows the recorded results of `support.family_check`."""

from __future__ import annotations

import json

from rayapp.storage.models.families import FAMILIES
from scripts.model_table import CHECKS, DOCS, page


def test_the_table_of_models_is_what_was_recorded_of_every_family() -> None:
    record = json.loads((DOCS / "models.json").read_text())
    assert sorted(record) == sorted(FAMILIES)
    assert [name for name, checks in record.items() if not FAMILIES[name].refused and set(checks) != set(CHECKS)] == []
    text = (DOCS / "models.md").read_text()
    assert text == page(text, record), "run `python -m scripts.model_table`"
