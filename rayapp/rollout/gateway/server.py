"""The gateway: sessions of external agents over HTTP, in the APIs that agents speak. One for a rollout worker.

    POST /<session>/v1/chat/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens    GET /v1/models

A session's key (Authorization: Bearer, or x-api-key) opens that session and nothing else; nothing but sessions is
behind this server. Streams begin when the whole turn is sampled: tool calls are read from whole turns.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
PATIENCE_S = 10.0
"""A stream whose turn takes longer begins before it, with a comment as often, so that no client gives up."""
_REMEMBERED = 4096
_PING = b": the policy is sampling\n\n"
_CHAT, _MESSAGES, _RESPONSES = OpenAIChat(), AnthropicMessages(), OpenAIResponses()


class Gateway:
    """See the module. `start` it, and `close` it.

    Args:
        host: it listens on, at a port of its own.
    """

    def __init__(self, formats: Formats, *, host: str = "127.0.0.1") -> None:
        self._formats = formats
        self._host = host
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address can't be had.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/{session}/v1/responses", self._responses)
        app.router.add_post("/{session}/v1/messages", self._messages)
        app.router.add_post("/{session}/v1/messages/count_tokens", self._count)
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        # An agent that hangs up gives its turn up.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0, backlog=2048)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"the gateway can't listen on {self._host}: {error.strerror}") from error
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"

    async def close(self) -> None:
        """End all sessions, and listen no more. Idempotent."""
        for session in self._sessions.values():
            session.end()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

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

    def url_of(self, session: Session) -> str:
        """Where its APIs are: what Anthropic's clients take; OpenAI's take it with `/v1`."""
        return f"{self.url}/{session.id}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _CHAT)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _RESPONSES)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _MESSAGES)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _MESSAGES, only_counts=True)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except RefusedError as refused:
            return _refusal(_CHAT, refused)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rayapp"}
        return web.json_response({"object": "list", "data": [model]})

    async def _nothing(self, request: web.Request) -> web.StreamResponse:
        return _refusal(_CHAT, RefusedError("unknown", f"there is no {request.method} {request.path[:200]} here"))

    async def _answer(self, request: web.Request, dialect: Dialect, *, only_counts: bool = False) -> web.StreamResponse:
        session: Session | None = None
        try:
            session = self._session(request)
            ask = dialect.read(await _body(request))
            if only_counts:
                return web.json_response({"input_tokens": await session.count(ask)})
            if not ask.is_stream:
                return web.json_response(dialect.write(await session.ask(ask), ask))
            turn = asyncio.ensure_future(session.ask(ask))
            return await _stream(request, dialect, ask, turn)
        except RefusedError as refused:
            return _refusal(dialect, refused)
        except Exception as error:  # boundary: whatever an agent sends ends at most its own session
            if session is None or isinstance(error, ConnectionError):
                raise
            log.exception("%s: the gateway failed", session.request_id)
            session.fail(error)
            return _refusal(dialect, RefusedError("engine", f"the gateway failed: {type(error).__name__}"))

    def _session(self, request: web.Request) -> Session:
        session_id = request.match_info["session"]
        session = self._sessions.get(session_id)
        if session is None:
            if session_id in self._over:
                raise RefusedError("over", "this session is over: its trajectory has ended, and no call is served")
            raise RefusedError("unknown", "there is no such session")
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), session.key.encode()):
            raise RefusedError("key", "this key does not open this session")
        return session


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
