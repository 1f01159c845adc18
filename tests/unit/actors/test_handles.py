"""Messages of failed actor calls and of failed starts: the actor, the cause, the way out. No Ray is started; its
exceptions are enough."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectStoreFullError, OutOfMemoryError, RayTaskError

from actors.handles import answer
from actors.starting import all_ready
from rayapp.core.errors import DeadlineError, ObjectsLostError, ProcessDiedError, RayappError, StaleVersionError


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "Traceback ...", cause)


TRACE = "ray::learner-1:Learner.__init__() (pid=7)\n  File a.py, line 3\nrayapp.errors.LearnerError: no others"
# As Ray raises it: an instance of both classes. The weights that the server fetched were in a learner's process.
MET = task_error(ActorUnavailableError("learner-0 is unavailable", b"0" * 16)).as_instanceof_cause()


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (task_error(StaleVersionError("holds 2, needs 3")), StaleVersionError, "holds 2, needs 3"),
        (task_error(ObjectStoreFullError("full")), RayappError, r"learner-0\.call: .*object_store_mib"),
        (task_error(ZeroDivisionError("by zero")), RayappError, r"learner-0\.call failed: ZeroDivisionError: by zero"),
        (ActorDiedError(), ProcessDiedError, r"learner-0\.call: its process is gone"),
        (MET, ObjectsLostError, r"learner-0\.call: an object that this call needs was lost"),
        (
            ActorDiedError(RayTaskError("Learner.__init__", TRACE, RuntimeError())),
            ProcessDiedError,
            r"learner-0\.call: its process could not start\. .*LearnerError: no others$",
        ),
        (OutOfMemoryError("killed"), ProcessDiedError, r"learner-0\.call: .*out of memory.*max_tokens_per_microbatch"),
    ],
)
async def test_a_failed_call_keeps_its_kind_and_names_the_actor(
    raised: Exception, error: type[Exception], said: str
) -> None:
    async def call() -> None:
        raise raised

    with pytest.raises(error, match=said):
        await answer(call(), timeout_s=5, what="learner-0.call")
    assert isinstance(MET, ActorUnavailableError)


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


async def at_once() -> None:
    return


async def too_late(others: asyncio.Event) -> None:
    await others.wait()
    raise DeadlineError("learner-0.ready did not answer within 720 s")


async def failing() -> None:
    raise RayappError("vLLM did not start")


async def test_who_is_ready_is_reported() -> None:
    lines: list[str] = []

    await all_ready({"sandbox-pool": at_once(), "vllm-server-0": at_once()}, lines.append)

    assert lines == ["ready: sandbox-pool (0 s)", "ready: vllm-server-0 (0 s)"]


async def test_a_process_that_never_comes_is_named_with_all_that_wait_for_it() -> None:
    # Learner 0 waits for learner 1, which never comes: either deadline may pass first.
    server_is_ready = asyncio.Event()
    ready = {"learner-0": too_late(server_is_ready), "learner-1": asyncio.Event().wait(), "vllm-server-0": at_once()}

    with pytest.raises(DeadlineError) as caught:
        await all_ready(ready, lambda line: server_is_ready.set())

    assert "learner-0.ready did not answer within 720 s. Not ready yet: learner-0, learner-1. " in str(caught.value)
    assert "raise server.start_timeout_s" in str(caught.value)


async def test_an_error_of_one_comes_out_as_it_is() -> None:
    with pytest.raises(RayappError, match=r"^vLLM did not start$"):
        await all_ready({"vllm-server-0": failing(), "learner-0": asyncio.Event().wait()}, lambda line: None)
