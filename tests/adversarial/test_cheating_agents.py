"""Thirty agents that don't do their task and want its pay (agents.yaml), each in a workspace of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.sandbox.pool.build import open_pool

pytestmark = pytest.mark.usefixtures("namespaces")  # tests of a repository are run in processes of their own
_PLACE = Path(__file__).parents[2] / "benchmarks" / "adversarial_agents.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("adversarial_agents", _PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.long)])
async def test_a_cheating_agent_is_paid_nothing_and_an_honest_one_in_full(benchmark: Any, step: int) -> None:
    task = benchmark.repository_task()
    assert len(benchmark.AGENTS) == 30
    async with open_pool(SandboxConfig(), "cheating") as (source, _):
        assert await benchmark.paid_by_us(source, task, benchmark.honest())
        for agent in benchmark.AGENTS[::step]:
            assert not await benchmark.paid_by_us(source, task, agent), agent["name"]


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.long)])
async def test_a_trusted_script_pays_no_cheating_agent_and_the_honest_one_in_full(benchmark: Any, step: int) -> None:
    task = benchmark.script_task()
    async with open_pool(SandboxConfig(), "cheating") as (source, _):
        assert await benchmark.paid_by_us(source, task, benchmark.honest())
        for agent in benchmark.AGENTS[::step]:
            assert not await benchmark.paid_by_us(source, task, agent), agent["name"]


async def test_a_script_without_sentinels_pays_what_runs_in_the_tests(benchmark: Any) -> None:
    agents = {agent["name"]: agent for agent in (benchmark.honest(), *benchmark.AGENTS)}
    asked = ("does the task", "ends its process when it is imported", "starts the interpreter with success",
             "leaves a process that writes the verdict", "writes the verdict and ends the grader")  # fmt: skip
    task = benchmark.script_task(sentinels=0)
    async with open_pool(SandboxConfig(), "cheating") as (source, _):
        paid = [await benchmark.paid_by_us(source, task, agents[name]) for name in asked]
    assert paid == [True, True, False, False, False]
