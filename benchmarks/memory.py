"""Peak memory of `rayapp train` by process, of a few steps of a config.

    python -m benchmarks.memory [--steps 2] [--config configs/coding_cpu.yaml] [--json] [KEY=VALUE ...]

Starts the command as a user does. Once a second it reads the proportional set size of the command and of all processes
below it; a page that several processes share is divided among them. The ratio is the model's weights, gradients and
moments in float32, which nothing can be trained without, over the peak of all processes together.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.machine import ROOT, ProcessMemory, memory_below
from benchmarks.report import print_report
from rayapp.config.loading import load_config
from rayapp.runs.tracking.metrics import read_metrics

ROLES = {
    "learner": r"^ray::.*(Learner|learner-\d)",
    "engine": r"^VLLM::",
    "server": r"^ray::.*(VllmServer|vllm-server-\d)",
    "rollout worker": r"^ray::.*(RolloutWorker|rollout-worker-\d)",
    "sandbox pool": r"^ray::.*(PoolActor|sandbox-pool)",
    "sandboxes": r"rayapp\.sandbox\.local",
    "Ray": r"^ray::|/ray/",
    "driver": r"-m rayapp train",
}
"""Regular expressions of command lines; the first that matches names the process's role. Ray names an actor's process
after its class or after the actor itself, e.g. `learner-0`."""


def role_of(command: str) -> str:
    """Return the role of a process by its command line."""
    return next((role for role, pattern in ROLES.items() if re.search(pattern, command)), "others")


def by_role(processes: Iterable[ProcessMemory]) -> dict[str, float]:
    """Return the MiB of each role's processes together."""
    found: dict[str, float] = defaultdict(float)
    for each in processes:
        found[role_of(each.command)] += each.proportional_mib
    return found


def train(settings: argparse.Namespace, work: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Train in the folder `work`. Returns the MiB of each role at the moment of the peak of all processes together,
    and each role's own peak."""
    command = [
        sys.executable, "-m", "rayapp", "train", settings.config, f"train.num_steps={settings.steps}",
        "eval.every_steps=0", f"run.output_dir={work}", "run.name=memory", *settings.overrides,
    ]  # fmt: skip
    at_peak: dict[str, float] = {}
    peaks: dict[str, float] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as run:
        while run.poll() is None:
            now = by_role(memory_below([run.pid]))
            at_peak = max(at_peak, now, key=lambda roles: sum(roles.values()))
            peaks |= {role: max(mib, peaks.get(role, 0.0)) for role, mib in now.items()}
            time.sleep(1.0)
    if run.returncode:
        raise SystemExit(f"rayapp train ended with {run.returncode}")
    return at_peak, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config", default="configs/coding_cpu.yaml")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="accepted like in the other benchmarks: the report is JSON")
    settings = parser.parse_args()
    model = Path(load_config(settings.config, settings.overrides).model.path)
    with tempfile.TemporaryDirectory() as folder:
        at_peak, peaks = train(settings, Path(folder))
        steps = read_metrics(Path(folder) / "memory" / "metrics.jsonl")
    # Float32 is twice the file's bfloat16; weights, gradients and two moments are four of it.
    needed_gib = 8 * sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**30
    peak_gib = sum(at_peak.values()) / 1024
    print_report(
        settings,
        {"weights, gradients and moments over the peak": needed_gib / peak_gib},
        peak_gib=peak_gib,
        mib_at_the_peak={role: round(mib) for role, mib in sorted(at_peak.items())},
        own_peaks_mib={role: round(mib) for role, mib in sorted(peaks.items())},
        step_s=[step["timing_s/step"] for step in steps if "timing_s/step" in step],
        train_s=[step["timing_s/train"] for step in steps if "timing_s/train" in step],
    )


if __name__ == "__main__":
    main()
