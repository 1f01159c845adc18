"""Speed of verl's scoring of code over `rayapp sandbox serve`, compared with verl's own `prime_code` on this machine.

    python -m benchmarks sandbox_fusion [-- --completions 500 --tests 20]

The rows and completions are those of `code_tests`. Half of the programs are wrong. Two ways of scoring alternate,
each with as many completions at once as there are cores:

    prime_code   verl's scorer for machines without a sandbox service: the tests run in a child of this process
    run_code     verl's scorer with `sandbox_fusion.url`, which sends one request a test
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from benchmarks.code_tests import CORES, RIGHT, WRONG, problem
from benchmarks.machine import ROOT
from benchmarks.report import print_report


@contextmanager
def service() -> Iterator[str]:
    command = [sys.executable, "-m", "rayapp", "sandbox", "serve", "--no-key", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield line.split()[2]
        process.terminate()


def text(number: int) -> str:
    return f"Sort them:\n```python\n{WRONG if number % 2 else RIGHT}```\n"


def by_prime_code(tests: str, number: int) -> float:
    from verl.utils.reward_score import default_compute_score

    return float(default_compute_score("codecontests", text(number), tests))


def by_run_code(url: str, tests: str, number: int) -> float:
    from verl.utils.reward_score import default_compute_score

    logging.getLogger("verl").setLevel(logging.CRITICAL)
    return float(default_compute_score("codecontests", text(number), tests, sandbox_fusion_url=f"{url}/run_code"))


def rate(workers: ProcessPoolExecutor, score: Callable[[int], float], num: int) -> tuple[float, list[float]]:
    """Score `num` completions. Return completions per second, and the scores."""
    started = time.perf_counter()
    scores = list(workers.map(score, range(num)))
    return num / (time.perf_counter() - started), scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=500)
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tests, part = json.dumps(problem(options.tests)), options.completions // options.rounds
    rates: dict[str, list[float]] = {"prime_code": [], "run_code": []}
    num_different = 0
    with service() as url, ProcessPoolExecutor(CORES, mp_context=get_context("fork")) as workers:
        ways = {
            "prime_code": partial(by_prime_code, tests),
            "run_code": partial(by_run_code, url, tests),
        }
        for way in ways.values():
            rate(workers, way, CORES)
        for _ in range(options.rounds):
            scores = {}
            for name, way in ways.items():
                found, scores[name] = rate(workers, way, part)
                rates[name].append(found)
            columns = zip(*scores.values(), strict=True)
            num_different += sum(len({score == 1.0 for score in column}) > 1 for column in columns)
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        "run_code_over_prime_code": median["run_code"] / median["prime_code"],
    }
    print_report(options, ratios, completions_per_s=median, verdicts_that_differ=num_different)


if __name__ == "__main__":
    main()
