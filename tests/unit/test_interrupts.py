"""Cleanup runs to its end however often it is interrupted."""

from __future__ import annotations

import asyncio
async def test_a_stop_is_not_lost_when_its_step_loses_a_learner_too() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        begun.set()
        await may_end.wait()
        raise LearnersLostError("learner-1 is gone")

    task = asyncio.create_task(uninterrupted(step()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()

    with pytest.raises(asyncio.CancelledError) as stopped:
        await task
    assert isinstance(stopped.value.__cause__, LearnersLostError)


async def test_cleanup_that_fails_after_a_stop_leaves_the_stop_with_its_error() -> None:
    may_end = asyncio.Event()

    async def cleanup() -> None:
        await may_end.wait()
        raise ValueError("the disk is full")

    task = asyncio.create_task(to_the_end(cleanup()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()

    with pytest.raises(asyncio.CancelledError) as stopped:
        await task
    assert isinstance(stopped.value.__cause__, ValueError)


async def test_a_run_that_is_told_to_stop_and_loses_its_learners_does_not_start_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()

    async def lose_them(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:  # what a task group does whose other task fails while it is cancelled
            raise LearnersLostError("learner-1 is gone")

    monkeypatch.setattr(driver, "train", lose_them)
    nothing: Any = None
    task = asyncio.create_task(driver.train_through_losses(nothing, nothing, nothing, nothing))
    await begun.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
