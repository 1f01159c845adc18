"""Messages of failed actor calls: the actor, the cause, the way out. No Ray is started; its exceptions are enough."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectStoreFullError, OutOfMemoryError, RayTaskError

from actors.handles import answer
from rayapp.core.errors import DeadlineError, ObjectsLostError, ProcessDiedError, RayappError, StaleVersionError


async def raising(error: BaseException) -> None:
    raise error


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "Traceback ...", cause)


async def test_our_own_errors_cross_ray_as_they_were() -> None:
    with pytest.raises(StaleVersionError, match="holds 2, needs 3"):
        await answer(
            raising(task_error(StaleVersionError("holds 2, needs 3"))), timeout_s=5, what="vllm-server-0.generate"
        )


async def test_a_full_object_store_names_the_key_to_raise() -> None:
    with pytest.raises(RayappError, match=r"learner-0\.export_weights: .*object_store_mib"):
        await answer(raising(task_error(ObjectStoreFullError("full"))), timeout_s=5, what="learner-0.export_weights")


async def test_a_call_that_does_not_answer_names_the_actor_and_the_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"vllm-server-1\.load_weights did not answer within 0\.01 s"):
        await answer(asyncio.Event().wait(), timeout_s=0.01, what="vllm-server-1.load_weights")


@pytest.mark.parametrize("turns_between", range(5))
async def test_a_stop_that_comes_with_the_answer_stops_whoever_asked(turns_between: int) -> None:
    # The supervisor's watch calls again and again: if a cancellation were lost to an answer, the run would never end.
    async def watch() -> None:
        while True:
            await answer(asked[-1], timeout_s=5, what="vllm-server-0.ping")
            asked.append(asyncio.get_running_loop().create_future())

    asked = [asyncio.get_running_loop().create_future()]
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    asked[0].set_result("here")
    for _ in range(turns_between):
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait({watching}, timeout=30)
    assert watching.cancelled()


async def test_a_dead_actor_is_told_apart_from_a_failed_call() -> None:
    with pytest.raises(ProcessDiedError, match=r"learner-0\.train_step: its process is gone"):
        await answer(raising(ActorDiedError()), timeout_s=5, what="learner-0.train_step")


async def test_a_death_that_the_actor_met_is_not_its_own() -> None:
    # As Ray raises it: an instance of both classes. The weights that the server fetched were in a learner's process.
    met = task_error(ActorUnavailableError("learner-0 is unavailable", b"0" * 16)).as_instanceof_cause()
    assert isinstance(met, ActorUnavailableError)
    with pytest.raises(ObjectsLostError, match=r"vllm-server-0\.load_weights: an object that this call needs was lost"):
        await answer(raising(met), timeout_s=5, what="vllm-server-0.load_weights")


async def test_a_process_that_could_not_start_says_what_was_raised_and_not_where() -> None:
    trace = "ray::learner-1:Learner.__init__() (pid=7)\n  File a.py, line 3\nrayapp.errors.LearnerError: no others"
    died = ActorDiedError(RayTaskError("Learner.__init__", trace, RuntimeError()))
    with pytest.raises(ProcessDiedError, match=r"ready: its process could not start\. .*LearnerError: no others$"):
        await answer(raising(died), timeout_s=5, what="learner-1.ready")


async def test_a_process_that_ray_ended_for_want_of_memory_is_named_with_what_to_lower() -> None:
    with pytest.raises(ProcessDiedError, match=r"learner-0\.train_step: .*out of memory.*max_tokens_per_microbatch"):
        await answer(raising(OutOfMemoryError("3 workers were killed")), timeout_s=5, what="learner-0.train_step")


async def test_any_other_failure_keeps_its_type_and_text() -> None:
    with pytest.raises(RayappError, match=r"learner-0\.train_step failed: ZeroDivisionError: division by zero"):
        await answer(
            raising(task_error(ZeroDivisionError("division by zero"))), timeout_s=5, what="learner-0.train_step"
        )
