"""Imports of files by their path, and of large libraries, which each process of a run pays for in seconds of a core
before it does anything."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED = ("is_sklearn_available", "is_scipy_available")
"""What transformers asks before it imports scikit-learn, with SciPy and pandas, for a score of assisted generation, and
SciPy for a loss of object detection."""
UNUSED_BY_VLLM = ("scipy.signal", "pandas")
"""What vLLM imports where it is found, for sound and for tables of AMD's kernels."""


def module_of(file: str | Path, name: str) -> ModuleType:
    """A Python file run as a module of this name, which no import finds."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def large_imports(*absent: str) -> Iterator[None]:
    """Around the first import of transformers' models or of vLLM, whose 8 and 10 seconds become 5 and 6.

    The garbage collector waits, which would go through the thousands of modules read so far again and again. And what
    is imported only for what nothing here does is said to be absent.

    Args:
        absent: modules that are not found either, unless they were imported before. Nor are they by other threads.
    """
    from transformers import utils

    was_enabled = gc.isenabled()
    asked = {name: getattr(utils, name) for name in UNUSED}
    hidden = [name for name in absent if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    gc.disable()
    modules.update(dict.fromkeys(hidden))
    vars(utils).update(dict.fromkeys(UNUSED, lambda: False))
    try:
        yield
    finally:
        vars(utils).update(asked)
        for name in hidden:
            del modules[name]
        if was_enabled:
            gc.enable()
