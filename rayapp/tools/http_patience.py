"""An HTTP transport that waits when a server says it is too busy, and asks again. Used by `mcp_link.py`.

The MCP SDK reports every refusal alike, so what can be waited out has to be waited out below it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2

from rayapp.sandbox.providers.errors import retry_after_s

_BUSY = (429, 503)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class PatientTransport(httpx2.AsyncBaseTransport):
    """Repeats requests that are answered with 429 or 503: neither has done anything yet.

    Args:
        inner: sends the requests.
        max_wait_s: longest wait in all for one request; then the refusal is passed on.
        sleep: waits; for tests.
    """

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        *,
        max_wait_s: float = 60.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._inner = inner
        self._max_wait_s = max_wait_s
        self._sleep = sleep

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        left_s, pause_s = self._max_wait_s, _FIRST_PAUSE_S
        while True:
            response = await self._inner.handle_async_request(request)
            wait_s = _pause_s(response, pause_s)
            if response.status_code not in _BUSY or wait_s > left_s:
                return response
            await response.aclose()
            await self._sleep(wait_s)
            left_s -= wait_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _pause_s(response: httpx2.Response, default_s: float) -> float:
    asked_s = retry_after_s(response.headers.get("retry-after"))
    return default_s if asked_s is None else min(max(asked_s, 0.05), _LONGEST_PAUSE_S)
