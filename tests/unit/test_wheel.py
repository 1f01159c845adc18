"""The wheel's contents: every file that the program reads besides modules, and the version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rayapp.core import __version__
from scripts.check_wheel import NEEDED, PROGRAM, build, missing

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.slow
def test_the_wheel_has_all_that_the_program_reads(tmp_path: Path) -> None:
    """An empty environment is tried by hand: `python -m scripts.check_wheel` needs an index."""
    wheel = build(tmp_path)

    assert missing(wheel) == []
    assert wheel.name.startswith(f"rayapp-{__version__}-")


def test_files_beside_modules_are_named_where_they_are_packed() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    packed = {
        path.relative_to(ROOT).as_posix()
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    others = {
        path.relative_to(ROOT).as_posix()
        for package in data
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }

    assert others - packed == set()
    assert set(NEEDED) <= packed


def test_extras_that_guides_and_messages_name_are_there() -> None:
    named = {
        extra
        for file in [*(ROOT / "docs").glob("*.md"), *(ROOT / "rayapp").rglob("*.py"), ROOT / "README.md"]
        for extra in re.findall(r"rayapp\[(\w+)\]", file.read_text())
    }

    assert named - set(PROJECT["project"]["optional-dependencies"]) == set()
    assert {"view", "cpu", "gpu"} <= set(PROJECT["project"]["optional-dependencies"])
    compile(PROGRAM, "what is done with the wheel", "exec")


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
