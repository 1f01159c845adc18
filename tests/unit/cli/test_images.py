"""`rayapp images`, as users type it, on an image that lies in a folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rayapp.cli.main import run
from support.images import entry, layer, needs_image_programs, write_oci


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(f"sandbox: {{providers: [{{type: local, image_cache: {tmp_path}/cache}}]}}\n")
    return path


@needs_image_programs
def test_images_are_pulled_listed_and_pruned(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = write_oci(tmp_path / "oci", [layer(entry("file", "x"))])

    assert run(["images", "pull", f"oci:{tmp_path}/oci", "--config", str(config)]) == 0
    assert run(["images", "prune", "--dry-run", "--config", str(config)]) == 0
    *_, listed, total = capsys.readouterr().out.splitlines()
    assert listed.startswith(digest[7:19])
    assert listed.endswith(f"oci:{tmp_path}/oci")
    assert total.startswith("1 images, ")

    assert run(["images", "prune", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("removed oci:")
    assert run(["images", "prune", "--dry-run", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("0 images, 0.00 of 50 GiB")


@needs_image_programs
def test_a_missing_image_is_bad_input(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["images", "pull", f"oci:{tmp_path}/none", "--config", str(config)]) == 2
    assert re.fullmatch(".*none.*can't be read.*", capsys.readouterr().err.strip())


@needs_image_programs
def test_a_dockerfile_is_built_into_the_cache(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("needs Debian's buildah")
    monkeypatch.setenv("STORAGE_DRIVER", "vfs")
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/Dockerfile").write_text("FROM scratch\nCOPY a.txt /a.txt\nWORKDIR /w\n")
    (tmp_path / "task/environment/a.txt").write_text("from here")

    if run(["images", "build", str(tmp_path / "task"), "--tool", "buildah", "--config", str(config)]) != 0:
        pytest.skip(f"buildah can't build here: {capsys.readouterr().err[-200:]}")

    assert "image:build:task sha256:" in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.glob("cache/trees/*/a.txt")] == ["from here"]


def test_what_can_not_be_built_or_pulled_is_told_in_one_line(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["images", "build", str(tmp_path), "--name", "x", "--config", str(config)]) == 2
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    assert run(["images", "build", str(tmp_path), "--name", "x", "--config", str(config)]) == 2
    assert "none of buildah, podman, docker is installed" in capsys.readouterr().err
    assert run(["images", "pull", "x:1", "--config", str(config)]) == 2
    assert "skopeo is not installed: apt-get install skopeo umoci" in capsys.readouterr().err
