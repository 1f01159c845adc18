"""The watcher that runs inside a remote sandbox, started here as a plain process: programs of our own only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rayapp.sandbox.verdict.program import new_nonce, source
from support.timing import lives, until


async def test_code_does_not_outlive_a_watcher_that_was_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()) + '\\n')\nwhile True: pass"
    job = {
        "kind": "script", "code": code, "stdin": "", "nonce": new_nonce(), "timeout_s": 100.0,
        "max_output_bytes": 1000, "env": {},
    }  # fmt: skip
    watcher = subprocess.Popen([sys.executable, "-I", "-c", source(job)], stdout=subprocess.DEVNULL)
    try:
        await until(lambda: told.exists() and told.read_text().endswith("\n"))
        candidate = int(told.read_text())
        assert candidate != watcher.pid
        assert lives(candidate)
    finally:
        watcher.kill()
        watcher.wait()

    await until(lambda: not lives(candidate))
