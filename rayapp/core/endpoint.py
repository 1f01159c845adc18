"""HTTP client for the server of a judge or teacher, with rate limits, deadlines, retries and kinds of failure.

The key is read from the environment, sent in one header, and removed from any text that the server returns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from rayapp.core.errors import ConfigError, RewardFailedError, one_line
from rayapp.core.http import Endpoint, TokenBucket, pauses_s, read_key, retry_after_s, server_named

MAX_ANSWER_BYTES = 4 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LATER = (408, 409, 425, 429)
"""HTTP statuses after which a request is repeated, in addition to all statuses from 500 on."""


class EndpointClient:
    """Client of a model, for one process.

    Args:
        num_sharing: number of processes that use the model at the same time. The rate limits are divided by it.
    Raises:
        ConfigError: the environment variable of the key is not set, or the server belongs to another run.
    """

    def __init__(self, endpoint: Endpoint, *, num_sharing: int = 1) -> None:
        if server_named(endpoint.base_url):
            raise ConfigError(
                f"{endpoint.who} is at {endpoint.base_url}, a server that exists only during the training run. Serve "
                "the model yourself (vllm serve) and set base_url to that server."
            )
        self._endpoint = endpoint
        self._key = endpoint.key or read_key(endpoint.api_key_env, endpoint.who)
        self._seats = asyncio.Semaphore(endpoint.max_concurrent // num_sharing)
        rate_per_s = (endpoint.requests_per_minute or 6e7) / 60 / num_sharing
        self._pace = TokenBucket(rate_per_s=rate_per_s, burst=max(1, int(rate_per_s)), clock=time.monotonic)
        self._turns = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the JSON object that the server answers.

        Raises:
            RewardFailedError: of kind judge_timeout, judge_unreachable, judge_busy (429), judge_refused (any other
                status that is not retried) or judge_answer (the answer is not a JSON object).
        """
        pauses = pauses_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        for left in range(self._endpoint.max_retries, -1, -1):
            failure, asked_s = None, None
            async with self._seats:
                await self._turn()
                try:
                    async with asyncio.timeout(self._endpoint.timeout_s):
                        status, header, text = await self._sent(url, body)
                except TimeoutError:
                    late = f"no answer within timeout_s = {self._endpoint.timeout_s:g}"
                    failure = self._failed("judge_timeout", late)
                except (aiohttp.ClientError, OSError) as error:
                    failure = self._failed("judge_unreachable", f"{type(error).__name__}: {error}")
                else:
                    if status == 200:
                        return self._object(text)
                    asked_s = retry_after_s(header)
                    failure = self._refused(status, text)
            if not left or failure.kind == "judge_refused":
                raise failure
            if asked_s is not None:
                # Delay all requests of this process, because the server would refuse them too. The delay is at most one
                # timeout.
                self._pace.block_for(min(asked_s, self._endpoint.timeout_s))
            else:
                await asyncio.sleep(next(pauses))
        raise AssertionError("max_retries is at least 0")

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _turn(self) -> None:
        async with self._turns:
            while True:
                if self._pace.take():
                    return
                await asyncio.sleep(self._pace.wait_s())

    async def _sent(self, url: str, body: Mapping[str, Any]) -> tuple[int, str | None, str]:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                headers=headers, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        # Never follow a redirect: it would send the key to another host.
        async with self._session.post(url, json=body, allow_redirects=False) as response:
            read = bytearray()
            async for part in response.content.iter_chunked(1 << 16):
                read += part
                if len(read) > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(f"the answer has over {MAX_ANSWER_BYTES:,} bytes")
            return response.status, response.headers.get("Retry-After"), read.decode("utf-8", "replace")

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._failed("judge_answer", f"the server's answer is not a JSON object: {one_line(text)}")
        return found

    def _refused(self, status: int, text: str) -> RewardFailedError:
        kind = "judge_busy" if status == 429 else "judge_unreachable" if status >= 500 or status in _LATER else None
        return self._failed(kind or "judge_refused", f"HTTP {status}: {one_line(text)}")

    def _failed(self, kind: str, what: str) -> RewardFailedError:
        text = f"{self._endpoint.who} at {self._endpoint.base_url}: {what}"
        return RewardFailedError(text.replace(self._key, "[key]") if self._key else text, kind)
