"""The gateway: sessions of external agents over HTTP, in the APIs that agents speak. One per rollout worker.

    POST /<session>/v1/chat/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens    GET /v1/models

A session's key (Authorization: Bearer, or x-api-key) opens only that session; every route belongs to a session.
Streams begin when the whole turn is sampled, because tool calls are read from whole turns.

`Api` handles the requests of every server of these APIs; `open_server.py` is the server of `rayapp serve`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial

from aiohttp import web

from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.gateway.anthropic_messages import AnthropicMessages
from rayapp.rollout.gateway.conversation import Ask, RefusedError, Reply
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.listening import Listening, bound
from rayapp.rollout.gateway.openai_chat import OpenAIChat
from rayapp.rollout.gateway.openai_responses import OpenAIResponses
from rayapp.rollout.gateway.reading import Dialect, parsed
from rayapp.rollout.gateway.session import Session, SessionLimits
from rayapp.sandbox.loopback import Accept

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 120.0
NOT_FOLLOWED_HEADER = "x-rayapp-not-followed"
"""Response header with the names of the request's fields that had no effect."""
PATIENCE_S = 10.0
"""Seconds until the stream of a turn that still runs begins, and between its comments: otherwise clients time out."""
_REMEMBERED = 4096
_MAX_OF_SANDBOX = 48
"""Maximum connections of one sandbox. Each holds at most one request body."""
_PING = b": the policy is sampling\n\n"
_CHAT, _MESSAGES, _RESPONSES = OpenAIChat(), AnthropicMessages(), OpenAIResponses()
Door = Callable[[web.Request], AbstractContextManager[Session]]
"""Function that returns a context manager with the session of a request, entered while the request is answered. It
raises RefusedError if the request gets no session."""


class Api:
    """HTTP handlers of all APIs; `door` finds the session of each request.

    Args:
        model: name in the list of models; calls may use any name.
    """

    def __init__(self, door: Door, *, model: str = "policy") -> None:
        self._door = door
        self._model = {"id": model, "object": "model", "created": 0, "owned_by": "rayapp"}

    def application(self, prefix: str = "", *, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
        """Return the web application: all routes below the prefix, and a refusal for every other path."""
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_known_paths])
        app.router.add_post(f"{prefix}/v1/chat/completions", partial(self._answer, dialect=_CHAT))
        app.router.add_post(f"{prefix}/v1/responses", partial(self._answer, dialect=_RESPONSES))
        app.router.add_post(f"{prefix}/v1/messages", partial(self._answer, dialect=_MESSAGES))
        count = partial(self._answer, dialect=_MESSAGES, only_counts=True)
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", count)
        app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
        return app

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            with self._door(request):
                if (name := request.match_info.get("model")) is None:
                    return web.json_response({"object": "list", "data": [self._model]})
                if name != self._model["id"]:
                    raise RefusedError(
                        "no_model", f"there is no model {name[:200]!r}; the model is {self._model['id']!r}"
                    )
                return web.json_response(self._model)
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
            ask = await session.read(partial(_read, dialect), await _body(request))
            if only_counts:
                return web.json_response({"input_tokens": await session.count(ask)})
            if not ask.is_stream:
                return web.json_response(dialect.write(await session.ask(ask), ask), headers=_headers(session, ask))
            turn = asyncio.ensure_future(session.ask(ask))
            return await _stream(request, dialect, ask, turn, _headers(session, ask))
        except (RefusedError, ConnectionError):
            raise
        except Exception as error:  # boundary: a failure caused by an agent ends at most its own session
            log.exception("%s: the gateway failed", session.request_id)
            session.fail(error)
            raise RefusedError("engine", f"the gateway failed: {type(error).__name__}") from error


