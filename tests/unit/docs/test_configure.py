"""docs/configure.md says what the schema says, and docs/models.md what was recorded of every family."""

from __future__ import annotations

import json
import re

from rayapp.config.config import Config
from rayapp.config.loading import ALIASES
from rayapp.core.validation import valid_keys
from rayapp.storage.models.families import FAMILIES
from scripts.config_docs import keys_without_meaning, render
from scripts.model_table import CHECKS, DOCS, page


def test_the_page_of_all_keys_is_current() -> None:
    assert (DOCS / "configure.md").read_text(encoding="utf-8") == render(), (
        "run `python -m scripts.config_docs > docs/configure.md`"
    )


def test_every_key_has_a_meaning_and_its_values_in_words() -> None:
    assert keys_without_meaning() == []
    page = render()
    assert "| `rollout.group_size` | `16` | an integer, at least 1 | Trajectories sampled for each prompt (G)." in page
    assert "Ge(" not in page
    assert "of the form" not in page, "a pattern is said in words: core/validation.py"


def test_names_of_trl_and_verl_lead_to_keys_that_are_there_and_not_ours() -> None:
    keys = set(valid_keys(Config))
    leaves = {key.rpartition(".")[2] for key in keys}

    assert set(ALIASES.values()) <= keys
    assert not leaves & ALIASES.keys()


def test_the_table_of_trls_names_says_what_the_error_message_says() -> None:
    text = (DOCS / "migrate-from-trl.md").read_text()
    rows = re.findall(r"^\| `(\w+)=?`[^|]*\| `([\w.]+)[:`]", text, re.MULTILINE)
    named = {name: key for name, key in rows if key in set(valid_keys(Config))}

    assert len(named) > 5
    assert {name: ALIASES.get(name, key) for name, key in named.items()} == named


def test_the_table_of_models_is_what_was_recorded_of_every_family() -> None:
    record = json.loads((DOCS / "models.json").read_text())
    assert sorted(record) == sorted(FAMILIES)
    assert [name for name, checks in record.items() if not FAMILIES[name].refused and set(checks) != set(CHECKS)] == []
    text = (DOCS / "models.md").read_text()
    assert text == page(text, record), "run `python -m scripts.model_table`"
