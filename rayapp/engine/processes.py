"""Reduces the imports of the processes that vLLM starts: 12 seconds of a core instead of 14.

A spawned process unpickles its target function before the arguments. The target is `_begin`, so the process imports
this module first and vLLM later, with fewer imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rayapp.core.names import UNUSED_BY_VLLM, large_imports

with large_imports(*UNUSED_BY_VLLM):
    from vllm.v1.engine import core, utils  # noqa: F401
    from vllm.v1.executor import multiproc_executor


class _Context:
    """vLLM's multiprocessing context, in which `Process` runs its target through `_begin`."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def Process(self, *, target: Callable[..., None], kwargs: dict[str, Any], **options: Any) -> Any:  # noqa: N802
        return self._theirs.Process(target=_begin, args=(target, kwargs), **options)


def _begin(target: Callable[..., None], kwargs: dict[str, Any]) -> None:
    with small_processes():  # this process may start tensor-parallel ranks
        target(**kwargs)


@contextmanager
def small_processes() -> Iterator[None]:
    """Context manager in which an engine is started whose processes import less."""
    with _trimmed(utils), _trimmed(multiproc_executor):
        yield


@contextmanager
def _trimmed(module: Any) -> Iterator[None]:
    theirs = module.get_mp_context
    module.get_mp_context = lambda: _Context(theirs())
    try:
        yield
    finally:
        module.get_mp_context = theirs
