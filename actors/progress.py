"""How far a learner's step is, in the key-value store of Ray's control service: a learner that computes answers no
calls. The display may never stop a step.
"""

from __future__ import annotations

import logging
import time

import ray
from ray.experimental import internal_kv  # Ray has no public store

log = logging.getLogger(__name__)
EVERY_S = 2.0


class Progress:
    """Writer of a learner's progress."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def tell(self, num_done: int, num_all: int) -> None:
        """Write how many micro-batches of a pass are done, at most every EVERY_S."""
        if (now := time.monotonic()) - self._told_at >= EVERY_S and ray.is_initialized():
            self._told_at = now
            text = f"{num_done} of {num_all} micro-batches of a pass done"
            try:
                internal_kv._internal_kv_put(_key(), text.encode(), overwrite=True)  # noqa: SLF001
            except Exception as error:  # boundary
                log.debug("the progress can't be told: %s", error)


def told() -> str:
    """Return what a learner of this run wrote last; empty if none did. Blocks."""
    try:
        found = internal_kv._internal_kv_get(_key()) if ray.is_initialized() else None  # noqa: SLF001
    except Exception as error:  # boundary
        log.debug("the progress can't be read: %s", error)
        return ""
    return found.decode() if found else ""


def _key() -> str:
    return f"rayapp/{ray.get_runtime_context().namespace}/progress"