class Gateway:
    """Server of all sessions of a rollout worker. Call `start`, and at the end `close`."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._listening = Listening(Api(self._door).application("/{session}"))

    async def start(self) -> None:
        """Listen on a free port of the loopback address."""
        await self._listening.start(bound("127.0.0.1", 0))

    async def close(self) -> None:
        """End all sessions, and stop listening. Idempotent."""
        for session in self._sessions.values():
            session.end()
        await self._listening.close()

    @property
    def url(self) -> str:
        """URL of the gateway."""
        return self._listening.url

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @contextmanager
    def session(
        self,
        *,
        engine: RolloutEngine,
        sampling: SamplingParams,
        limits: SessionLimits,
        request_id: RequestId,
        only_model: str = "",
    ) -> Iterator[Session]:
        """Serve a session while the block runs. The arguments are those of `Session`."""
        session = Session(
            formats=self._formats,
            engine=engine,
            sampling=sampling,
            limits=limits,
            request_id=request_id,
            only_model=only_model,
        )
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            session.end()
            del self._sessions[session.id]
            self._over.append(session.id)

    @asynccontextmanager
    async def admitting(self, session: Session, accept: Accept) -> AsyncIterator[None]:
        """While the block runs, serve this session, and no other, to the clients that `accept` returns.

        The clients may be hostile: they are programs in a sandbox.
        """
        app = Api(self._door_of(session)).application("/{session}", max_body_bytes=4 << 20)
        listening = Listening(app, max_connections=_MAX_OF_SANDBOX)
        await listening.accept_from(accept, f"accept {session.request_id}")
        try:
            yield
        finally:
            await listening.close()

    def _door_of(self, session: Session) -> Door:
        @contextmanager
        def door(request: web.Request) -> Iterator[Session]:
            if request.match_info["session"] != session.id:
                raise RefusedError("unknown", "no session has this address")
            check_key(request, session.key, "this key does not open this session")
            yield session

        return door

    def url_of(self, session: Session) -> str:
        """Return the session's base URL for Anthropic's clients. For OpenAI's clients append `/v1`."""
        return f"{self.url}/{session.id}"

    @contextmanager
    def _door(self, request: web.Request) -> Iterator[Session]:
        session_id = request.match_info["session"]
        session = self._sessions.get(session_id)
        if session is None:
            if session_id in self._over:
                raise RefusedError("over", "this session is over: its trajectory has ended, and no call is served")
            raise RefusedError("unknown", "no session has this address")
        check_key(request, session.key, "this key does not open this session")
        yield session


def check_key(request: web.Request, key: str, message: str) -> None:
    """Check a request's key. Raises RefusedError: it is missing or wrong."""
    given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode()):
        raise RefusedError("key", message)


@web.middleware
async def _known_paths(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        return _refusal(_CHAT, RefusedError("no_path", f"no route: {request.method} {request.path[:200]}"))


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RefusedError("too_large", f"the body has more than {request.client_max_size:,} bytes") from None
    except TimeoutError:
        raise RefusedError("invalid", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


def _read(dialect: Dialect, body: bytes) -> Ask:
    try:
        return dialect.read(parsed(body))
    except RefusedError:
        raise
    except Exception as error:  # boundary: an agent may send anything
        raise RefusedError("invalid", f"the body can't be read: {type(error).__name__}: {error!s:.200}") from error


def _headers(session: Session, ask: Ask) -> dict[str, str]:
    """Return the response header that names the request's fields without effect; empty if there are none."""
    ignored = [*ask.not_followed, *ask.unknown, *([] if session.follows_requests else ask.distribution)]
    return {NOT_FOLLOWED_HEADER: ascii(", ".join(ignored))[1:-1]} if ignored else {}


async def _stream(
    request: web.Request, dialect: Dialect, ask: Ask, turn: asyncio.Future[Reply], headers: Mapping[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    try:
        while not (await asyncio.wait({turn}, timeout=PATIENCE_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(_PING)
        if not response.prepared:
            turn.result()  # A refusal before the stream begins gets its own status.
            await response.prepare(request)
        await response.write(b"".join(_events(dialect, ask, turn)))
        await response.write_eof()
    finally:
        turn.cancel()
    return response


def _events(dialect: Dialect, ask: Ask, turn: asyncio.Future[Reply]) -> Iterator[bytes]:
    try:
        reply = turn.result()
    except RefusedError as refused:
        yield dialect.refusal_event(refused)
        return
    yield from dialect.events(reply, ask)


def _refusal(dialect: Dialect, refused: RefusedError) -> web.Response:
    return web.json_response(dialect.refusal(refused), status=refused.status)
