"""docs/configure.md says what the schema says."""

from __future__ import annotations

import re
from pathlib import Path

from rayapp.config.config import Config
from rayapp.config.loading import ALIASES
from rayapp.core.validation import valid_keys
from scripts.config_docs import keys_without_meaning, render

DOCS = Path(__file__).parents[3] / "docs"


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
