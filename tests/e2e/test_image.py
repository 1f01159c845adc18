"""The image of the Dockerfile, built by buildah on a Debian of debootstrap: what is in it, and two steps of the default
job inside, as its unprivileged user.

It needs root, the package indexes of Debian and PyPI, ten minutes and 15 GB, all of which it gives back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]
ROOT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/python:base", "localhost/rayapp:test"
NEEDED_BYTES = 15 << 30
MOST_BYTES = 5 << 30
"""Largest size of the CPU image. The first build had 4.4 GB (docs/operate.md)."""
PYTHON = "python3,python3-dev,python3-venv,ca-certificates"  # headers as in the python image: torch compiles with them
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def call(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, **options)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Call it with a command of buildah. Its images are in a folder of their own, which is deleted afterwards."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and apt-get install buildah debootstrap (missing: {', '.join(missing) or 'root'})")
    folder = tmp_path_factory.mktemp("buildah")
    if shutil.disk_usage(folder).free < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of free disk in {folder}")
    storage = ("--root", f"{folder}/store", "--runroot", f"{folder}/run", "--storage-driver", "overlay")
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return call("buildah", *storage, *command, env=environment, cwd=ROOT)

    try:
        if (tried := run("images")).returncode != 0:
            pytest.skip(f"buildah can't store images here: {tried.stderr}")
        yield run
    finally:
        run("rm", "--all")
        run("rmi", "--all", "--force")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def base(buildah: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    """In place of Docker Hub's python image: Debian with its Python."""
    folder = tmp_path_factory.mktemp("debian")
    made = call("debootstrap", "--variant=minbase", f"--include={PYTHON}", "bookworm", str(folder))
    if made.returncode != 0:
        pytest.skip(f"debootstrap can't make a Debian here: {made.stdout[-300:]}")
    (folder / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    container = checked(buildah("from", "scratch")).strip()
    checked(buildah("add", "--quiet", container, str(folder), "/"))
    shutil.rmtree(folder)
    settings = ["--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    if certificates := os.environ.get("SSL_CERT_FILE"):  # this machine's way to the indexes
        settings += ["--env", f"SSL_CERT_FILE={certificates}"]
    checked(buildah("config", *settings, container))
    checked(buildah("commit", "--quiet", "--rm", container, BASE))
    return BASE


def of_this_machine() -> list[str]:
    """Return volumes with this machine's certificates and wheels, if it needs them to reach the indexes."""
    folders = [str(Path(file).parent) for file in (os.environ.get("SSL_CERT_FILE"),) if file]
    folders += [folder for folder in os.environ.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()]
    return [f"--volume={folder}:{folder}:ro" for folder in folders]


def checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def container(buildah: Run, base: str) -> str:
    """A container of the built image."""
    arguments = {"PYTHON_IMAGE": base, "DEVICE": "cpu", "PIP_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items() if value]
    checked(buildah("build", "--layers", *given, *of_this_machine(), "--tag", IMAGE, "."))
    return checked(buildah("from", "--pull-never", IMAGE)).strip()


@pytest.fixture(scope="module")
def inside(buildah: Run, container: str) -> Run:
    """Call it with a command: it runs in the container, as the image's user."""
    return lambda *command: buildah("run", *of_this_machine(), container, "--", *command)


def test_the_image_has_its_user_no_caches_and_a_code_that_runs_can_not_change(
    buildah: Run, container: str, inside: Run
) -> None:
    found = json.loads(checked(buildah("inspect", "--type", "image", IMAGE)))["OCIv1"]
    [listed] = json.loads(checked(buildah("images", "--json", IMAGE)))
    root = Path(checked(buildah("mount", container)).strip())

    assert found["config"]["User"] == "10001"
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file() and not file.is_symlink()) < MOST_BYTES
    assert len(found["rootfs"]["diff_ids"]) > 4, "packages and code are in different layers"
    assert listed["id"]
    assert checked(inside("id", "-u")).strip() == "10001"
    for folder in ("rayapp", "actors", "configs", ".venv/bin"):
        assert inside("touch", f"/opt/rayapp/{folder}/mine").returncode != 0, folder
    checked(inside("touch", "/opt/rayapp/outputs/mine"))
    left = [root / "root/.cache", root / "var/lib/apt/lists/partial", root / "opt/rayapp/.venv/bin/uv"]
    assert not any(path.exists() for path in left)


def test_two_steps_of_the_default_job_run_inside(buildah: Run, container: str, inside: Run) -> None:
    config = "configs/coding_warmup_cpu.yaml"
    short = ("warmup.num_steps=1", "train.num_steps=2", "eval.before_training=false", "eval.every_steps=0")
    checked(inside("rayapp", "model", "fetch", "smollm2-135m"))

    doctor = inside("rayapp", "doctor", config)
    trained = inside("rayapp", "train", config, *short, "run.name=inside")

    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "isolation" in doctor.stdout
    checked(trained)
    run = Path(checked(buildah("mount", container)).strip()) / "opt/rayapp/outputs/inside"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-2:] == [1, 2]
    assert (run / "final/model.safetensors").is_file()
    assert run.stat().st_uid == 10001
