"""A data set in SWE-bench's form: one issue of a small repository with a real git history."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rayapp.extras.repositories.named_tests import pytest_files
from support.images import PROGRAMS, entry, layer, machine_layer, write_oci

STATS = """
def mean(values):
    return sum(values) / len(values)


def median(values):
    return sorted(values)[len(values) // 2]
"""
SOLVED = """
def mean(values):
    return sum(values) / len(values)


def median(values):
    if not values:
        raise ValueError("no values")
    middle = len(values) // 2
    ordered = sorted(values)
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
"""
OLD_TESTS = "from stats import mean\n\n\ndef test_mean():\n    assert mean([2, 4, 9]) == 5\n"
NEW_TESTS = (
    "import pytest\n\nfrom stats import mean, median\n\n\n"
    "def test_mean():\n    assert mean([2, 4, 9]) == 5\n\n\n"
    "@pytest.mark.parametrize('values, wanted', [([4, 1, 3, 2], 2.5), ([10, 20], 15)])\n"
    "def test_even(values, wanted):\n    assert median(values) == wanted\n\n\n"
    "def test_empty():\n    with pytest.raises(ValueError):\n        median([])\n\n\n"
    "def test_odd():\n    assert median([9, 2, 7]) == 7\n"
)


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    ran = subprocess.run(["git", *settings, "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return ran.stdout


def make_mirrors(folder: Path) -> Path:
    """Return the folder with one clone, of a repository whose last commit solves the issue and whose first has the
    fault; its folder `work` is the repository itself."""
    work = folder / "work"
    work.mkdir()
    git(work, "init", "-q")
    for files, message in (
        (
            {"stats.py": STATS, "tests/test_stats.py": OLD_TESTS, "conftest.py": "", ".gitignore": "*.log\n"},
            "Add stats",
        ),
        ({"stats.py": SOLVED, "tests/test_stats.py": NEW_TESTS}, "Mend median"),
    ):
        for path, text in files.items():
            (work / path).parent.mkdir(exist_ok=True)
            (work / path).write_text(text)
        git(work, "add", "-A")
        git(work, "commit", "-q", "-m", message)
    git(folder, "clone", "-q", "--bare", str(work), str(folder / "me__stats.git"))
    return folder


def row(mirrors: Path, **other: Any) -> dict[str, Any]:
    work = mirrors / "work"
    return {
        "instance_id": "me__stats-1",
        "repo": "me/stats",
        "base_commit": git(work, "rev-parse", "HEAD~1").strip(),
        "problem_statement": "median is wrong for lists of even length; for an empty one it must raise ValueError.",
        "patch": git(work, "diff", "HEAD~1", "HEAD", "--", "stats.py"),
        "test_patch": git(work, "diff", "HEAD~1", "HEAD", "--", "tests"),
        "FAIL_TO_PASS": json.dumps([f"tests/test_stats.py::{name}" for name in
                                    ("test_even[values0-2.5]", "test_even[values1-15]", "test_empty")]),
        "PASS_TO_PASS": ["tests/test_stats.py::test_mean", "tests/test_stats.py::test_odd"],
    } | other  # fmt: skip


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


def image_with_repository(folder: Path, mirrors: Path) -> str:
    """Write an image as SWE-bench's are: the repository in its working folder, with its whole history and a file that
    git ignores, pytest and git. Return its name."""
    work, entries = mirrors / "checkout", []
    git(mirrors, "clone", "-q", str(mirrors / "work"), str(work))
    git(work, "reset", "-q", "--hard", "HEAD~1")
    (work / "built.log").write_text("an output of a build\n")
    for path in sorted(work.rglob("*")):
        content = path.read_bytes() if path.is_file() else None
        entries.append(entry(f"testbed/{path.relative_to(work)}", content))
    site = f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    entries += [entry(f"{site}/{path}", data) for path, data in pytest_files().items()]
    tools = machine_layer(with_python=True, programs=(*PROGRAMS, "git", "base64"))
    config = {"WorkingDir": "/testbed", "Env": ["PATH=/usr/local/bin:/usr/bin"]}
    write_oci(folder, [tools, layer(entry("testbed"), *entries)], config=config)
    return f"oci:{folder}"
