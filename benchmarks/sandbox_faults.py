"""Fault test of the pool: executions with known verdicts, while 5% of all calls to the providers fail in various ways.

    python benchmarks/sandbox_faults.py                       10,000 executions, about ten minutes on 2 quiet cores
    python benchmarks/sandbox_faults.py -n 600 --share 0.2

Several processes call services on loopback, each its own, through the real SDKs of E2B, Daytona and MCP. The output is
JSON. The exit status is 1 if a verdict was wrong, a sandbox leaked or a lease hung. No speed is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from typing import Any

from rayapp.sandbox.local.levels import kernel
from support.faults.run import FaultRun, Outcome, run_with_faults


def end_with_parent() -> None:
    """Send this process Ctrl-C when its parent ends, so that it stops its services and their sandboxes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGINT)


def one_process(run: FaultRun) -> Outcome:
    """Run one process's part of the test, with a line on standard error every 30 s."""
    logging.basicConfig(level=logging.CRITICAL, stream=sys.stderr)
    try:
        return asyncio.run(watched(run))
    except KeyboardInterrupt:
        os._exit(130)  # exit: the executor would take an exception as a result, and the worker would wait for more work


async def watched(run: FaultRun) -> Outcome:
    outcome, started = Outcome(), time.monotonic()

    async def watch() -> None:
        while True:
            await asyncio.sleep(30)
            wrong, invalid = len(outcome.wrong), sum(outcome.invalid.values())
            done = f"{outcome.executions} executions, {wrong} wrong, {invalid} invalid, {outcome.retried} retried"
            print(f"process {run.seed}, {time.monotonic() - started:.0f} s: {done}", file=sys.stderr, flush=True)

    watching = asyncio.create_task(watch())
    try:
        return await run_with_faults(run, outcome)
    finally:
        watching.cancel()


def parts(run: FaultRun, num_processes: int) -> list[FaultRun]:
    """Split a run into parts, each with its own seed."""
    sizes = [run.executions // num_processes + (i < run.executions % num_processes) for i in range(num_processes)]
    return [replace(run, executions=size, seed=run.seed + index) for index, size in enumerate(sizes)]


def report_of(outcome: Outcome) -> dict[str, object]:
    """Return the counts as plain data for JSON."""
    invalid = sum(outcome.invalid.values())
    return {
        "executions": outcome.executions,
        "wrong_verdicts": len(outcome.wrong),
        "wrong_examples": outcome.wrong[:5],
        "leaked_sandboxes": sum(outcome.leaked.values()),
        "leaked_by_provider": outcome.leaked,
        "hung_executions": outcome.hung,
        "hung_leases": outcome.leases_left,
        "reclaimed_leases": outcome.reclaimed,
        "retried_share": outcome.retried / max(1, outcome.executions),
        "invalid_share": invalid / max(1, outcome.executions),
        "invalid_by_kind": dict(outcome.invalid),
        "verdicts": dict(outcome.verdicts),
        "strays_ended": outcome.strays_ended,
        "reported_left": outcome.reported_left,
        "faults_injected": sum(outcome.injected.values()),
        "faults_by_call": outcome.injected,
    }


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the sum of several runs' outcomes."""
    total = Outcome()
    for outcome in outcomes:
        for each in fields(Outcome):
            setattr(total, each.name, _sum(getattr(total, each.name), getattr(outcome, each.name)))
    return total


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return type(one)({key: one.get(key, 0) + other.get(key, 0) for key in [*one, *(set(other) - set(one))]})
    return one + other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--executions", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.05, help="of calls that fail")
    parser.add_argument("--concurrency", type=int, default=12, help="executions at once per provider")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    run = FaultRun(
        executions=options.executions, share=options.share, concurrency=options.concurrency, seed=options.seed
    )
    started = time.monotonic()
    # Don't fork: a child would share the connections of its parent.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawned, initializer=end_with_parent) as pool:
        outcomes = list(pool.map(one_process, parts(run, options.processes)))
    report = report_of(merged(outcomes))
    told = {"share": run.share, "seed": run.seed, "processes": options.processes}
    print(json.dumps(report | told | {"wall_s": round(time.monotonic() - started)}, indent=2))
    return int(any(report[key] for key in ("wrong_verdicts", "leaked_sandboxes", "hung_executions", "hung_leases")))


if __name__ == "__main__":
    sys.exit(main())
