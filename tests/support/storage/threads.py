"""A faulty proxy in a thread, for tests of code with its own threads."""

from __future__ import annotations

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
