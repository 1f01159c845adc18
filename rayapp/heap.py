"""Memory that was freed, and that the C library keeps all the same. Called by the driver after each step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps what each thread freed in a pool of its thread. Ray's threads allocate every answer, so a driver that
    holds nothing grows by the bytes of a step's groups with every step, for hundreds of steps. A C library without
    `malloc_trim` is left as it is.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
