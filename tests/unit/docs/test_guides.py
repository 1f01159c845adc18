"""Claims of the guides that can be checked without a run: messages and keys exist, linked files exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rayapp.config.config import Config
from rayapp.tasks.banned import screen
from rayapp.tasks.coding import CodingTask

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FILES = {"md", "py", "yaml", "lock", "json", "jsonl", "parquet", "db", "txt"}
OTHERS = {
    "reward.custom_reward_function.path",
    "data.train_batch_size",
    "run.config",
    "run.files",
    "algorithm.rollout_correction",
}
"""Keys of verl, of the Helm chart, or whole sections."""


@cache
def texts_of_the_code() -> str:
    """Return every text in the code, with … for filled-in values; adjacent texts are joined, as Python does."""
    found: list[str] = []
    for folder in ("rayapp", "actors"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.append("".join(map(str, parts)))
    found += [path.read_text() for path in (ROOT / "rayapp" / "extras" / "view" / "static").glob("*.js")]
    return "\n".join(found)


def quoted_messages() -> list[str]:
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshoot.md").read_text(), re.MULTILINE)
    signs = {"groups/zero_variance", "rollout_probs_diff/max"}
    return [row for row in rows if row not in signs]


def test_every_message_that_the_guide_explains_is_one_that_the_program_says() -> None:
    messages = quoted_messages()
    assert len(messages) >= 15
    pieces = [piece for message in messages for piece in re.split(r"\s*…\s*", message)]
    assert [piece for piece in pieces if piece not in texts_of_the_code()] == []


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


def test_the_first_task_of_the_readme_bans_what_its_prompt_forbids() -> None:
    (text,) = re.findall(r"^```yaml\n(prompt:.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    task = CodingTask.model_validate({"name": "double", **yaml.safe_load(text)})
    task.check()

    _, status, _ = screen(" return x * 2", "double", task.answer_prefix, task.banned_patterns)
    _, allowed, _ = screen(" return x + x", "double", task.answer_prefix, task.banned_patterns)

    assert (status, allowed) == ("banned", "")


def test_every_guide_is_on_the_site_and_linked_from_its_landing_page() -> None:
    guides = {path.name for path in DOCS.glob("*.md")}

    assert guides == set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:", 1)[1]))
    assert guides - {"index.md"} == set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))


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


def test_the_reference_names_what_is_there() -> None:
    for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE):
        place, _, attribute = name.rpartition(".")
        module = importlib.import_module(name if attribute.islower() and "." in place and _is_module(name) else place)
        assert module.__name__ == name or getattr(module, attribute).__doc__


def _is_module(name: str) -> bool:
    return (
        importlib.util.find_spec(name.rpartition(".")[0]) is not None
        and (ROOT / f"{name.replace('.', '/')}.py").is_file()
    )
