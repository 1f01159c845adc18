"""Grades the forged verdicts of the adversarial suite by the rules of other projects, and prints a table.

    python benchmarks/adversarial_peers.py [--json]

No code of those projects is fetched or copied: each rule is stated in one line and written anew in a few lines, so the
table compares rules, not products. Each rule runs in a plain Python process as an unprivileged user, with the
candidate's code in the place where the rule puts it. `ours` grades in a sandbox, as `rayapp score` does. A second table
grades thirty agents that cheat in a workspace (`adversarial_agents.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adversarial_agents
import numpy as np
import yaml

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.types import Prompt
from rayapp.sandbox.local.inside.privileges import leave_root
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.client import PoolClient
from rayapp.tasks.coding import CodingTask

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS: list[dict[str, Any]] = [
    program
    for program in yaml.safe_load((ROOT / "tests/adversarial/verdicts.yaml").read_text())
    # Left out: programs that test rayapp's lists of banned names or rayapp's policies, and programs that would kill
    # this benchmark.
    if program.get("status") != "banned" and program.get("compare", True)
]
TIMEOUT_S = 3.0
MAX_OUTPUT_BYTES = 4 << 20
LIMITED = ("prlimit", f"--as={1 << 30}", "--cpu=5", f"--fsize={64 << 20}", "--nproc=256", "--core=0")
"""Resource limits for the compared rules, none of which sets any. Without limits, endless output alone took 10 GB of
memory before the deadline.
"""
INPUTS = [[83, 5, 41, 77, 2], [9, 8, 7], [4, 90, 13, 13, 1], [6, 1, 5], [50, 20, 70, 10]]
EXPECTED = [sorted(items) for items in INPUTS]

APPENDED_ASSERTS = """
{code}
assert f({inputs[0]}) == {expected[0]}
assert f({inputs[1]}) == {expected[1]}
assert f({inputs[2]}) == {expected[2]}
assert f({inputs[3]}) == {expected[3]}
assert f({inputs[4]}) == {expected[4]}
"""
LAST_LINE = """
import json
{code}
def runner():
    results = []
    for items in {inputs}:
        try:
            results.append(f(items.copy()) == sorted(items))
        except Exception:
            results.append(False)
    print(json.dumps({{"results": results}}))
runner()
"""
IN_PROCESS = """
import json, sys
def check(code, inputs, expected_outputs):
    names = {{}}
    try:
        exec(code, names)
        for items, expected in zip(inputs, expected_outputs):
            if not names["f"](items) == expected:
                return False
    except BaseException:
        return False
    return True
verdict = check({code!r}, {inputs}, {expected})
with open(sys.argv[1], "w") as file:
    file.write(json.dumps(verdict))
"""
LINES_OF_OUTPUT = """
{code}
for items in {inputs}:
    print(f(items))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Output and exit status of a plain process."""

    status: int
    lines: list[str]
    report: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The grading rule of one library."""

    name: str
    rule: str
    template: str
    is_paid: Callable[[Run], bool]


def _last_line_is_all_true(run: Run) -> bool:
    try:
        results = json.loads(run.lines[-1])["results"]
        return run.status == 0 and sum(results) / len(results) == 1.0
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return False


RULES = (
    Rule(
        name="exit status",
        rule="asserts appended to the code; passed if the process ends with 0 (SandboxFusion's MBPP)",
        template=APPENDED_ASSERTS,
        is_paid=lambda run: run.status == 0,
    ),
    Rule(
        name="last line",
        rule="an appended runner compares and prints JSON; the last line is the verdict (Daytona's TRL guide)",
        template=LAST_LINE,
        is_paid=_last_line_is_all_true,
    ),
    Rule(
        name="in process",
        rule="the code runs by exec next to the expected values and is compared there (LiveCodeBench, SkyRL-gym, rLLM)",
        template=IN_PROCESS,
        is_paid=lambda run: run.report == "true",
    ),
    Rule(
        name="zipped lines",
        rule="ends with 0, and its lines equal the expected ones pairwise, as many as there are (open-r1)",
        template=LINES_OF_OUTPUT,
        is_paid=lambda run: (
            run.status == 0 and all(line == str(want) for line, want in zip(run.lines or [""], EXPECTED, strict=False))
        ),
    ),
)


