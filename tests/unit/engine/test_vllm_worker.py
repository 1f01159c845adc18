"""Our extension of vLLM's workers, without a model: an engine ends with its server, and only then."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest

from rayapp.engine.vllm_worker import WeightUpdateExtension
from rayapp.sandbox.local.levels import kernel

LONG_S = 60.0

_fork: Any = get_context("fork")


def be_worker(server_pid: int, made: SimpleQueue[int]) -> None:
    WeightUpdateExtension().die_with(server_pid)
    made.put(os.getpid())
    time.sleep(LONG_S)


def be_engine_core(server_pid: int, made: SimpleQueue[int]) -> None:
    """Run as an engine core, as with tensor parallelism."""
    made.put(os.getpid())
    _fork.Process(target=be_worker, args=(server_pid, made)).start()
    time.sleep(LONG_S)


def be_server(engine: Any, made: SimpleQueue[int]) -> None:
    _fork.Process(target=engine, args=(os.getpid(), made)).start()
    time.sleep(LONG_S)


def adopt(engine: Any, num_processes: int, made: SimpleQueue[int]) -> None:
    """Adopt orphans, as a user's systemd does, or the first process of a container."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    server = _fork.Process(target=be_server, args=(engine, made))
    server.start()
    processes = [made.get() for _ in range(num_processes)]
    server.kill()
    server.join()
    for pid in processes:
        os.waitpid(pid, 0)


@pytest.mark.parametrize(("engine", "num_processes"), [(be_worker, 1), (be_engine_core, 2)])
def test_an_engine_whose_server_was_killed_ends_and_leaves_alone_who_adopted_it(
    engine: Any, num_processes: int
) -> None:
    adopting = _fork.Process(target=adopt, args=(engine, num_processes, _fork.SimpleQueue()))
    began = time.monotonic()
    adopting.start()
    adopting.join(LONG_S)
    adopting.kill()
    assert adopting.exitcode == 0
    assert time.monotonic() - began < LONG_S / 2
