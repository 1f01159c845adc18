"""A check in a process of its own, so that whatever becomes of it is a row in the table: `run_check`.

python -m rayapp.cli.gpu_check.processes NAME CONTEXT.json RESULT.json       (what `run_check` starts)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayapp.cli.gpu_check.checks import BY_NAME, Check
from rayapp.cli.gpu_check.outcome import CheckContext, Outcome
from rayapp.core.files import write_text

PATIENCE_S = 20.0
"""How long a check that is told to end may take: a run of Ray takes its processes down."""
LOG_CHARS = 4000
COMMAND = (sys.executable, "-m", __name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    what: str
    outcome: Outcome
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "what": self.what, "seconds": self.seconds, **asdict(self.outcome)}


def run_check(check: Check, context: CheckContext) -> Row:
    """Its row, whether it ends well, fails, dies or hangs. Waits at most its deadline and `PATIENCE_S`."""
    if why_not := check.why_not(context):
        return Row(name=check.name, what=check.what, outcome=Outcome(level="left out", figure=why_not), seconds=0.0)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"rayapp-{check.name}-", dir=context.folder) as folder:
        outcome = _in_process(check, context, Path(folder))
    return Row(name=check.name, what=check.what, outcome=outcome, seconds=time.monotonic() - started)


def _in_process(check: Check, context: CheckContext, folder: Path) -> Outcome:
    work = folder / "work"
    work.mkdir()
    given, result, log = folder / "context.json", folder / "result.json", folder / "log"
    given.write_text(json.dumps(asdict(context) | {"folder": str(work)}))
    command = [*COMMAND, check.name, str(given), str(result)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(check.deadline_s)
        except subprocess.TimeoutExpired:
            return _hung(check, log)
        finally:
            _end(process)
    if result.is_file():
        return Outcome(**json.loads(result.read_text()))
    return Outcome(
        level="problem", figure=f"ended with exit code {process.returncode}: {_last_line(log)}",
        cure="the end of its log is in the report", details={"log": _tail(log)},
    )  # fmt: skip


def _hung(check: Check, log: Path) -> Outcome:
    return Outcome(
        level="problem", figure=f"nothing within {check.deadline_s:g} s; its last line: {_last_line(log)}",
        cure=f"alone and with what it prints: NCCL_DEBUG=INFO rayapp gpu-check --only {check.name}",
        details={"log": _tail(log)},
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the check and what it started, politely first."""
    for number, patience_s in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, PATIENCE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_CHARS:]


def _last_line(log: Path) -> str:
    return (_tail(log).strip().splitlines() or ["it printed nothing"])[-1][:200]


def main(name: str, given: str, result: str) -> None:
    """In the check's process: run it, and leave what it found."""
    values = json.loads(Path(given).read_text())
    context = CheckContext(**values | {"folder": Path(values["folder"])})
    try:
        outcome = BY_NAME[name].run(context)
    except Exception as error:  # boundary: anything may be wrong with a machine
        import traceback

        lines = traceback.format_exc()
        first = str(error).strip().partition("\n")[0]
        outcome = Outcome(
            level="problem", figure=f"{type(error).__name__}: {first}"[:300],
            cure="docs/troubleshoot.md has messages; the whole one is in the report",
            details={"log": lines[-LOG_CHARS:]},
        )  # fmt: skip
    write_text(Path(result), json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(*sys.argv[1:])
