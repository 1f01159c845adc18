"""`rayapp gpu-check`: what this machine's GPUs do with everything that a run needs, in minutes, without a download."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rayapp.cli.arguments import EXIT_FAILED
from rayapp.cli.gpu_check.checks import BY_NAME, CHECKS, Check
from rayapp.cli.gpu_check.outcome import CheckContext
from rayapp.cli.gpu_check.processes import Row, run_check
from rayapp.core.errors import InputError
from rayapp.core.files import write_text
from rayapp.core.terminal import visible
from rayapp.core.version import __version__

app = typer.Typer()


def print_rows(rows: Iterable[Row]) -> list[Row]:
    """Print each as it comes."""
    done = []
    for row in rows:
        done.append(row)
        print(
            f"{row.outcome.level:>8}  {row.name:<12} {visible(row.outcome.figure)}  [{row.seconds:.0f} s]", flush=True
        )
        if row.outcome.cure:
            print(f"{'':>8}  {'':<12} do: {visible(row.outcome.cure)}", flush=True)
    return done


def report_of(rows: Sequence[Row], context: CheckContext) -> dict[str, Any]:
    """What to add to an issue. It names this machine's hardware and software; no user, host or path but the model's."""
    return {
        "rayapp": __version__,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "device": context.device,
        "num_gpus": context.num_gpus,
        "model": context.model or "random weights",
        "rows": [row.as_json() for row in rows],
    }


def chosen(only: Sequence[str]) -> list[Check]:
    """The checks of these names, all for none.

    Raises:
        InputError: there is no check of a name.
    """
    if unknown := [name for name in only if name not in BY_NAME]:
        raise InputError(f"--only {', '.join(unknown)}: no such check. There are {', '.join(BY_NAME)}.")
    return [check for check in CHECKS if not only or check.name in only]


def gpus_here() -> int:
    """In a process of its own: a parent that has initialised CUDA holds memory on the GPUs that are checked."""
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
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to check; 0: all of this machine, at most 8")] = 0,
    device: Annotated[str, typer.Option(help="gpu; or cpu, which tries the checks themselves")] = "gpu",
    model: Annotated[str, typer.Option(help="A model's folder or hub id, in place of random weights")] = "",
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(BY_NAME)}; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="The report, to add to an issue")] = Path("gpu-check.json"),
) -> None:
    """Check driver, links, products, vLLM, each weight transport and three steps of training; exits with 1 and what to
    do if something is wrong. Downloads nothing. Each check is a process with a deadline."""
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
    """GPUs to use.

    Raises:
        InputError: there are fewer.
    """
    if device == "cpu":
        return 0
    have = gpus_here()
    if have == 0 or have < asked:
        raise InputError(
            f"{asked or 'some'} GPUs are to be checked, but torch finds {have} on this machine. `nvidia-smi` has the "
            "driver; `make venv DEVICE=gpu` the build for GPUs; --device cpu tries the checks without."
        )
    return asked or min(have, 8)
