"""The pool under fire: executions with known verdicts while 5% of all calls to the providers fail, in every way.

    python benchmarks/sandbox_faults.py                       10,000 executions, about half an hour on 2 cores
    python benchmarks/sandbox_faults.py -n 600 --share 0.2

Services on loopback, reached through the real SDKs of E2B, Daytona and MCP. Prints JSON; exits with 1 if a verdict was
wrong, a sandbox leaked or a lease hung. It measures no speed: what fails has to wait for its deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time

from rayapp.sandbox.testing.fault_run import FaultRun, Outcome, run_with_faults


async def watched(run: FaultRun) -> Outcome:
    """The run, with a line on standard error every half a minute."""
    outcome, started = Outcome(), time.monotonic()

    async def watch() -> None:
        while True:
            await asyncio.sleep(30)
            wrong, invalid = len(outcome.wrong), sum(outcome.invalid.values())
            done = f"{outcome.executions} executions, {wrong} wrong, {invalid} invalid, {outcome.retried} retried"
            print(f"{time.monotonic() - started:.0f} s: {done}", file=sys.stderr, flush=True)

    watching = asyncio.create_task(watch())
    try:
        return await run_with_faults(run, outcome)
    finally:
        watching.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--executions", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.05, help="of calls that fail")
    parser.add_argument("--concurrency", type=int, default=12, help="executions at once per provider")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", "--verbose", action="store_true", help="the log of what failed, on standard error")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.CRITICAL, stream=sys.stderr)
    run = FaultRun(
        executions=options.executions, share=options.share, concurrency=options.concurrency, seed=options.seed
    )
    started = time.monotonic()
    report = asyncio.run(watched(run)).report()
    print(
        json.dumps(
            report | {"share": run.share, "seed": run.seed, "wall_s": round(time.monotonic() - started)}, indent=2
        )
    )
    return int(any(report[key] for key in ("wrong_verdicts", "leaked_sandboxes", "hung_executions", "hung_leases")))


if __name__ == "__main__":
    sys.exit(main())
