"""Helpers for tests of code with its own threads: a faulty proxy in a thread, a wait on a condition."""

from __future__ import annotations

import time
from collections.abc import Callable

from rayapp.core.own_thread import LoopThread
from support.storage.faulty_proxy import FaultyProxy


class ProxyThread(FaultyProxy):
    """Proxy in a thread, for tests without an event loop: `with ProxyThread(server.url) as proxy:`."""

    def __enter__(self) -> ProxyThread:
        self._thread = LoopThread("faulty-proxy")
        self._thread.run(self.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.run(self.__aexit__())
        self._thread.close()


def wait_until(holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: the condition does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {timeout_s:g} s")
        time.sleep(0.05)
