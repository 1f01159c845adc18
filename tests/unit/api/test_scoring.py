"""Verdicts and sandboxes from Python: in scripts and in running event loops."""

from __future__ import annotations

import pytest

import rayapp
from rayapp.core.types import SandboxSpec, StopCause
from support import make

DOUBLE = make.double_task(tests=("1", "rng.randint(2, 9)"))
ANSWERS = ["def double(x):\n    return x + x", " return 3 * x", "def double(x):\n    return 1 / 0"]


def test_a_task_object_scores_texts_in_order() -> None:
    verdicts = rayapp.score(DOUBLE, ANSWERS, seed=3)

    assert [verdict.value for verdict in verdicts] == [1.0, 0.0, -1.0]
    assert verdicts[1].detail.startswith("test 1 of 2: input 1: got 3, expected 2")


async def test_the_same_works_where_an_event_loop_runs() -> None:
    blocking = rayapp.score(DOUBLE, ANSWERS[0])

    assert blocking[0].value == 1.0


def test_one_sandbox_keeps_names_files_and_the_world_outside() -> None:
    with rayapp.Sandbox() as box:
        box.run_code("x = 20", stateful=True)
        assert box.run_code("print(x + 1)", stateful=True).stdout == "21\n"
        box.write_file("a.txt", b"hi")
        assert box.read_file("a.txt") == b"hi"
        assert box.call_function("def f(a, b): return a * b", "f", [(2, 3)]).calls[0].value == 6
        slow = box.run_code("while True: pass", timeout_s=0.3)

    assert slow.stopped_for is StopCause.TIMEOUT


def test_a_pool_runs_many_programs_side_by_side_and_lends_sandboxes() -> None:
    with rayapp.SandboxPool() as pool:
        results = pool.run_all([f"print({n} ** 2)" for n in range(4)])
        with pool.lease() as box:
            failed = box.run_code("raise ValueError('no')")

    assert [result.stdout for result in results] == ["0\n", "1\n", "4\n", "9\n"]
    assert (failed.ok, failed.error) == (False, "ValueError: no")
    with pytest.raises(RuntimeError, match="the pool is not open"):
        pool.run_code("1")


async def test_in_async_code_a_pool_is_what_tasks_get() -> None:
    async with rayapp.SandboxPool() as source, source.lease(SandboxSpec(), timeout_s=60) as box:
        assert (await box.run_code("print(1)", timeout_s=5)).stdout == "1\n"
    async with rayapp.Sandbox() as own:
        assert (await own.run_code("print(2)", timeout_s=5)).stdout == "2\n"
