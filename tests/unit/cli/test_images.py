"""`rayapp images`, as users type it, on an image that lies in a folder."""

from __future__ import annotations

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
def test_images_are_pulled_named_listed_and_pruned(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = write_oci(tmp_path / "oci", [layer(entry("file", "x"))])

    assert run(["images", "pull", f"oci:{tmp_path}/oci", "--name", "task", "--config", str(config)]) == 0
    assert run(["images", "pull", "build:task", "--config", str(config)]) == 0
    assert run(["images", "prune", "--dry-run", "--config", str(config)]) == 0
    *_, listed, total = capsys.readouterr().out.splitlines()
    assert listed.startswith(digest[7:19])
    assert f"oci:{tmp_path}/oci" in listed
    assert "build:task" in listed
    assert total.startswith("1 images, ")

    assert run(["images", "prune", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("removed oci:")
    assert run(["images", "prune", "--dry-run", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("0 images, 0.00 of 50 GiB")


def test_a_missing_program_is_named_with_the_command_that_installs_it(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["images", "pull", "x:1", "--config", str(config)]) == 2
    assert "skopeo is not installed: apt-get install skopeo umoci" in capsys.readouterr().err
