"""Imports of large libraries, which each process of a run pays for in seconds of a core before it does anything."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Around the first import of transformers' models or of vLLM, whose 8 and 10 seconds become 5 and 7.

    The garbage collector waits, which would go through the thousands of modules read so far again and again. And
    transformers is told that there is no scikit-learn: it would import it, with SciPy and pandas, for a score of
    assisted generation, which nothing here does.
    """
    from transformers import utils

    was_enabled, has_sklearn = gc.isenabled(), utils.is_sklearn_available
    gc.disable()
    utils.is_sklearn_available = lambda: False
    try:
        yield
    finally:
        utils.is_sklearn_available = has_sklearn
        if was_enabled:
            gc.enable()
