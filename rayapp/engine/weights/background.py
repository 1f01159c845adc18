"""Calls that a peer may leave hanging, and that nobody can end: a thread waits for them in the caller's place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(call: Callable[[], object]) -> Future[None]:
    """Its end, or its error. In a daemon thread of its own, which nobody has to wait for."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
            ended.set_result(None)
        except Exception as error:  # boundary: whatever the call raises is its outcome
            ended.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return ended
