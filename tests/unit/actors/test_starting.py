"""Waiting until a run's processes are ready, and the error if some are not. No Ray is started."""

from __future__ import annotations

import asyncio

import pytest

from actors.starting import all_ready
from rayapp.core.errors import DeadlineError, RayappError


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
