"""Engines of one test process are forked from a process that has imported vLLM, not spawned: each spawned one imports
it again, for 13 seconds of the processor, before it does anything.

That process does nothing but import and fork, so it has no threads. Where an engine has several ranks, it forks them
itself, before it starts threads: each is a child of its engine's process, which `die_with` relies on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from rayapp.core.imports import UNUSED_BY_VLLM, large_imports

with large_imports(*UNUSED_BY_VLLM):
    from vllm.v1.engine import core, utils  # noqa: F401
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

_forking = get_context("forkserver")


class _Context:
    """What vLLM takes a process and a queue from."""

    Queue = _forking.Queue

    @staticmethod
    def Process(*, target: Callable[..., None], args: tuple[Any, ...], **options: Any) -> Any:  # noqa: N802
        return _forking.Process(target=_begin, args=(dict(os.environ), target, *args), **options)


def _begin(environment: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """In the environment of who starts the engine, as a spawned one would be."""
    os.environ.clear()
    os.environ.update(environment)
    with patch.object(multiproc_executor, "get_mp_context", lambda: get_context("fork")):
        target(*args)


@contextmanager
def forked_engines() -> Iterator[None]:
    """Engines that this process starts within the block are forked."""
    _forking.set_forkserver_preload([__name__])
    with patch.object(utils, "get_mp_context", _Context):
        yield
