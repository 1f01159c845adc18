"""Cleanup runs to its end however often it is interrupted. Results of many calls arrive once, as early as they can."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rayapp.core.aio import as_they_end, finish_despite_cancels, finish_then_cancel
from rayapp.core.errors import EngineError, LearnersLostError, RayappError
from rayapp.driver import loop


async def test_cleanup_that_is_cancelled_twice_ends_first_and_the_cancellation_comes_after() -> None:
    may_end, done = asyncio.Event(), []

    async def cleanup() -> None:
        await may_end.wait()
        done.append("cleaned")

    task = asyncio.create_task(finish_despite_cancels(cleanup()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["cleaned"]


async def test_cleanup_gives_its_result_and_its_error() -> None:
    async def works() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("the disk is full")

    assert await finish_despite_cancels(works()) == 7
    with pytest.raises(ValueError, match="the disk is full"):
        await finish_despite_cancels(fails())


async def test_cleanup_that_is_itself_ended_does_not_wait_for_ever() -> None:
    async def cleanup() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(finish_despite_cancels(cleanup()), 60)


RUN = """
import asyncio, sys
from rayapp.core.aio import run_until_done, when_stopped

async def main():
    when_stopped(lambda: print("noticed", flush=True))
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, asked.set)
    print("ready", flush=True)
    try:
        await asked.wait()
        print("went on")
    finally:
        print("cleaned up", flush=True)

try:
    run_until_done(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def started(*, ignoring: tuple[signal.Signals, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A driver that waits for a line, started as by `nohup` or a script's `&`."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignoring}
    command = [sys.executable, "-c", RUN]
    try:
        loop = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert loop.stdout is not None
    assert loop.stdout.readline() == "ready\n"
    with loop:
        yield loop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cleans_up_and_then_ends_the_run_with_130(number: signal.Signals) -> None:
    with started() as loop:
        loop.send_signal(number)

        assert loop.wait(timeout=60) == 130
        assert loop.communicate()[0] == "noticed\ncleaned up\n"


def test_a_run_started_with_ctrl_c_ignored_goes_on_after_it_and_stops_on_sigterm() -> None:
    with started(ignoring=(signal.SIGINT,)) as loop:
        loop.send_signal(signal.SIGINT)

        assert loop.communicate("\n", timeout=240)[0] == "went on\ncleaned up\n"
    assert loop.returncode == 0

    with started(ignoring=(signal.SIGINT,)) as loop:
        loop.send_signal(signal.SIGTERM)

        assert loop.wait(timeout=60) == 130
        assert loop.communicate()[0] == "noticed\ncleaned up\n"


@pytest.mark.parametrize("finish", [finish_then_cancel, finish_despite_cancels])
async def test_a_step_or_a_cleanup_that_fails_after_a_stop_leaves_the_stop_with_its_error(finish: Any) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        begun.set()
        await may_end.wait()
        raise LearnersLostError("learner-1 is gone")

    task = asyncio.create_task(finish(fails()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()

    with pytest.raises(asyncio.CancelledError) as stopped:
        await task
    assert isinstance(stopped.value.__cause__, LearnersLostError)


async def test_a_second_stop_does_not_wait_for_what_has_begun() -> None:
    task = asyncio.create_task(finish_then_cancel(asyncio.Event().wait()))
    for _ in range(2):
        await asyncio.sleep(0)  # the first one arrives, and waits for the work
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_a_run_that_is_told_to_stop_and_loses_its_learners_does_not_start_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()

    async def lose_them(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:  # as a task group does if another task fails while it is cancelled
            raise LearnersLostError("learner-1 is gone")

    monkeypatch.setattr(loop, "train", lose_them)
    nothing: Any = None
    task = asyncio.create_task(loop.train_through_losses(nothing, nothing, nothing, nothing))
    await begun.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_ends_together_arrives_together_and_the_rest_later() -> None:
    late = asyncio.Event()

    async def one(index: int) -> str:
        if index == 1:
            await late.wait()
        return f"result {index}"

    batches = []
    async for batch in as_they_end([one(index) for index in range(3)]):
        batches.append(batch)
        late.set()
    assert batches == [[(0, "result 0"), (2, "result 2")], [(1, "result 1")]]


async def test_errors_are_values_and_others_go_on() -> None:
    async def refused() -> str:
        raise EngineError("too long")

    async def broken() -> str:
        raise KeyError("name")

    async def fine() -> str:
        return "fine"

    found = dict([pair async for batch in as_they_end([refused(), broken(), fine()]) for pair in batch])

    assert found[2] == "fine"
    assert isinstance(found[0], EngineError)
    assert type(found[1]) is RayappError
    assert str(found[1]) == "KeyError: 'name'"


async def test_whoever_stops_listening_ends_the_rest() -> None:
    ended = []

    async def forever() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return ""

    async def soon() -> str:
        return "soon"

    batches = as_they_end([soon(), forever()])
    assert await anext(batches) == [(0, "soon")]
    await batches.aclose()
    await asyncio.sleep(0)
    assert ended == [True]
