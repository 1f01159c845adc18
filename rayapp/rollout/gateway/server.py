"""The gateway: serves the sessions of external agents over HTTP, in the usual APIs for language models.

    POST /<session>/v1/chat/completions | /v1/completions | /v1/responses | /v1/messages | /v1/messages/count_tokens
    GET  /<session>/v1/models | /v1/models/<model>

A session's key (Authorization: Bearer, or x-api-key) is valid only for that session.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal

from aiohttp import web

from rayapp.core.http import given_key
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import RequestId, SamplingParams
from rayapp.rollout.gateway.anthropic_messages import AnthropicMessages
from rayapp.rollout.gateway.conversation import Ask, Begun, RefusedError, Reply
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.forwarding import Forwarder
from rayapp.rollout.gateway.limits import MODEL, Sending, SessionLimits
from rayapp.rollout.gateway.listening import Listening, bound, send
from rayapp.rollout.gateway.openai_chat import OpenAIChat
from rayapp.rollout.gateway.openai_responses import OpenAIResponses
from rayapp.rollout.gateway.reading import Dialect
from rayapp.rollout.gateway.session import Session, Structured
from rayapp.rollout.gateway.streams import Live, StreamWriter
from rayapp.sandbox.loopback import Accept

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 120.0
NOT_FOLLOWED_HEADER = "x-rayapp-not-followed"  # names the request's fields that had no effect
PATIENCE_S = 10.0  # without new tokens; a stream then sends a comment, so that clients don't time out
_REMEMBERED = 4096
_MAX_OF_SANDBOX = 48  # connections of one sandbox; each holds at most one request body in memory
_PING = b": the policy is sampling\n\n"
_CHAT, _RESPONSES, _MESSAGES = OpenAIChat(), OpenAIResponses(), AnthropicMessages()
# Context with the session of a request, in which it is answered; RefusedError without one.
Door = Callable[[web.Request], AbstractContextManager[Session]]


class Api:
    """The HTTP handlers of all APIs. `door` finds the session of each request."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def application(self, prefix: str = "", *, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
        """Return the web application. It has all routes, below `prefix`, and refuses every other path."""
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
                    return web.json_response({"object": "list", "data": [_model_object(MODEL)]})
                if name != MODEL:
                    raise RefusedError("no_model", f"there is no model {name[:200]!r}; the model is {MODEL!r}")
                return web.json_response(_model_object(MODEL))
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
            body = await _body(request)
            ask = await session.read(partial(_read, dialect), body)
            if not isinstance(ask, Ask):
                return await _forwarded(request, session, ask)
            if only_counts:
                return web.json_response({"input_tokens": await session.count(ask)})
            live = Live() if ask.is_stream else None
            with session.answering(ask, live, _sending(request, body)) as turn:
                if live is not None:
                    turn.add_done_callback(lambda _: live.wake())
                    return await _stream(request, dialect, ask, turn, live, _headers(session, ask))
                reply = await asyncio.shield(turn)
                return web.json_response(dialect.write(reply, ask), headers=_headers(session, ask))
        except (RefusedError, ConnectionError):
            raise
        except Exception as error:  # boundary: a failure caused by an agent ends at most its own session
            log.exception("%s: the gateway failed", session.request_id)
            session.fail(error)
            raise RefusedError("engine", f"the gateway failed: {type(error).__name__}") from error


async def _forwarded(request: web.Request, session: Session, body: Mapping[str, Any]) -> web.StreamResponse:
    assert session.forwarder is not None, "only such a session has calls for the endpoint"
    is_answered = False
    with session.cancelling_at_end():
        try:
            response = await session.forwarder.answer(request, body)
            is_answered = response.status == 200
            return response
        finally:
            session.counts["endpoint_errors"] += not is_answered


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rayapp"}


