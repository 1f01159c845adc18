"""Listening sockets; keys, pauses between tries and rate limits for clients of services; the client of judges and
teachers. Keys are read from environment variables, never from config files.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayapp.core.errors import ConfigError, RewardFailedError, UserError, one_line

if TYPE_CHECKING:
    import aiohttp

MAX_WAIT_S = 600.0  # a wrong header must not stop a run for days


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a socket that listens on an address.

    Connections inherit TCP_NODELAY from it, which asyncio sets only for IPPROTO_TCP. Without it an answer on a kept
    connection takes 40 ms longer.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


KEY_VARIABLE = "RAYAPP_MODEL_SERVER_KEY"


def given_key(headers: Mapping[str, str]) -> bytes:
    """Return the key in a request's headers (lower case): `x-api-key` or a bearer token; empty without one."""
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return given.encode("utf-8", "surrogateescape")


class KeyGuard:
    """ASGI middleware of the run's model servers: refuses every request without the key in `KEY_VARIABLE`, except GET
    /health.

    vLLM's own check (VLLM_API_KEY) leaves paths not below /v1 open, such as /classify and /tokenize, and doesn't know
    the header of Anthropic's clients.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()
        if not self._key:
            raise ConfigError(
                f"environment variable {KEY_VARIABLE} is not set: a model server does not start without a key"
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_health = scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/health")
        pairs = scope.get("headers", ())
        headers = {name.decode("latin-1"): value.decode("utf-8", "surrogateescape") for name, value in pairs}
        if scope["type"] == "lifespan" or is_health or hmac.compare_digest(given_key(headers), self._key):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})


def read_key(variable: str, who: str, error: type[UserError] = ConfigError) -> str:
    """Return the API key in an environment variable; empty if `variable` is empty. `who` names the client, e.g.
    `provider e2b`, in the error for one that is not set."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise error(
            f"{who} has no key: the environment variable {variable} is not set. Set it (for a Ray job: in the env_vars "
            "of its runtime_env), or name another variable in api_key_env"
        )
    return key


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds in a Retry-After header, at most `MAX_WAIT_S`; None without a number, also for a date: this
    machine's clock may be wrong."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    # NaN gives None, because every comparison with NaN is false.
    return min(seconds, MAX_WAIT_S) if seconds >= 0 else None


def pauses_s(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each further try, without end: `first_s`, doubled every time up to `longest_s`.

    Each is shortened by up to half, at random: clients that failed together must not all try again at the same time.
    """
    while True:
        yield first_s * random.uniform(0.5, 1.0)
        first_s = min(2 * first_s, longest_s)


class TokenBucket:
    """Rate limit that issues `rate_per_s` tokens per second and saves up at most `burst`."""

    def __init__(self, *, rate_per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._tokens = float(burst)
        self._updated_at = clock()
        self._blocked_until = 0.0

    def block_for(self, seconds: float) -> None:
        """Issue no token for this long, e.g. because a provider asked to wait. Earlier blocks are never shortened."""
        self._blocked_until = max(self._blocked_until, self._clock() + seconds)

    def wait_s(self) -> float:
        now = self._clock()
        # If the clock jumps back, the tokens are kept.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._updated_at) * self._rate_per_s)
        self._updated_at = now
        missing_s = max(0.0, 1.0 - self._tokens) / self._rate_per_s
        return max(0.0, missing_s, self._blocked_until - now)

    def take(self) -> bool:
        # Tolerate rounding errors: otherwise `take` could fail forever, for want of a billionth of a token.
        if self.wait_s() > 1e-9:
            return False
        self._tokens -= 1.0
        return True


SCHEME = "run://"  # of a base_url that names a model server of the run: run://NAME


def server_named(base_url: str) -> str:
    """Return NAME of run://NAME; empty for any other URL."""
    return base_url.removeprefix(SCHEME) if base_url.startswith(SCHEME) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a model behind HTTP, with the limits of its clients."""

    who: str  # for messages, e.g. `judge quality`
    base_url: str
    api_key_env: str
    key: str  # of a model server of the run; empty: api_key_env names the variable
    timeout_s: float  # of one request
    max_retries: int
    max_concurrent: int  # over the whole run
    requests_per_minute: float = 0.0  # of the whole run; 0: no limit but status 429


MAX_ANSWER_BYTES = 4 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LATER = (408, 409, 425, 429)  # statuses to repeat a request after, besides all from 500 on


class EndpointClient:
    """Client of a judge or teacher behind HTTP, for one of `num_sharing` processes, which divide the rate limits. The
    key is removed from any text that the server returns. ConfigError: it is not set, or the server belongs to another
    run."""

    def __init__(self, endpoint: Endpoint, *, num_sharing: int = 1) -> None:
        if server_named(endpoint.base_url):
            raise ConfigError(
                f"{endpoint.who} is at {endpoint.base_url}, a server that exists only during the training run. Serve "
                "the model yourself (vllm serve) and set base_url to that server."
            )
        self._endpoint = endpoint
        self._key = endpoint.key or read_key(endpoint.api_key_env, endpoint.who)
        self._seats = asyncio.Semaphore(max(1, endpoint.max_concurrent // num_sharing))
        rate_per_s = (endpoint.requests_per_minute or 6e7) / 60 / num_sharing
        self._pace = TokenBucket(rate_per_s=rate_per_s, burst=max(1, int(rate_per_s)), clock=time.monotonic)
        self._turns = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the JSON object that the server answers.

        RewardFailedError of kind judge_timeout, judge_unreachable, judge_busy (429), judge_refused (any other status
        that is not retried) or judge_answer (not a JSON object).
        """
        import aiohttp  # takes a quarter of a second, and most users of this module don't need it

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
        import aiohttp

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