def run_plain(source: str) -> Run:
    """Run a program as the compared rules do: with a deadline and without isolation. Resource limits protect this
    machine.
    """
    with tempfile.TemporaryDirectory(prefix="verdict-") as folder:
        report = Path(folder, "report")
        argv = [*LIMITED, sys.executable, "-I", "-c", source, str(report)]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            stdout = _read_capped(process, time.monotonic() + TIMEOUT_S)
            process.wait(TIMEOUT_S / 10 if len(stdout) > MAX_OUTPUT_BYTES else TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Kill the whole process group: a surviving child process would keep the pipe open and use processor time.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = report.read_text(errors="replace")[:100] if report.exists() else ""
    return Run(status=process.returncode, lines=stdout.decode(errors="replace").splitlines(), report=text)


def _read_capped(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the program's output. Reading stops when the program ends, its deadline passes, or the output is larger
    than any harness would keep.
    """
    assert process.stdout is not None
    taken = bytearray()
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        while len(taken) <= MAX_OUTPUT_BYTES and (left_s := deadline - time.monotonic()) > 0:
            if selector.select(left_s):
                chunk = os.read(stdout.fileno(), 65536)
                if not chunk:
                    break
                taken += chunk
    return bytes(taken)


def paid_by(rule: Rule, code: str) -> bool:
    return rule.is_paid(run_plain(rule.template.format(code=code, inputs=INPUTS, expected=EXPECTED)))


async def paid_by_us(source: PoolClient, code: str) -> bool:
    task = CodingTask(
        name="order",
        prompt="Write f(items).",
        func_name="f",
        signature="def f(items):",
        prompt_format="chat",
        tests=tuple(str(items) for items in INPUTS),
        reference="sorted(items)",
        timeout_s=TIMEOUT_S / 2,
    )
    prompt = Prompt(task="order", text="", token_ids=np.zeros(0, np.int32))
    return (await task.score(prompt, f"```python\n{code}\n```", source, seed=0)).value == 1.0


async def compare() -> dict[str, dict[str, list[str]]]:
    """Return, for each rule, the hacks that it rewards and the honest programs that it doesn't reward."""
    async with open_pool(SandboxConfig(), "benchmark") as (source, _):
        graders: dict[str, Callable[[str], Awaitable[bool]]] = {"ours": lambda code: paid_by_us(source, code)}
        for rule in RULES:
            graders[rule.name] = lambda code, rule=rule: asyncio.to_thread(paid_by, rule, code)  # type: ignore[misc]
        found = {name: {"fooled by": [], "unjust to": []} for name in graders}
        for program in PROGRAMS:
            for name, is_paid in graders.items():
                paid = await is_paid(program["code"])
                if paid and program["reward"] < 1:
                    found[name]["fooled by"].append(program["name"])
                elif not paid and program["reward"] == 1:
                    found[name]["unjust to"].append(program["name"])
    return found


async def compare_agents() -> dict[str, list[str]]:
    """Return way of grading -> agents that it rewards."""
    async with open_pool(SandboxConfig(), "benchmark") as (source, _):
        return await adversarial_agents.compare_agents(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Never run as root: the compared rules run hostile code without isolation.
    leave_root([sys.base_prefix, sys.prefix, str(ROOT)])
    found = asyncio.run(compare())
    agents = asyncio.run(compare_agents())
    if options.json:
        print(json.dumps({**found, "agents": agents}))
        return
    number = sum(program["reward"] < 1 for program in PROGRAMS)
    rules = {"ours": "values come back on a private pipe and are compared outside", **{r.name: r.rule for r in RULES}}
    for name, verdicts in found.items():
        print(f"{name:14} paid {len(verdicts['fooled by']):2} of {number} hacks   {rules[name]}")
        for kind, programs in verdicts.items():
            print(f"{'':16}{kind}: {', '.join(programs) or 'none'}")
    cheating = [agent["name"] for agent in adversarial_agents.AGENTS]
    for name, rule in adversarial_agents.RULES.items():
        paid = [agent for agent in cheating if agent in agents[name]]
        honest = "" if len(agents[name]) > len(paid) else ", not the honest one"
        print(f"{name:14} paid {len(paid):2} of {len(cheating)} cheating agents{honest}   {rule}")
        print(f"{'':16}fooled by: {', '.join(paid) or 'none'}")
    peaks = (resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print("peak memory in MiB of this process, of the largest it started: " + ", ".join(map(str, peaks)))


if __name__ == "__main__":
    main()
