"""Agents that cheat, graded in their own workspace and by rayapp. `adversarial_peers.py` prints the table.

    agent's script -> its workspace -- own box: tests and a test.sh are put into it and run; logs/reward.txt is the pay
                                    |- bare script: the same test.sh in a fresh sandbox
                                    |- named tests: a data set's tests, run by pytest, and sentinels (swe:FILE)
                                    |- trusted script: the same, and sentinels (trust_test_scripts=true)
                                    '- ours: the changed files, in a fresh sandbox; values are compared outside

"own box" stands for harnesses that run the verifier in the agent's container. Its tests are the hidden tests of the
task, written for unittest, which every Python has. This file has its own short version of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rayapp.core.protocols import Sandbox
from rayapp.core.types import Prompt
from rayapp.extras.repositories.named_tests import NamedTests
from rayapp.extras.repositories.scripts import WORKDIR, TestScript
from rayapp.extras.repositories.task import RepositoryTask, as_answer, changed_files
from rayapp.sandbox.pool.client import PoolClient
from rayapp.tasks.loading import load_task

AGENTS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).resolve().parents[1] / "tests/adversarial/agents.yaml").read_text()
)
TASK = "fix_median"
TIMEOUT_S = 20.0
TESTS = """
import unittest
from stats import mean, median

class Hidden(unittest.TestCase):
    def test_even(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)
        self.assertEqual(median([10, 20]), 15)
    def test_odd(self):
        self.assertEqual(median([9, 2, 7]), 7)
    def test_empty(self):
        with self.assertRaises(ValueError):
            median([])
    def test_mean(self):
        self.assertEqual(mean([2, 4, 9]), 5)
"""
TEST_SH = """
mkdir -p logs
export PYTHONPATH=.:tests
if python3 -m unittest -q test_hidden; then echo 1 > logs/reward.txt; else echo 0 > logs/reward.txt; fi
"""


SCRIPT = """#!/bin/bash
cd /app; export PYTHONPATH=.:/tests
if python3 -m unittest -q test_hidden; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
RULES = {
    "ours": "the changed files are tested in a fresh sandbox, values are compared outside",
    "bare script": "the changed files in a fresh sandbox, where test.sh runs tests and writes the verdict",
    "trusted script": "the same; then test.sh has to fail sentinels, each in a fresh sandbox",
    "named tests": "pytest runs the tests that a data set in SWE-bench's form names, then once more with sentinels",
    "own_box": "the tests run in the agent's own box, where its verdict is a file",
}


def repository_task() -> RepositoryTask:
    task = load_task(TASK)
    assert isinstance(task, RepositoryTask)
    return task


async def work(sandbox: Sandbox, task: RepositoryTask, agent: Mapping[str, Any]) -> None:
    """Run the agent's script in its workspace, which has the repository."""
    files = dict(task.folder.repository)
    if "above" in agent or "median" in agent:
        body = f"    return {agent['median']}" if "median" in agent else "    return None"
        files["stats.py"] = f"{agent.get('above', '')}\n\ndef mean(values):\n    return sum(values) / len(values)\n\n\n"
        files["stats.py"] += f"def median(values):\n{body}\n"
    for path, text in (files | agent.get("files", {})).items():
        await sandbox.write_file(path, text.encode())
    if "run" in agent:
        await sandbox.run_command(["bash", "-c", agent["run"]], timeout_s=TIMEOUT_S)


async def paid_in_its_own_box(source: PoolClient, task: RepositoryTask, agent: Mapping[str, Any]) -> bool:
    async with source.lease(task.spec, timeout_s=60.0) as sandbox:
        await work(sandbox, task, agent)
        await sandbox.write_file("tests/test_hidden.py", TESTS.encode())
        await sandbox.write_file("tests/test.sh", TEST_SH.encode())
        await sandbox.run_command(["bash", "tests/test.sh"], timeout_s=TIMEOUT_S)
        try:
            return (await sandbox.read_file("logs/reward.txt")).strip() == b"1"
        except FileNotFoundError:
            return False


def script_task(*, sentinels: int = 12) -> RepositoryTask:
    """Return `repository_task()` as a task that a test script judges, as in Harbor, with at most `sentinels`
    sentinels.
    """
    task = repository_task()
    files = {"test.sh": SCRIPT.encode(), "test_hidden.py": TESTS.encode()}
    script = TestScript(files=files, env=(), image="")
    own = task.folder.own.model_copy(update={"sentinels": sentinels})
    return replace(task, folder=replace(task.folder, tests=(), script=script, workdir=WORKDIR, own=own))


def named_task() -> RepositoryTask:
    """Return `repository_task()` as a task that is judged like an issue in SWE-bench's form."""
    task, lines = repository_task(), TESTS.splitlines()
    patch = f"--- /dev/null\n+++ b/test_hidden.py\n@@ -0,0 +1,{len(lines)} @@\n" + "".join(
        f"+{line}\n" for line in lines
    )
    names = tuple(f"test_hidden.py::Hidden::test_{name}" for name in ("even", "odd", "empty", "mean"))
    named = NamedTests(patch=patch, fail_to_pass=names, pass_to_pass=(), brings_pytest=True)
    return replace(task, folder=replace(task.folder, tests=(), named=named, memory_mib=1024))


async def paid_by_us(source: PoolClient, task: RepositoryTask, agent: Mapping[str, Any]) -> bool:
    """Return True if rayapp's grading rewards the agent."""
    async with source.lease(task.spec, timeout_s=60.0) as sandbox:
        await work(sandbox, task, agent)
        answer = as_answer(await changed_files(sandbox, task.folder.repository))
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
    return (await task.score(prompt, answer, source, seed=0)).value > 0


def honest() -> dict[str, Any]:
    """Return an agent that solves the task. Every way of grading must reward it."""
    solution = resources.files("rayapp.tasks").joinpath(f"library/repositories/{TASK}/solution/stats.py").read_text()
    return {"name": "does the task", "files": {"stats.py": solution}}


async def compare_agents(source: PoolClient) -> dict[str, list[str]]:
    """Return way of grading -> agents that it rewards."""
    tasks = {"ours": repository_task(), "bare script": script_task(sentinels=0), "trusted script": script_task()}
    tasks |= {"named tests": named_task()}
    paid = {name: list[str]() for name in RULES}
    for agent in (honest(), *AGENTS):
        for name, task in tasks.items():
            if await paid_by_us(source, task, agent):
                paid[name].append(agent["name"])
        if await paid_in_its_own_box(source, tasks["ours"], agent):
            paid["own_box"].append(agent["name"])
    return paid
