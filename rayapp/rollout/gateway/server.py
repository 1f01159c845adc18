"""The gateway: sessions of external agents over HTTP, in the APIs that agents speak. One for a rollout worker.

    POST /<session>/v1/chat/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens    GET /v1/models

A session's key (Authorization: Bearer, or x-api-key) opens that session and nothing else; nothing but sessions is
behind this server. Streams begin when the whole turn is sampled: tool calls are read from whole turns.

`Api` is what every server of these APIs answers with; `open_server.py` has the one of `rayapp serve`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from rayapp.core.errors import ConfigError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import SamplingParams
from rayapp.rollout.gateway.anthropic_messages import AnthropicMessages
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.openai_chat import OpenAIChat
from rayapp.rollout.gateway.openai_responses import OpenAIResponses
from rayapp.rollout.gateway.reading import Dialect
from rayapp.rollout.gateway.refusals import RefusedError
from rayapp.rollout.gateway.session import Session, SessionLimits
from rayapp.sandbox.loopback import Accept

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
PATIENCE_S = 10.0
"""A stream whose turn takes longer begins before it, with a comment as often, so that no client gives up."""
_REMEMBERED = 4096
_MOST_CONNECTIONS, _FULL_WAIT_S = 48, 0.05
"""Of one sandbox. Each holds a body at most."""
_PING = b": the policy is sampling\n\n"
_CHAT, _MESSAGES, _RESPONSES = OpenAIChat(), AnthropicMessages(), OpenAIResponses()
Door = Callable[[web.Request], AbstractContextManager[Session]]
"""The session that a request is for, as long as it is answered. Raises RefusedError: it is let into none."""


class Api:
    """The APIs over the sessions behind a door.

    Args:
        model: the name that is listed; every other does as well.
    """

    def __init__(self, door: Door, *, model: str = "policy") -> None:
        self._door = door
        self._model = {"id": model, "object": "model", "created": 0, "owned_by": "rayapp"}

    def application(self, prefix: str = "", *, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
        """All of them below the prefix, and a refusal for everything else."""
        app = web.Application(client_max_size=max_body_bytes)
        app.router.add_post(f"{prefix}/v1/chat/completions", partial(self._answer, dialect=_CHAT))
        app.router.add_post(f"{prefix}/v1/responses", partial(self._answer, dialect=_RESPONSES))
        app.router.add_post(f"{prefix}/v1/messages", partial(self._answer, dialect=_MESSAGES))
        count = partial(self._answer, dialect=_MESSAGES, only_counts=True)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", count)
        app.router.add_get(f"{prefix}/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            with self._door(request):
                return web.json_response({"object": "list", "data": [self._model]})
        except RefusedError as refused:
            return _refusal(_CHAT, refused)

    async def _answer(self, request: web.Request, dialect: Dialect, *, only_counts: bool = False) -> web.StreamResponse:
        try:
            with self._door(request) as session:
                return await self._served(request, dialect, session, only_counts=only_counts)
        except RefusedError as refused:
            return _refusal(dialect, refused)

    async def _served(
        self, request: web.Request, dialect: Dialect, session: Session, *, only_counts: bool
    ) -> web.StreamResponse:
        try:
            ask = dialect.read(await _body(request))
            if only_counts:
                return web.json_response({"input_tokens": await session.count(ask)})
            if not ask.is_stream:
                return web.json_response(dialect.write(await session.ask(ask), ask))
            turn = asyncio.ensure_future(session.ask(ask))
            return await _stream(request, dialect, ask, turn)
        except (RefusedError, ConnectionError):
            raise
        except Exception as error:  # boundary: whatever an agent sends ends at most its own session
            log.exception("%s: the gateway failed", session.request_id)
            session.fail(error)
            raise RefusedError("engine", f"the gateway failed: {type(error).__name__}") from error


class Listening:
    """An application that is served over HTTP. `start` it, and `close` it."""

    def __init__(self, app: web.Application) -> None:
        app.router.add_route("*", "/{path:.*}", _nothing)
        # An agent that hangs up gives its turn up.
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            ConfigError: the address can't be had.
        """
        await self.runner.setup()
        try:
            await web.TCPSite(self.runner, host, port, backlog=2048).start()
        except OSError as error:
            raise ConfigError(f"the gateway can't listen on {host}:{port}: {error.strerror}") from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.runner.addresses[0][1]}"

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        await self.runner.cleanup()


