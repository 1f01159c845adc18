"""Files that other programs run pass their linters, and everything that the Dockerfile copies exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINTED = {
    "hadolint": "Dockerfile",
    "shellcheck": "configs/slurm/train.sh",
    "actionlint": ".github/workflows/release.yml",
}


@pytest.mark.parametrize("linter", LINTED)
def test_a_file_passes_its_linter(linter: str) -> None:
    program = shutil.which(linter) or str(Path(sys.executable).with_name(linter))
    if not Path(program).exists():
        pytest.skip(f"{linter} is not here")

    done = subprocess.run([program, ROOT / LINTED[linter]], capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists_and_is_in_the_build_context() -> None:
    text, context = ((ROOT / name).read_text() for name in ("Dockerfile", ".dockerignore"))
    copied = [words for line in re.findall(r"^COPY ([^-].*)$", text, re.MULTILINE) for words in line.split()[:-1]]

    assert {"rayapp", "actors", "configs", "runtime_env", "pyproject.toml"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in context.splitlines()] == []
