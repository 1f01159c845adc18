"""The processes that vLLM starts import as little as the server does: 12 seconds of a core instead of 14.

A spawned process reads what it is to call before the arguments of that: this module, then vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from rayapp.core.imports import UNUSED_BY_VLLM, large_imports

with large_imports(*UNUSED_BY_VLLM):
    from vllm.v1.engine import core, utils  # noqa: F401
    from vllm.v1.executor import multiproc_executor


class _Context:
    """What vLLM makes a process with, and beside that what it was."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def Process(self, *, target: Callable[..., None], kwargs: dict[str, Any], **options: Any) -> Any:  # noqa: N802
        return self._theirs.Process(target=_begin, args=(target, kwargs), **options)


def _begin(target: Callable[..., None], kwargs: dict[str, Any]) -> None:
    with small_processes():  # an engine starts its ranks
        target(**kwargs)


@contextmanager
def small_processes() -> Iterator[None]:
    """Around what starts an engine."""
    with _trimmed(utils), _trimmed(multiproc_executor):
        yield


def _trimmed(module: Any) -> Any:
    theirs = module.get_mp_context
    return patch.object(module, "get_mp_context", lambda: _Context(theirs()))
