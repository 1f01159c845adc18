"""Facts behind the numbers of a benchmark: the commit, the machine, and the limits of its cores and memory."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.machine import instruction_set

ROOT = Path(__file__).resolve().parent.parent
LOAD_BEFORE = os.getloadavg()[0]
"""Load average when this module was imported, which is before any measurement."""
PROGRAM = ("rayapp", "actors", "benchmarks", "runtime_env", ":!benchmarks/records")
"""Git pathspecs of the files that must be committed for a record to name its commit."""


def describe() -> dict[str, object]:
    """Return commit, processor and versions."""
    import torch
    import transformers

    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", *PROGRAM)),
        "cpu": _cpu_name(),
        "instructions": instruction_set(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_before": LOAD_BEFORE,
    }


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of one process."""

    command: str
    resident_mib: float
    proportional_mib: float
    """A page that several processes share is divided among them."""


def memory_below(roots: Collection[int]) -> list[ProcessMemory]:
    """Return the memory of these processes and of all processes below them. Leaves out those that end meanwhile."""
    found, waiting = [], list(roots)
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
            fields = dict(line.split()[:2] for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            found.append(ProcessMemory(command, int(fields["Rss:"]) / 1024, int(fields["Pss:"]) / 1024))
    return found


def python_unit_s(rounds: int = 20) -> float:
    """Return the CPU seconds of a fixed piece of plain Python on one core: the unit for costs of rayapp's own Python
    code.

    The result is the best of several rounds. A cost in this unit is nearly the same on a slower or busy machine.
    """
    document = {"turns": [{"text": f"turn {n} of a conversation", "tokens": list(range(64))} for n in range(8)]}
    seconds = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(10):
            copied = json.loads(json.dumps(document))
            sum(token * 3 % 7 for turn in copied["turns"] for token in turn["tokens"])
        seconds.append(time.thread_time() - started)
    return min(seconds)


def measure_limits() -> dict[str, float]:
    """Return the machine's limits, the best of a few rounds: the rate of matrix products in the model's own shapes, and
    of memory streams.
    """
    import torch

    def gflops(dtype: torch.dtype) -> float:
        rows, inner, columns = 2048, 576, 1536
        left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
        return 2 * rows * inner * columns / _best(lambda: torch.nn.functional.linear(left, right)) / 1e9

    source = torch.randn(64 * 2**20)
    target = torch.empty_like(source)
    return {
        "gemm_bfloat16_gflops": gflops(torch.bfloat16),
        "gemm_float32_gflops": gflops(torch.float32),
        "memory_copy_gb_per_s": 2 * source.nbytes / _best(lambda: target.copy_(source)) / 1e9,
        "memory_read_gb_per_s": source.nbytes / _best(source.sum) / 1e9,
    }


def _best(run: Callable[[], object], rounds: int = 8) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