class Gateway:
    """Server of all sessions of a rollout worker. Call `start`, and `close` at the end."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._listening = Listening(Api(self._door).application("/{session}"))

    async def start(self) -> None:
        await self._listening.start(bound("127.0.0.1", 0))

    async def close(self) -> None:
        for session in self._sessions.values():
            session.end()
        await self._listening.close()

    @property
    def url(self) -> str:
        return self._listening.url

    @contextmanager
    def session(
        self,
        *,
        engine: RolloutEngine,
        sampling: SamplingParams,
        limits: SessionLimits,
        request_id: RequestId,
        other_models: Literal["train", "untrained", "refuse"] = "train",
        structured: Structured = "refuse",
        forwarder: Forwarder | None = None,
    ) -> Iterator[Session]:
        """Open a session and serve it during a block. The arguments are those of `Session`."""
        session = Session(
            formats=self._formats,
            engine=engine,
            sampling=sampling,
            limits=limits,
            request_id=request_id,
            other_models=other_models,
            structured=structured,
            forwarder=forwarder,
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
        """Serve only this session, during a block, to the connections of a sandbox, whose programs may be hostile."""
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
            if (asked := request.match_info["session"]) != session.id:
                raise _unknown(asked)
            check_key(request, [session.key], "this key does not open this session")
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
            raise _unknown(session_id)
        check_key(request, [session.key], "this key does not open this session")
        yield session


def _unknown(session_id: str) -> RefusedError:
    return RefusedError(
        "unknown", f"no session has the id {session_id[:100]!r}: use the base URL that the session was given"
    )


def check_key(request: web.Request, keys: Iterable[str], message: str) -> str:
    """Return the request's key if it is one of `keys`, else raise a RefusedError."""
    sent = given_key(request.headers)
    # Compare with every key, so that the duration reveals nothing about the keys.
    if not (found := [key for key in keys if hmac.compare_digest(sent, key.encode())]):
        raise RefusedError("key", message)
    return found[0]


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


def _sending(request: web.Request, body: bytes) -> Sending:
    """Return retries and timeout, from the headers of an SDK."""
    headers, idempotency = request.headers, request.headers.get("idempotency-key", "")
    timeout = headers.get("x-stainless-read-timeout") or headers.get("x-stainless-timeout") or ""
    return Sending(
        key=hashlib.sha256(f"{request.path}\n{idempotency}\n".encode("utf-8", "surrogateescape") + body).digest(),
        is_repeated=bool(idempotency) or headers.get("x-stainless-retry-count", "0") != "0",
        timeout_s=float(timeout) if timeout.replace(".", "", 1).isdecimal() else None,
    )


def _read(dialect: Dialect, body: Mapping[str, Any]) -> Ask:
    try:
        return dialect.read(body)
    except RefusedError:
        raise
    except Exception as error:  # boundary: an agent may send anything
        raise RefusedError("invalid", f"the body can't be read: {type(error).__name__}: {error!s:.200}") from error


def _headers(session: Session, ask: Ask) -> dict[str, str]:
    ignored = [*ask.not_followed, *ask.ignored_sampling]
    ignored += _unread(session, ask)
    return {NOT_FOLLOWED_HEADER: ascii(", ".join(ignored))[1:-1]} if ignored else {}


def _unread(session: Session, ask: Ask) -> list[str]:
    unread = [name for name in ask.variables if not session.formats.plain.chat.may_read(name)]
    if {"reasoning_effort", "enable_thinking"} <= ask.variables.keys():
        # Both variables express the same setting, and a template reads only one of them.
        both = {"reasoning_effort", "enable_thinking"} <= {*unread}
        unread = [name for name in unread if name != "enable_thinking" and (both or name != "reasoning_effort")]
    return unread


async def _stream(
    request: web.Request,
    dialect: Dialect,
    ask: Ask,
    turn: asyncio.Future[Reply],
    live: Live,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    writer: StreamWriter | None = None
    while not turn.done():
        pieces = await live.pieces(PATIENCE_S)
        if turn.done() and not response.prepared:
            turn.result()  # raise a refusal before the stream begins: it then gets its own status
        if not response.prepared and (pieces or not turn.done()):
            await response.prepare(request)
        events = b"" if pieces or turn.done() else _PING
        if pieces and live.begun is not None:
            writer, begin = _begun(writer, dialect, live.begun, ask)
            events = begin + b"".join(writer.piece(*piece) for piece in pieces)
        await send(request, response, events)
    if not response.prepared:
        turn.result()
        await response.prepare(request)
    await send(request, response, _end(writer, dialect, ask, turn))
    await response.write_eof()
    return response


def _begun(writer: StreamWriter | None, dialect: Dialect, begun: Begun, ask: Ask) -> tuple[StreamWriter, bytes]:
    if writer is not None:
        return writer, b""
    writer = dialect.stream(begun, ask)
    return writer, writer.begin()


def _end(writer: StreamWriter | None, dialect: Dialect, ask: Ask, turn: asyncio.Future[Reply]) -> bytes:
    try:
        writer, begin = _begun(writer, dialect, reply := turn.result(), ask)
        return begin + writer.end(reply)
    except RefusedError as refused:
        return dialect.refusal_event(refused)


def _refusal(dialect: Dialect, refused: RefusedError) -> web.Response:
    return web.json_response(dialect.refusal(refused), status=refused.status)
