"""The copy of a Python that only root can read: complete or absent, readable by all, owned by this user."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayapp.core.errors import SandboxConfigError
from rayapp.sandbox.local import staging
from rayapp.sandbox.local.staging import staged


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(staging, "FOLDERS", (folder,))
    monkeypatch.setattr(staging, "_is_readable", lambda path: True)  # pytest's own folder is closed to others
    return folder


@pytest.fixture
def originals(tmp_path: Path) -> dict[str, str]:
    library = tmp_path / "closed" / "python3.99"
    for name in ("os.py", "json/__init__.py", "test/big.py", "site-packages/theirs.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("x = 1\n")
        (library / name).chmod(0o600)
    (library / "gone").symlink_to("nowhere")
    program = tmp_path / "closed" / "python"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    return {"lib/python3.99": str(library), "bin/python": str(program)}


def test_a_copy_is_readable_by_all_and_writable_by_its_owner_alone(cache: Path, originals: dict[str, str]) -> None:
    place = staged(originals)

    assert {str(path.relative_to(place)): path.stat().st_mode & 0o777 for path in (place, *place.rglob("*"))} == {
        ".": 0o755,
        "bin": 0o755,
        "bin/python": 0o755,
        "lib": 0o755,
        "lib/python3.99": 0o755,
        "lib/python3.99/os.py": 0o644,
        "lib/python3.99/json": 0o755,
        "lib/python3.99/json/__init__.py": 0o644,
    }


def test_processes_that_copy_at_once_end_up_with_one_and_a_change_makes_another(
    cache: Path, originals: dict[str, str]
) -> None:
    with ThreadPoolExecutor(8) as threads:
        (place,) = set(threads.map(staged, [originals] * 8))
    assert list(cache.iterdir()) == [place]

    Path(originals["lib/python3.99"], "__pycache__").mkdir()
    assert staged(originals) == place
    Path(originals["lib/python3.99"], "os.py").write_text("x = 2\ny = 3\n")
    assert (staged(originals) / "lib/python3.99/os.py").read_text() == "x = 2\ny = 3\n"


def test_a_copy_that_fails_leaves_nothing(
    cache: Path, originals: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", full)
        with pytest.raises(SandboxConfigError, match="No space left"):
            staged({"bin/python": originals["bin/python"]})

    assert list(cache.iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(cache: Path, originals: dict[str, str]) -> None:
    staged(originals).chmod(0o777)

    with pytest.raises(SandboxConfigError, match="Remove it"):
        staged(originals)
