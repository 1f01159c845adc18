"""Server of `rayapp serve`: any client with the key may sample from the policy; no call is recorded for training.

    POST /v1/chat/completions | /v1/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens
    GET  /v1/models | /v1/models/<model>
    GET  /metrics | /health    without a key

Each call gets its own session, which ends with the call. Only the conversations of the latest replies of the Responses
API are kept. Requests may set the sampling distribution, because evaluation harnesses choose their own.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections import Counter as Counts
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.gateway.conversation import RefusedError, Replies
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.listening import Listening
from rayapp.rollout.gateway.server import Api, check_key
from rayapp.rollout.gateway.session import MOST_CHOICES, Session, SessionLimits

MAX_REQUESTS = 1024
_KEPT_CHARS = 64 << 20
"""Maximum characters of all kept conversations. Later calls may continue these by a reply's id."""
_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Numbers:
    """The metrics that `/metrics` returns. Each server has its own registry, because a process may have several
    servers.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        name = "rayapp_serve"
        self.requests = Counter(
            f"{name}_requests", "Answered calls, by path and status.", ("path", "status"), registry=registry
        )
        self.prompt_tokens = Counter(f"{name}_prompt_tokens", "Tokens that the policy read.", registry=registry)
        self.generation_tokens = Counter(
            f"{name}_generation_tokens", "Tokens that the policy sampled.", registry=registry
        )
        self.running = Gauge(f"{name}_requests_running", "Calls in progress.", registry=registry)
        self.policy_version = Gauge(
            f"{name}_policy_version", "Policy version of the weights that sampled last.", registry=registry
        )
        self.seconds = Histogram(
            f"{name}_request_seconds",
            "Seconds from a call's arrival to the end of its answer.",
            registry=registry,
            buckets=_BUCKETS_S,
        )


class OpenDoor:
    """Opens a session for each call that has a valid key. The session ends with the call.

    Args:
        keys: valid keys. A conversation can be continued only with the key that began it.
        adapters: names of the engine's adapters.
        max_requests: maximum calls with one key at once. Further calls get status 429.
    """

    def __init__(
        self,
        formats: Formats,
        engine: RolloutEngine,
        sampling: SamplingParams,
        keys: Sequence[str],
        *,
        adapters: Sequence[str] = (),
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._formats, self._engine, self._sampling, self.adapters = formats, engine, sampling, adapters
        self._keys = {key: Replies(_KEPT_CHARS // len(keys)) for key in keys}
        self._max_requests = max_requests
        self._running = Counts[str]()
        self._limits = SessionLimits(max_tokens=sampling.max_tokens, max_turns=MOST_CHOICES)
        self.numbers = Numbers()

    @contextmanager
    def __call__(self, request: web.Request) -> Iterator[Session]:
        key = check_key(request, self._keys, "this key does not open this server")
        if self._running[key] >= self._max_requests:
            raise RefusedError(
                "busy",
                f"{self._max_requests} calls with this key are in progress, which is the maximum: try again later",
            )
        session = Session(
            formats=self._formats,
            engine=self._engine,
            sampling=self._sampling,
            limits=self._limits,
            follows_requests=True,
            request_id=RequestId("serve", uuid.uuid4().int),
            replies=self._keys[key],
            adapters=self.adapters,
        )
        self._running[key] += 1
        try:
            yield session
        finally:
            self._running[key] -= 1
            session.end()
            self._note(session)

    def _note(self, session: Session) -> None:
        turns = session.tree.turns
        num_sampled = sum(turn.end - turn.start for turn in turns)
        self.numbers.generation_tokens.inc(num_sampled)
        self.numbers.prompt_tokens.inc(session.tree.size - num_sampled)
        for turn in turns[-1:]:
            self.numbers.policy_version.set(turn.max_policy_version)

    @web.middleware
    async def count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # Label the metric by the route's path. If the request's own path were the label, each unknown path would add a
        # time series.
        resource = request.match_info.route.resource
        path, status, started_s = resource.canonical if resource is not None else "other", 499, time.monotonic()
        try:
            with self.numbers.running.track_inprogress():
                response = await handler(request)
            status = response.status
            return response
        finally:
            if path.startswith("/v1/"):
                self.numbers.requests.labels(path, status).inc()
                self.numbers.seconds.observe(time.monotonic() - started_s)


@asynccontextmanager
async def open_to_all(
    formats: Formats,
    engine: RolloutEngine,
    *,
    model: str,
    sampling: SamplingParams,
    keys: Sequence[str],
    sockets: Sequence[socket.socket],
    adapters: Sequence[str] = (),
    max_connections: int = 0,
    max_requests: int = MAX_REQUESTS,
) -> AsyncIterator[str]:
    """Run the server during a block, which gets the server's URL.

    Args:
        model: name of the policy in the list of models.
        sampling: defaults of the requests. Its max_tokens is the limit for a call's prompt and answer together.
        keys: keys of the clients.
        sockets: sockets from `bound` to listen on.
        adapters: names of the engine's adapters, each a model of its own.
        max_connections: maximum connections at once; 0 stands for half of this process's file descriptors, but at most
            1024.
        max_requests: maximum calls with one key at once.
    """
    door = OpenDoor(formats, engine, sampling, keys, adapters=adapters, max_requests=max_requests)
    listening = Listening(open_application(door, model), max_connections=max_connections)
    try:
        await listening.start(sockets)
        yield listening.url
    finally:
        await listening.close()


def open_application(door: OpenDoor, model: str) -> web.Application:
    """Return the web application that `rayapp serve` serves."""
    app = Api(door, model=model, adapters=door.adapters).application()
    app.middlewares.append(door.count)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(door.numbers.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    return app
