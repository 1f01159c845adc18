"""What tests of code with threads of its own need: a faulty proxy in a thread, a bucket, a wait on a condition."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from rayapp.testing.storage.faulty_proxy import FaultyProxy, Plan


class ProxyThread:
    """A `FaultyProxy` for tests without an event loop: `with ProxyThread(server.url) as proxy:`."""

    def __init__(self, target_url: str) -> None:
        self._proxy = FaultyProxy(target_url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)

    @property
    def url(self) -> str:
        return self._proxy.url

    @property
    def plan(self) -> Plan:
        return self._proxy.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._proxy.plan = plan

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.__aenter__(), self._loop).result(30)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def make_bucket(url: str, bucket: str, key: str, secret: str, region: str) -> None:
    """Create a bucket at an endpoint."""
    from botocore.session import get_session

    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    client = get_session().create_client("s3", endpoint_url=url, region_name=region, **keys)
    client.create_bucket(Bucket=bucket)
    client.close()


def wait_until(holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Return when the condition holds.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {timeout_s:g} s")
        time.sleep(0.05)
