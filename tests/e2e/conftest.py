"""What the tests of whole runs share: a configuration that takes seconds, and a look at what a run leaves behind."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PR_SET_CHILD_SUBREAPER = 36
Descendants = Callable[[], dict[int, str]]


@pytest.fixture(scope="session")
def short_run(tiny_model: Path, letter_tasks: list[str]) -> Callable[..., dict[str, Any]]:
    """Makes the configuration of a run of the tiny model: `short_run(output_dir, train={"num_steps": 9})`."""

    def make(output_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "run": {"output_dir": str(output_dir)},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            "cluster": {"device": "cpu"},
            "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
            "train": {"groups_per_step": 2},
            "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32", "optimizer": {"lr": 3e-3}},
            "server": {"kv_cache_gib": 1},
            "checkpoint": {"every_steps": 2},
        }
        return config | {name: config.get(name, {}) | changes for name, changes in sections.items()}

    return make


@pytest.fixture(scope="module")
def descendants() -> Iterator[Descendants]:
    """Living processes that came from this one: pid and command line.

    While the module's tests run, a process whose parent ends becomes a child of this one instead of init's, whatever
    session, user or namespace it is in: so none can hide. Ask only when no `Popen` of the test is waiting to be waited
    for.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield lambda: {pid: line for pid, line in living().items() if pid not in before}
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def living() -> dict[int, str]:
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline()) or child.name()
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return found


@pytest.fixture(scope="session")
def settled() -> Callable[[Descendants], dict[int, str]]:
    """What is still there once nothing ends any more: processes that were told to end take a moment."""

    def wait(descendants: Descendants, timeout_s: float = 60.0) -> dict[int, str]:
        deadline = time.monotonic() + timeout_s
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    return wait
