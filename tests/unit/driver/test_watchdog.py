"""A run without progress reports its waits and stops with the stacks; a run with progress is left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.starting import stacks_of
from rayapp.config.config import Config
from rayapp.core.aio import let_process_live
from rayapp.core.errors import StalledError, first_error
from rayapp.driver.loop import _take_and_train
from rayapp.driver.watchdog import Watchdog, unstalled
from support import make


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    """Keep this process alive: a run that stalled would end its process soon after."""
    yield
    let_process_live()


def watchdog(clock: make.Clock, lines: list[str]) -> Watchdog:
    async def dump() -> str:
        lines.append("dumped")
        return "outputs/run/stacks.txt"

    return Watchdog(report_after_s=0.01, stop_after_s=0.03, report=lines.append, dump_stacks=dump, clock=clock)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_a_stall_is_reported_then_stopped_with_who_waits_for_what() -> None:
    clock, lines = make.Clock(0.0), []
    dog = watchdog(clock, lines)

    with pytest.raises(BaseExceptionGroup) as caught:
        async with dog.watching():
            with dog.waiting("driver", "groups of step 4"), dog.waiting("group 7", "rollout-worker-0"):
                clock.now = 0.02
                await turns()
                assert lines[0].startswith(
                    "no progress for 0 s. Waiting: driver for groups of step 4 since 0 s; group 7"
                )
                clock.now = 0.04
                await asyncio.sleep(10)

    error = first_error(caught.value)
    assert isinstance(error, StalledError)
    assert lines[-1] == "dumped"
    assert "group 7 for rollout-worker-0" in str(error)
    assert "outputs/run/stacks.txt" in str(error)
    assert "recovery.stall_stop_s" in str(error)


async def test_a_run_that_finishes_something_now_and_then_is_left_alone() -> None:
    clock, lines = make.Clock(0.0), []
    dog = watchdog(clock, lines)

    async with dog.watching():
        for step in range(20):  # 0.1 s in all, three times the limit
            clock.now += 0.005
            dog.progress(f"step {step}")
            await turns(2)

    assert lines == []


async def test_a_wait_that_fails_is_no_progress() -> None:
    clock, lines = make.Clock(0.0), []
    dog = watchdog(clock, lines)

    with pytest.raises(ZeroDivisionError), dog.waiting("group 1", "rollout-worker-0"):
        _ = 1 / 0

    assert dog.describe() == "Waiting: nothing. Last finished: the start."


async def test_a_step_that_hangs_ends_although_a_step_is_not_interrupted_and_the_error_names_it() -> None:
    clock, lines = make.Clock(0.0), []
    dog = watchdog(clock, lines)

    async def hang() -> None:
        clock.now = 0.04
        await asyncio.Event().wait()

    async def groups(count: int) -> list[object]:
        return []

    nothing: Any = SimpleNamespace(record=lambda summaries: None, phase=lambda name: None, take_dropped=list)
    cluster = SimpleNamespace(lend_gpus=hang, config=Config())
    parts: dict[str, Any] = {"failures": nothing, "tracker": nothing, "sampling": nothing, "watchdog": dog}
    run: Any = SimpleNamespace(**parts, cluster=cluster, store=SimpleNamespace(take=groups), profiles=[])
    with pytest.raises(StalledError, match=r"Waiting: driver for the end of step 4 .*driver entered train"):
        await asyncio.wait_for(_take_and_train(run, 4), 60)


BLOCKED = "import time; time.sleep(600)"
THREAD_HANGS = "await asyncio.to_thread(threading.Event().wait)"


@pytest.mark.parametrize("hangs", [BLOCKED, THREAD_HANGS])
def test_a_process_that_hangs_on_its_way_out_of_a_stall_is_ended_with_its_stacks(hangs: str) -> None:
    code = f"""
import asyncio, threading
from rayapp.driver.watchdog import Watchdog, unstalled
async def dump(): return "stacks.txt"
async def hang_here():
    {hangs}
async def main():
    dog = Watchdog(report_after_s=0.1, stop_after_s=0.1, report=print, dump_stacks=dump, leave_s=0.2)
    async with unstalled(dog, "a disk"):
        await asyncio.sleep(0)
        await hang_here()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:0" in done.stderr
    assert "hang_here" in done.stderr or "thread.py" in done.stderr


async def test_stacks_that_cannot_be_written_do_not_hide_the_stall() -> None:
    clock = make.Clock(0.0)

    async def dump() -> str:
        raise OSError("no space left")

    dog = Watchdog(report_after_s=0.01, stop_after_s=0.03, report=print, dump_stacks=dump, clock=clock)
    with pytest.raises(StalledError, match=r"could not be written \(OSError: no space left\)"):
        async with unstalled(dog, "groups"):
            clock.now = 1.0
            await asyncio.sleep(10)


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
    # Where ptrace is forbidden, the dump must say so and must not be empty.
    assert "stuck_here" in text or "no stack: " in text
    assert "=== gone" in text
