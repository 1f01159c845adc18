"""A policy for everybody who has the key, and for nobody to train on: what `rayapp serve` answers with.

    POST /v1/chat/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens    GET /v1/models
    GET /metrics | /health    without a key

Each call is a session of its own, which is over with it: nothing is kept, so memory does not grow. Requests set the
distribution, since harnesses choose theirs.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import SamplingParams
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.server import Api, Listening, check_key
from rayapp.rollout.gateway.session import MOST_CHOICES, Session, SessionLimits

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_HELP = {
    "requests": ("counter", "Calls that were answered, by path and status."),
    "prompt_tokens": ("counter", "Tokens that the policy read."),
    "generation_tokens": ("counter", "Tokens that the policy sampled."),
    "requests_running": ("gauge", "Calls that are being answered."),
    "policy_version": ("gauge", "Training steps of the weights that sampled last."),
    "request_seconds": ("histogram", "From a call's arrival to the end of its answer."),
}


class Numbers:
    """What `/metrics` tells."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status."""
        self.prompt_tokens = self.generation_tokens = self.requests_running = self.policy_version = 0
        self._seconds: Counter[float] = Counter()
        """Calls by the bucket that they took at most."""
        self._sum_s = 0.0

    def took(self, seconds: float) -> None:
        self._sum_s += seconds
        self._seconds[next((bucket for bucket in _BUCKETS_S if seconds <= bucket), float("inf"))] += 1

    def text(self) -> str:
        """In Prometheus' form."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, (kind, told) in _HELP.items():
            whole = f"rayapp_serve_{name}{'_total' if kind == 'counter' else ''}"
            yield f"# HELP {whole} {told}"
            yield f"# TYPE {whole} {kind}"
            if name == "requests":
                for (path, status), number in sorted(self.requests.items()):
                    yield f'{whole}{{path="{path}",status="{status}"}} {number}'
            elif name == "request_seconds":
                yield from self._histogram(whole)
            else:
                yield f"{whole} {getattr(self, name)}"

    def _histogram(self, name: str) -> Iterator[str]:
        number = 0
        for bucket in (*_BUCKETS_S, float("inf")):
            number += self._seconds[bucket]
            yield f'{name}_bucket{{le="{"+Inf" if bucket == float("inf") else bucket}"}} {number}'
        yield f"{name}_sum {self._sum_s:.6f}"
        yield f"{name}_count {number}"


class _OpenDoor:
    """Lets in who has the key, each into a session that ends with the call."""

    def __init__(self, formats: Formats, engine: RolloutEngine, max_tokens: int, temperature: float, key: str) -> None:
        self._formats, self._engine, self._key = formats, engine, key
        self._sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        self._limits = SessionLimits(max_tokens=max_tokens, max_turns=MOST_CHOICES)
        self.numbers = Numbers()

    @contextmanager
    def __call__(self, request: web.Request) -> Iterator[Session]:
        check_key(request, self._key, "this key does not open this server")
        session = Session(
            formats=self._formats,
            engine=self._engine,
            sampling=self._sampling,
            limits=self._limits,
            follows_requests=True,
            request_id=f"serve={uuid.uuid4().hex}",
        )
        try:
            yield session
        finally:
            session.end()
            self._note(session)

    def _note(self, session: Session) -> None:
        turns = session.tree.turns
        num_sampled = sum(turn.end - turn.start for turn in turns)
        self.numbers.generation_tokens += num_sampled
        self.numbers.prompt_tokens += session.tree.size - num_sampled
        for turn in turns[-1:]:
            self.numbers.policy_version = turn.max_policy_version

    @web.middleware
    async def count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # By the path of the route: others would each be a name of their own.
        resource = request.match_info.route.resource
        path, status, started_s = resource.canonical if resource is not None else "other", 499, time.monotonic()
        self.numbers.requests_running += 1
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self.numbers.requests_running -= 1
            if path.startswith("/v1/"):
                self.numbers.requests[path, status] += 1
                self.numbers.took(time.monotonic() - started_s)


@asynccontextmanager
async def open_to_all(
    formats: Formats,
    engine: RolloutEngine,
    *,
    model: str,
    max_tokens: int,
    key: str,
    temperature: float = 1.0,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[str]:
    """A server that answers until the block is left. The value is its address.

    Args:
        model: the name that it is listed under.
        max_tokens: prompt and answer of a call together.
        key: what clients send.
        temperature: of requests that don't name one.
        port: 0 takes a free one.
    Raises:
        ConfigError: the address can't be had.
    """
    door = _OpenDoor(formats, engine, max_tokens, temperature, key)
    app = Api(door, model=model).application()
    app.middlewares.append(door.count)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=door.numbers.text(), headers={"Content-Type": _CONTENT_TYPE})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    listening = Listening(app)
    try:
        await listening.start(host, port)
        yield listening.url
    finally:
        await listening.close()
