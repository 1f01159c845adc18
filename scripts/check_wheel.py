"""Installs the wheel in an empty environment and runs its commands: `python -m scripts.check_wheel [EXTRA]`.

The wheel and the environment are made in a temporary folder. The wheel is installed with the extra (default: view) from
pip's index. The commands run in the temporary folder, away from this checkout. `twine check` reads the wheel's metadata
as PyPI would.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    "rayapp/py.typed",
    "rayapp/cli/job.yaml",
    "rayapp/tasks/library/sort_numbers.yaml",
    "rayapp/extras/view/static/index.html",
    "rayapp/rollout/agent/templates/chatml_hermes.jinja",
    "actors/environments/learner.yaml",
)
"""Files other than modules that the wheel must have. Without this check, a missing file would be noticed only in
use."""
PROGRAM = """
import sys, rayapp
from pathlib import Path
assert "site-packages" in rayapp.__file__, rayapp.__file__
(good,) = rayapp.score("sort_numbers", "def sort_numbers(xs):\\n    return xs")
assert good.valid, good
sys.path.append("TESTS")
from support.synthetic_run import write_run
write_run(Path("run"), num_trajectories=32, per_step=16)
run = rayapp.open_run("run")
assert len(run.metrics) == 2 and run.table().num_rows == 32
run.plot("reward/mean")
from rayapp.cli.main import run as command
assert command(["view", "run", "--list"]) == 0
assert not {"torch", "ray"} & set(sys.modules)
""".replace("TESTS", str(ROOT / "tests"))
OF_EXTRA = {"view": [], "cpu": [["-m", "rayapp", "doctor"], ["-c", "import ray, torch, vllm, actors.learner"]]}
"""Further commands for each extra."""


def build(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("rayapp-*.whl"))


def missing(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        return sorted(set(NEEDED) - set(packed.namelist()))


def main(extra: str) -> None:
    with tempfile.TemporaryDirectory(prefix="rayapp-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        if lacking := missing(wheel):
            raise SystemExit(f"the wheel lacks {', '.join(lacking)}")
        venv.EnvBuilder(with_pip=True).create(folder / "env")
        python = str(folder / "env" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"rayapp[{extra}] @ {wheel.as_uri()}"], check=True)
        for arguments in (["-m", "rayapp", "--version"], ["-m", "rayapp", "--help"], ["-c", PROGRAM], *OF_EXTRA[extra]):
            subprocess.run([python, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        # After the commands: twine's own dependencies must not be what they need.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "twine"], check=True)
        subprocess.run([python, "-m", "twine", "check", "--strict", str(wheel)], check=True)
        print(f"{wheel.name}[{extra}] works in an empty environment")


if __name__ == "__main__":
    extra = sys.argv[1] if len(sys.argv) > 1 else "view"
    if extra not in OF_EXTRA:
        raise SystemExit(f"unknown extra {extra!r}: use {' or '.join(OF_EXTRA)}")
    main(extra)