class Gateway:
    """See the module. `start` it, and `close` it."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._listening = Listening(Api(self._door).application("/{session}"))

    async def start(self) -> None:
        """Listen on the loopback, at a port of its own."""
        await self._listening.start("127.0.0.1", 0)

    async def close(self) -> None:
        """End all sessions, and listen no more. Idempotent."""
        for session in self._sessions.values():
            session.end()
        await self._listening.close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._listening.url

    @property
    def num_sessions(self) -> int:
        """Open ones."""
        return len(self._sessions)

    @contextmanager
    def session(
        self, *, engine: RolloutEngine, sampling: SamplingParams, limits: SessionLimits, request_id: str
    ) -> Iterator[Session]:
        """A session that is served until the block is left."""
        session = Session(formats=self._formats, engine=engine, sampling=sampling, limits=limits, request_id=request_id)
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            session.end()
            del self._sessions[session.id]
            self._over.append(session.id)

    @asynccontextmanager
    async def admitting(self, session: Session, accept: Accept) -> AsyncIterator[None]:
        """Serve this session alone, to whoever connects, until the block is left: a hostile program may."""
        runner = Listening(Api(self._door_of(session)).application("/{session}", max_body_bytes=4 << 20)).runner
        await runner.setup()
        assert runner.server is not None
        accepting = asyncio.create_task(_accept(accept, runner.server), name=f"accept {session.request_id}")
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await runner.cleanup()

    def _door_of(self, session: Session) -> Door:
        @contextmanager
        def door(request: web.Request) -> Iterator[Session]:
            if request.match_info["session"] != session.id:
                raise RefusedError("unknown", "there is no such session")
            check_key(request, session.key, "this key does not open this session")
            yield session

        return door

    def url_of(self, session: Session) -> str:
        """Where its APIs are: what Anthropic's clients take; OpenAI's take it with `/v1`."""
        return f"{self.url}/{session.id}"

    @contextmanager
    def _door(self, request: web.Request) -> Iterator[Session]:
        session_id = request.match_info["session"]
        session = self._sessions.get(session_id)
        if session is None:
            if session_id in self._over:
                raise RefusedError("over", "this session is over: its trajectory has ended, and no call is served")
            raise RefusedError("unknown", "there is no such session")
        check_key(request, session.key, "this key does not open this session")
        yield session


def check_key(request: web.Request, key: str, message: str) -> None:
    """Raises RefusedError: the request brings another key, or none."""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        raise RefusedError("key", message)


async def _accept(accept: Accept, server: web.Server) -> None:
    """No more than `_MOST_CONNECTIONS` at once; the kernel holds a few more, and refuses the others."""
    loop = asyncio.get_running_loop()
    while True:
        connection = await accept()
        while len(server.connections) >= _MOST_CONNECTIONS:  # noqa: ASYNC110  (aiohttp does not tell when one ends)
            await asyncio.sleep(_FULL_WAIT_S)
        await loop.connect_accepted_socket(server, connection)


async def _nothing(request: web.Request) -> web.StreamResponse:
    return _refusal(_CHAT, RefusedError("unknown", f"there is no {request.method} {request.path[:200]} here"))


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise RefusedError("too_large", f"a body has at most {MAX_BODY_BYTES:,} bytes") from None
    except (ValueError, RecursionError) as error:
        raise RefusedError("invalid", f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError("invalid", "the body must be a JSON object")
    return body


async def _stream(request: web.Request, dialect: Dialect, ask: Any, turn: asyncio.Future[Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        while not (await asyncio.wait({turn}, timeout=PATIENCE_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(_PING)
        if not response.prepared:
            turn.result()  # What is refused before anything is sent has a status of its own.
            await response.prepare(request)
        await response.write(b"".join(_events(dialect, ask, turn)))
        await response.write_eof()
    finally:
        turn.cancel()
    return response


def _events(dialect: Dialect, ask: Any, turn: asyncio.Future[Any]) -> Iterator[bytes]:
    try:
        reply = turn.result()
    except RefusedError as refused:
        yield dialect.refusal_event(refused)
        return
    yield from dialect.events(reply, ask)


def _refusal(dialect: Dialect, refused: RefusedError) -> web.Response:
    return web.json_response(dialect.refusal(refused), status=refused.status)
