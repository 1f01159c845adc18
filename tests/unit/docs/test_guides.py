"""Claims of the guides that can be checked without a run: messages and keys exist, linked files exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rayapp.config.config import Config

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FILES = {"md", "py", "yaml", "lock", "json", "jsonl", "parquet", "db", "txt"}
OTHERS = {
    "reward.sandbox_fusion.url",
    "reward.sandbox_fusion.max_concurrent",
    "reward.custom_reward_function.path",
    "data.train_batch_size",
    "data.image_key",
    "run.config",
    "run.files",
    "algorithm.rollout_correction",
}
"""Keys of verl, of the Helm chart, or whole sections."""


def keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        found.add(f"{prefix}{name}")
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found |= keys(annotation, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("guide", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_key_of_ours_that_a_guide_names_is_one(guide: str) -> None:
    known = keys(Config)
    sections = {key.split(".")[0] for key in known}
    text = (DOCS / guide).read_text()
    if guide.startswith("migrate"):  # the first column has the other trainer's keys
        text = "\n".join(row.split(" | ")[1] for row in text.splitlines() if row.count(" | ") >= 1)
    named = {
        name
        for name in re.findall(r"(?<![\w/.])((?:[a-z_]+\.)+[a-z_]+)(?=[=`:])", text)
        if name.split(".")[0] in sections and name.rpartition(".")[2] not in FILES and name not in OTHERS
    }

    assert sorted(named - known) == []


@pytest.mark.parametrize("guide", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_path_of_the_code_that_a_guide_names_is_there(guide: str) -> None:
    folders = "rayapp|actors|tests|configs|benchmarks|scripts|runtime_env"
    named = re.findall(rf"`((?:{folders})/[a-z_0-9./*]*)`", (DOCS / guide).read_text())
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


def test_the_reading_path_names_functions_that_are_there_and_is_short() -> None:
    rows = re.findall(r"^\| `(rayapp/\S+\.py)`: ([^|]+) \|", (DOCS / "develop.md").read_text(), re.MULTILINE)
    num_lines = 0
    for path, names in rows:
        nodes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")]
        for name in re.findall(r"`(\w+)`", names):
            (node,) = [node for node in nodes if node.name == name and isinstance(node, ast.stmt)]
            assert node.end_lineno is not None
            num_lines += node.end_lineno - node.lineno + 1

    assert len(rows) == 5
    assert num_lines < 330, num_lines


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_no_link_is_dead_and_none_leads_off_the_site(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert page.parent == ROOT or file.is_relative_to(DOCS), f"{page.name}: {target} is not on the site"
        assert not anchor or anchor in anchors(file), f"{page.name}: {name or page.name} has no heading #{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
