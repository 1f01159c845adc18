"""Whether a used sandbox looks as it did when it was new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rayapp.sandbox.pool.stock import look_program


def look(folder: Path, most_files: int) -> str:
    # Use other root folders than a sandbox has: other tests change this machine's own.
    program = look_program(most_files).replace('"/tmp", "/var/tmp", "/dev/shm", ', "").replace("/proc", str(folder))
    command = [sys.executable, "-I", "-c", program]
    return subprocess.check_output(command, cwd=folder, env={"HOME": str(folder)}, text=True)


def test_a_file_that_is_new_or_changed_or_of_another_mode_is_seen(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "kept.txt"
    file.write_text("1")
    looks = [look(tmp_path, 10), look(tmp_path, 10)]
    file.write_text("12")
    looks.append(look(tmp_path, 10))
    file.chmod(0o600)
    looks.append(look(tmp_path, 10))
    (tmp_path / "new.txt").touch()
    looks.append(look(tmp_path, 10))

    assert looks[0] == looks[1]
    assert len(set(looks)) == 4


def test_a_sandbox_with_more_files_than_are_looked_at_is_never_taken_for_clean(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()

    assert look(tmp_path, 5) == look(tmp_path, 5)
    assert look(tmp_path, 4) != look(tmp_path, 4)
