"""docs/configure.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from scripts.config_docs import render


def test_the_page_of_all_keys_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "configure.md"
    assert page.read_text(encoding="utf-8") == render(), "run `python -m scripts.config_docs > docs/configure.md`"


def test_every_key_is_on_the_page_with_its_bounds_and_meaning() -> None:
    page = render()
    assert "| `rollout.group_size` | `16` | `Ge(ge=2)` | Trajectories per prompt (G)." in page
    assert "## `learner.optimizer`" in page
