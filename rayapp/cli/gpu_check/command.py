"""`rayapp gpu-check`: check everything on this machine's GPUs that a run uses, in minutes, without a download.

Each check runs in its own process, so that a check that crashes or hangs is a row in the table, and the rest still run.
`run_check` starts it as

    python -m rayapp.cli.gpu_check.command NAME CONTEXT.json RESULT.json
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rayapp.cli.arguments import EXIT_FAILED
from rayapp.cli.gpu_check.checks import BY_NAME, CHECKS, CheckContext, CheckResult, GpuCheck
from rayapp.core import __version__
from rayapp.core.errors import InputError
from rayapp.core.files import write_text
from rayapp.core.logs import visible

PATIENCE_S = 20.0
"""Seconds that a check may take to end after SIGTERM: a run must end Ray's processes."""
LOG_CHARS = 4000
COMMAND = (sys.executable, "-m", __name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One row of the table."""

    name: str
    what: str
    outcome: CheckResult
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "what": self.what, "seconds": self.seconds, **asdict(self.outcome)}


def run_check(check: GpuCheck, context: CheckContext) -> ResultRow:
    """Run a check in its own process and return its row, also if it fails, crashes or hangs. Waits at most for the
    check's deadline and `PATIENCE_S`."""
    if why_not := check.why_not(context):
        return ResultRow(
            name=check.name, what=check.what, outcome=CheckResult(level="left out", figure=why_not), seconds=0.0
        )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"rayapp-{check.name}-", dir=context.folder) as folder:
        outcome = _in_process(check, context, Path(folder))
    return ResultRow(name=check.name, what=check.what, outcome=outcome, seconds=time.monotonic() - started)


def _in_process(check: GpuCheck, context: CheckContext, folder: Path) -> CheckResult:
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
        return CheckResult(**json.loads(result.read_text()))
    return CheckResult(
        level="problem", figure=f"ended with exit code {process.returncode}: {_last_line(log)}",
        cure="the end of its log is in the report", details={"log": _tail(log)},
    )  # fmt: skip


def _hung(check: GpuCheck, log: Path) -> CheckResult:
    return CheckResult(
        level="problem", figure=f"no result within {check.deadline_s:g} s; its last line: {_last_line(log)}",
        cure=f"run this check alone, with NCCL's log: NCCL_DEBUG=INFO rayapp gpu-check --only {check.name}",
        details={"log": _tail(log)},
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the check's process group: SIGTERM first, SIGKILL if that isn't enough."""
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
    """Run a check in this process and write its result to a file (the entry point of the check's process)."""
    values = json.loads(Path(given).read_text())
    context = CheckContext(**values | {"folder": Path(values["folder"])})
    try:
        outcome = BY_NAME[name].run(context)
    except Exception as error:  # boundary: anything may be wrong with a machine
        import traceback

        lines = traceback.format_exc()
        first = str(error).strip().partition("\n")[0]
        outcome = CheckResult(
            level="problem", figure=f"{type(error).__name__}: {first}"[:300],
            cure="docs/troubleshoot.md explains messages; the report has the whole message",
            details={"log": lines[-LOG_CHARS:]},
        )  # fmt: skip
    write_text(Path(result), json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(*sys.argv[1:])


app = typer.Typer()


def print_rows(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Print each check's row as soon as the check ends; return all rows."""
    done = []
    for row in rows:
        done.append(row)
        print(
            f"{row.outcome.level:>8}  {row.name:<12} {visible(row.outcome.figure)}  [{row.seconds:.0f} s]", flush=True
        )
        if row.outcome.cure:
            print(f"{'':>8}  {'':<12} do: {visible(row.outcome.cure)}", flush=True)
    return done


def report_of(rows: Sequence[ResultRow], context: CheckContext) -> dict[str, Any]:
    """Return the report to add to an issue. It holds this machine's hardware and software, and no user, host or path
    except the model's."""
    return {
        "rayapp": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "device": context.device,
        "num_gpus": context.num_gpus,
        "model": context.model or "random weights",
        "rows": [row.as_json() for row in rows],
    }


def chosen(only: Sequence[str]) -> list[GpuCheck]:
    """Return the checks of these names, or all checks if none is given.

    Raises:
        InputError: a name is unknown.
    """
    if unknown := [name for name in only if name not in BY_NAME]:
        raise InputError(f"--only {', '.join(unknown)}: no such check. There are {', '.join(BY_NAME)}.")
    return [check for check in CHECKS if not only or check.name in only]


def gpus_here() -> int:
    """Count GPUs in a child process, because CUDA in this process would take memory on the GPUs to check."""
    import subprocess

    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.split()[-1])


@app.command(
    name="gpu-check",
    epilog="Examples:\n\n"
    "  rayapp gpu-check\n\n"
    "  rayapp gpu-check --gpus 2 --model Qwen/Qwen2.5-Coder-1.5B-Instruct\n\n"
    "  rayapp gpu-check --device cpu --only gemm --only all-reduce",
)
def gpu_check(
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs to check; 0: all of this machine, at most 8")] = 0,
    device: Annotated[str, typer.Option(help="gpu, or cpu to try the checks themselves")] = "gpu",
    model: Annotated[str, typer.Option(help="A model's folder or hub id, in place of random weights")] = "",
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(BY_NAME)}; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="The report, to add to an issue")] = Path("gpu-check.json"),
) -> None:
    """Check driver, GPU links, matrix products, vLLM, each weight transport and three steps of training. Exits with 1
    and a cure for each problem. Downloads nothing. Each check is a process with a deadline."""
    if device not in ("gpu", "cpu"):
        raise InputError(f"--device {device!r}: use gpu or cpu.")
    checks = chosen(only or ())
    with tempfile.TemporaryDirectory(prefix="rayapp-gpu-check-") as folder:
        context = CheckContext(
            device="gpu" if device == "gpu" else "cpu",
            num_gpus=_count(device, gpus),
            model=model,
            folder=Path(folder),
        )
        rows = print_rows(run_check(check, context) for check in checks)
    write_text(out, json.dumps(report_of(rows, context), indent=1) + "\n")
    num_problems = sum(row.outcome.level == "problem" for row in rows)
    print(f"{num_problems} problems of {len(rows)} checks; the report is {out}: add it to an issue")
    raise typer.Exit(EXIT_FAILED if num_problems else 0)


def _count(device: str, asked: int) -> int:
    """Return the number of GPUs to use.

    Raises:
        InputError: the machine has fewer than asked for.
    """
    if device == "cpu":
        return 0
    have = gpus_here()
    if have == 0 or have < asked:
        raise InputError(
            f"--gpus {asked or 'all'}: torch finds {have or 'no'} GPUs on this machine. `nvidia-smi` shows the "
            "driver; `make venv DEVICE=gpu` installs the build for GPUs; --device cpu tries the checks without a GPU."
        )
    return asked or min(have, 8)
