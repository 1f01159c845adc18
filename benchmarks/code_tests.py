"""Speed of scoring completions of code problems: 500 programs with 20 tests each on standard input, compared with one
plain Python process per test.

    python -m benchmarks code_tests [-- --completions 500 --tests 20]

`ours` is the whole rule `code_tests` of rayapp, from the completion's text to the reward, in sandboxes of this process.
`peer` does what most trainers do: it runs `python program.py` as a subprocess for each test, with a deadline and
without isolation. The two alternate. Each uses as many processes at once as there are cores, and runs all tests. Half
of the programs are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.report import print_report
from rayapp.config.agent import CodeSection
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.protocols import SandboxSource
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.code.assembling import RECURSION
from rayapp.tasks.code.hidden_cases import same_output
from rayapp.tasks.code.scoring import CodeProblem

CORES = len(os.sched_getaffinity(0))
RIGHT = "n = int(input())\nitems = list(map(int, input().split()))\nprint(*sorted(items)[:n])\n"
WRONG = RIGHT.replace("sorted(items)", "items")


def problem(num_tests: int) -> dict[str, list[str]]:
    items = [[(number * 7919 + at * 104729) % 1000 for at in range(50)] for number in range(num_tests)]
    return {
        "inputs": [f"{len(each)}\n{' '.join(map(str, each))}\n" for each in items],
        "outputs": [" ".join(map(str, sorted(each))) + "\n" for each in items],
    }


async def ours(source: SandboxSource, completions: int, tests: dict[str, list[str]], rules: CodeSection) -> float:
    """Return the seconds that rayapp's scoring takes."""
    row = CodeProblem(ground_truth=json.dumps(tests), rules=rules)
    at_once = asyncio.Semaphore(CORES)

    async def one(number: int) -> float:
        async with at_once:
            text = f"Sort them:\n```python\n{WRONG if number % 2 else RIGHT}```\n"
            return (await row.score(text, source, seed=0)).value

    started = time.perf_counter()
    rewards = await asyncio.gather(*map(one, range(completions)))
    assert rewards[:2] == [1.0, 0.0], rewards[:2]
    return time.perf_counter() - started


async def peer(program: Path, runs: int, tests: dict[str, list[str]]) -> float:
    """Return the seconds that scoring with one subprocess per test takes."""
    at_once = asyncio.Semaphore(CORES)
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))

    async def one(number: int) -> bool:
        given, wanted = pairs[number % len(pairs)]
        async with at_once:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(sys.executable, str(program), stdin=pipe, stdout=pipe)
            async with asyncio.timeout(6):
                said, _ = await process.communicate(given.encode())
        return same_output(wanted, "lines", said.decode())

    started = time.perf_counter()
    assert all(await asyncio.gather(*map(one, range(runs))))
    return time.perf_counter() - started


def cpu_s() -> float:
    """Return the processor time of this process, its descendants, and all descendants that have ended."""
    own = psutil.Process()
    return sum(map(_cpu_s, (own, *own.children(recursive=True))))


def _cpu_s(process: psutil.Process) -> float:
    """Return a process's processor time. It is 0 if the process has ended, because its parent then counts the time."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return executions per second (median of the rounds), and processor time per execution, which does not depend on
    the machine's load.
    """
    tests = problem(options.tests)
    rules = CodeSection(score="share", max_tests=0)
    part, peer_part = options.completions // options.rounds, options.peer_runs // options.rounds
    rates: dict[str, list[float]] = {"ours": [], "peer": []}
    cpu = {"ours": 0.0, "peer": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(f"{RECURSION}\n{RIGHT}")  # noqa: ASYNC240  (before anything is timed)
        async with open_pool(SandboxConfig(), f"benchmark-{os.getpid()}") as (source, _):
            await ours(source, 2, tests, rules)
            for _ in range(options.rounds):
                before = cpu_s()
                rates["ours"].append(part * options.tests / await ours(source, part, tests, rules))
                between = cpu_s()
                rates["peer"].append(peer_part / await peer(program, peer_part, tests))
                cpu["ours"] += between - before
                cpu["peer"] += cpu_s() - between
    counts = {"ours": part * options.tests * options.rounds, "peer": peer_part * options.rounds}
    return {
        "executions_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "cpu_ms_per_execution": {name: cpu[name] * 1000 / counts[name] for name in cpu},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=500)
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-runs", type=int, default=200)
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    rate, cpu_ms = found["executions_per_s"], found["cpu_ms_per_execution"]
    ratios = {
        "executions_per_s_over_plain_python": rate["ours"] / rate["peer"],
        "cpu_of_plain_python_over_ours": cpu_ms["peer"] / cpu_ms["ours"],
    }
    print_report(options, ratios, **found)


if __name__ == "__main__":
    main()
