"""A run that makes no progress says who waits for what, and stops with the stacks; one that goes on is left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from actors.stacks import stacks_of
from rayapp.errors import StalledError, first_error
from rayapp.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watchdog(clock: Clock, lines: list[str]) -> Watchdog:
    async def dump() -> str:
        lines.append("dumped")
        return "outputs/run/stacks.txt"

    return Watchdog(report_after_s=0.01, stop_after_s=0.03, report=lines.append, dump_stacks=dump, clock=clock)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_a_stall_is_reported_then_stopped_with_who_waits_for_what() -> None:
    clock, lines = Clock(), []
    dog = watchdog(clock, lines)

    with pytest.raises(BaseExceptionGroup) as caught:
        async with dog.watching():
            with dog.waiting("driver", "groups of step 4"), dog.waiting("group 7", "rollout-worker-0"):
                clock.now_s = 0.02
                await turns()
                assert lines[0].startswith(
                    "no progress for 0 s. Waiting: driver for groups of step 4 since 0 s; group 7"
                )
                clock.now_s = 0.04
                await asyncio.sleep(10)

    error = first_error(caught.value)
    assert isinstance(error, StalledError)
    assert lines[-1] == "dumped"
    assert "group 7 for rollout-worker-0" in str(error)
    assert "outputs/run/stacks.txt" in str(error)
    assert "recovery.stall_stop_s" in str(error)


async def test_a_run_that_finishes_something_now_and_then_is_left_alone() -> None:
    clock, lines = Clock(), []
    dog = watchdog(clock, lines)

    async with dog.watching():
        for step in range(20):  # 0.1 s in all, three times the limit
            clock.now_s += 0.005
            dog.progress(f"step {step}")
            await turns(2)

    assert lines == []


async def test_a_wait_that_fails_is_no_progress() -> None:
    clock, lines = Clock(), []
    dog = watchdog(clock, lines)

    with pytest.raises(ZeroDivisionError), dog.waiting("group 1", "rollout-worker-0"):
        _ = 1 / 0

    assert dog.describe() == "Waiting: nobody. Last finished: the start."


def test_the_stack_of_a_process_that_answers_nobody_can_be_read() -> None:
    code = "import time\ndef stuck_here():\n    print('up', flush=True)\n    time.sleep(600)\nstuck_here()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            text = stacks_of({"learner-0": process.pid, "gone": 2**22 + 1})
        finally:
            process.kill()
    assert f"=== learner-0 (pid {process.pid})" in text
    # Where ptrace is forbidden the dump has to say so, and not to be empty.
    assert "stuck_here" in text or "no stack: " in text
    assert "=== gone" in text
