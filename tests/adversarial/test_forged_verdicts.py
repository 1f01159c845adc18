"""Completions that try to be paid for what they did not do, scored by the real task in the real sandbox.

`verdicts.yaml` holds them with the verdict each deserves. After each, an honest completion is scored as well: nothing
a program does may cost the next one its reward.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import yaml

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import IsolationUnavailableError
from rayapp.core.types import Prompt, SandboxSpec
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.client import PoolClient
from rayapp.tasks.coding import CodingTask
from support.levels import EACH_LEVEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAMS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text())
HONEST = PROGRAMS[0]["code"]
BANNED = ("sorted", ".sort", "exec")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EACH_LEVEL)
async def source(request: pytest.FixtureRequest) -> AsyncIterator[PoolClient]:
    """Sandboxes of one level; every program of the module gets its lease from the same few zygotes."""
    provider = LocalProvider(levels=(request.param,), max_slots=1)
    async with open_pool(SandboxConfig(max_leases=1), "test", local=provider) as (source, _):
        try:
            async with source.lease(SandboxSpec(), timeout_s=60) as sandbox:
                assert (await sandbox.run_code("pass", timeout_s=10)).isolation == request.param
        except IsolationUnavailableError as error:
            pytest.skip(str(error))
        yield source


def task(*, banned: bool) -> CodingTask:
    return CodingTask(
        name="order",
        prompt="Write f(items), which returns the items in ascending order.",
        func_name="f",
        signature="def f(items):",
        prompt_format="chat",
        banned_patterns=BANNED if banned else (),
        tests=("rng.sample(range(100), 7)",) * 5,
        reference="sorted(items)",
        timeout_s=2.0,
    )


def prompt() -> Prompt:
    return Prompt(task="order", text="", token_ids=np.zeros(0, np.int32))


def test_there_are_enough_programs_and_each_has_a_name() -> None:
    assert len(PROGRAMS) >= 80
    assert len({program["name"] for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program["name"] for program in PROGRAMS])
async def test_a_completion_gets_the_verdict_it_deserves(program: dict[str, Any], source: PoolClient) -> None:
    is_banned = program.get("banned", program.get("status") == "banned")

    async def score(code: str) -> tuple[str, float, bool]:
        verdict = await task(banned=is_banned).score(prompt(), f"```python\n{code}\n```", source, seed=7)
        return verdict.status, verdict.value, verdict.valid

    assert await score(program["code"]) == (program.get("status", "scored"), program["reward"], True)
    assert await score(HONEST) == ("scored", 1.0, True)
