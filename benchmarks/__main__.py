"""Runs benchmarks, compares their ratios with the last record, and records them: python -m benchmarks [NAME ...]

    python -m benchmarks                            the default set, a few minutes
    python -m benchmarks grpo_step -- --rounds 2    one benchmark, with its own arguments
    python -m benchmarks --accept driver            record a loss whose cause is known

A benchmark whose ratio lost more than 5% is measured a second time, and the better ratio counts: other programs on the
machine disturb one measurement, but a slower rayapp is slower in both. The exit status is 1 if a ratio is still lost,
or if a benchmark failed. A report is written to benchmarks/records if no ratio was lost and the working tree has no
uncommitted changes. Commit the record yourself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.history import MAX_LOSS, Compared, better_of, check, compare, last_record, record_path, table
from benchmarks.machine import ROOT
from benchmarks.report import parse_report

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
MODEL = "models/smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark with its default arguments."""

    arguments: tuple[str, ...] = ()
    is_default: bool = False
    """True if `make bench` includes the benchmark, because it takes at most a few minutes and needs only this project's
    environment."""


BENCHMARKS = {
    "starts": Benchmark(is_default=True),
    "agent_loop": Benchmark(is_default=True),
    "growth": Benchmark(arguments=("--lengths", "25,50,100,200", "--trajectories", "20")),
    "gateway": Benchmark(is_default=True),
    "driver": Benchmark(arguments=("--groups", "200", "--steps", "8"), is_default=True),
    "sandbox": Benchmark(arguments=("--json",), is_default=True),
    "weight_sync": Benchmark(arguments=(MODEL,), is_default=True),
    "agent_vllm": Benchmark(),
    "code_tests": Benchmark(is_default=True),
    "sandbox_fusion": Benchmark(is_default=True),
    "async_vs_sync": Benchmark(),
    "images": Benchmark(),
    "memory": Benchmark(),
    "grpo_step": Benchmark(arguments=("--rounds", "5")),
    "learner": Benchmark(),
    "checkpoints": Benchmark(),
    "storage": Benchmark(arguments=("--json",)),
}


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a benchmark and return its report. The benchmark's standard error is shown while it runs.

    Raises:
        subprocess.CalledProcessError: the benchmark failed.
        ValueError: the benchmark's output is not a report.
    """
    paths = [str(ROOT), str(HERE), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *(arguments or BENCHMARKS[name].arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report = parse_report(done.stdout)
    check(report)
    return report


def measure(name: str, arguments: list[str], records: Path = RECORDS) -> dict[str, Any]:
    """Run a benchmark; run it a second time if a ratio is lost. Raises the errors of `run`."""
    report = run(name, arguments)
    lost = [each.name for each in compare(report, last_record(records / name, report)) if each.is_lost]
    if not lost:
        return report
    print(f"{name}: lost {', '.join(lost)}; measuring once more", flush=True)
    return better_of(report, run(name, arguments))


def judge(name: str, report: dict[str, Any], *, accept: bool, records: Path = RECORDS) -> bool:
    """Compare a report with the last record, print the result, and record the report if it may be recorded. Return
    False if a ratio was lost.
    """
    folder, machine = records / name, report["machine"]
    before = last_record(folder, report)
    compared = compare(report, before)
    since = f"since {before['machine']['commit'][:12]}, {before['recorded_at'][:10]}" if before else "no record yet"
    print(f"{name}: {since}; load of {machine['load_before']:.1f} before it\n{table(compared)}")
    lost = [each for each in compared if each.is_lost]
    reason = why_not_recorded(report, lost, accept=accept)
    if reason:
        print(f"  not recorded: {reason}", flush=True)
    else:
        print(f"  recorded: {write_record(folder, report)}", flush=True)
    return not lost or accept


def why_not_recorded(report: dict[str, Any], lost: list[Compared], *, accept: bool) -> str:
    """Return the reason not to record a report; empty if it may be recorded."""
    # Don't record a loss unasked: it would become the baseline of the next run, and would never be reported again.
    if lost and not accept:
        names = ", ".join(each.name for each in lost)
        return (
            f"{names} lost more than {MAX_LOSS:.0%}: correct the cause, or record the loss with --accept and explain "
            "it in the commit"
        )
    if report["machine"]["uncommitted"]:
        return "the program has uncommitted changes, so the record could not name its commit"
    return ""


def write_record(folder: Path, report: dict[str, Any]) -> Path:
    path = record_path(folder, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = report | {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--accept", action="store_true", help="record ratios that were lost")
    given = sys.argv[1:]
    mark = given.index("--") if "--" in given else len(given)
    options, arguments = parser.parse_args(given[:mark]), given[mark + 1 :]
    names = options.names or [name for name, benchmark in BENCHMARKS.items() if benchmark.is_default]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no recorded benchmark {unknown[0]}; there are: {', '.join(BENCHMARKS)}")
    if arguments and len(names) != 1:
        parser.error("arguments after -- are for one benchmark; name it")
    outcomes = [_one(name, arguments, accept=options.accept) for name in names]
    return int(not all(outcomes))


def _one(name: str, arguments: list[str], *, accept: bool) -> bool:
    """Run one benchmark and judge it. If it fails, print the failure and return False, so that the other benchmarks
    still run.
    """
    try:
        report = measure(name, arguments)
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"{name}: FAILED: {error}", flush=True)
        return False
    return judge(name, report, accept=accept)


if __name__ == "__main__":
    sys.exit(main())
