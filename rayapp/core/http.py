"""Listening sockets of servers, and keys, pauses between tries and rate limits for clients of services.

Keys are read from environment variables, never from config files.
"""

from __future__ import annotations

import hmac
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayapp.core.errors import ConfigError, UserError

MAX_WAIT_S = 600.0
"""Longest pause that a service may request, so that a wrong header doesn't stop a run for days."""


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Return a socket that listens on an address. Raises OSError.

    Connections inherit TCP_NODELAY from it: asyncio sets the option only for sockets made with IPPROTO_TCP. Without the
    option an answer on a kept connection takes 40 ms longer, because its body waits until the client has acknowledged
    its headers.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


KEY_VARIABLE = "RAYAPP_MODEL_SERVER_KEY"


def given_key(headers: Mapping[str, str]) -> bytes:
    """Return the key in a request's headers: `x-api-key` or a bearer token; empty without one.

    Args:
        headers: names in lower case, or a mapping that ignores case; values as UTF-8 with surrogate escapes.
    """
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return given.encode("utf-8", "surrogateescape")


class KeyGuard:
    """ASGI middleware of the run's model servers: refuses every request without the key in `KEY_VARIABLE`, except GET
    /health.

    vLLM's own check (VLLM_API_KEY) leaves the paths open that are not below /v1, such as /classify and /tokenize, and
    doesn't know the header of Anthropic's clients.
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
    """Return the API key in an environment variable; empty if `variable` is empty.

    Args:
        who: name of the client for the message, e.g. `provider e2b`.
        error: type of the error to raise.
    Raises:
        UserError: the variable is not set.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise error(
            f"{who} has no key: the environment variable {variable} is not set. Set it (for a Ray job: in the env_vars "
            "of its runtime_env), or name another variable in api_key_env"
        )
    return key


def retry_after_s(text: str | None) -> float | None:
    """Return the seconds in a Retry-After header, at most `MAX_WAIT_S`; None if the header is missing or not a number.

    A date in the header gives None: this machine's clock may be wrong.
    """
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    # NaN gives None, because every comparison with NaN is false.
    return min(seconds, MAX_WAIT_S) if seconds >= 0 else None


def pauses_s(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each further try, without end: `first_s`, doubled every time up to `longest_s`.

    Each pause is shortened by up to half, at random, so that clients that failed at the same time don't all try again
    at the same time.
    """
    while True:
        yield first_s * random.uniform(0.5, 1.0)
        first_s = min(2 * first_s, longest_s)


class TokenBucket:
    """Rate limit that issues `rate_per_s` tokens per second and saves up at most `burst`.

    Args:
        clock: returns monotonic seconds.
    """

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
        """Return the seconds until `take` succeeds; 0 if it would succeed now."""
        now = self._clock()
        # If the clock jumps back, the tokens are kept.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._updated_at) * self._rate_per_s)
        self._updated_at = now
        missing_s = max(0.0, 1.0 - self._tokens) / self._rate_per_s
        return max(0.0, missing_s, self._blocked_until - now)

    def take(self) -> bool:
        """Take a token and return True; False if there is none."""
        # Tolerate rounding errors: otherwise `take` could fail forever, for want of a billionth of a token.
        if self.wait_s() > 1e-9:
            return False
        self._tokens -= 1.0
        return True


SCHEME = "run://"
"""Scheme of a base_url that names a model server of the run: run://NAME."""


def server_named(base_url: str) -> str:
    """Return NAME of run://NAME; empty for any other URL."""
    return base_url.removeprefix(SCHEME) if base_url.startswith(SCHEME) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a model behind HTTP, with the limits of its clients."""

    who: str
    """Name for messages, e.g. `judge quality`."""
    base_url: str
    api_key_env: str
    key: str
    """Key of a model server of the run; empty: api_key_env names the variable that holds the key."""
    timeout_s: float
    """Deadline of one request."""
    max_retries: int
    max_concurrent: int
    """Maximum number of requests in flight at once, over the whole run."""
    requests_per_minute: float = 0.0
    """Rate limit of the whole run. 0: no limit, except that the server may answer with status 429."""
