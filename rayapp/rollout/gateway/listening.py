"""Serves an application over HTTP to clients that may be hostile: connections are limited, idle ones closed."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aiohttp import web

from rayapp.core.errors import ConfigError
from rayapp.sandbox.loopback import Accept

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0  # a client that doesn't read its stream is then disconnected
IDLE_TIMEOUT_S = 30.0  # before the headers of the first request, and between two requests
_MOST_CONNECTIONS = 1024
_BACKLOG = 1024  # long, because all agents of a worker may connect at the same time
_WAIT_S = 0.05
_QUIET_S = 60.0  # between two log lines about connections that could not be accepted


def bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to an address but don't listen yet; port 0 for any."""
    sockets = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            sockets.append(_bound(family, address))
    except OSError as error:
        for each in sockets:
            each.close()
        raise _taken((host, port), error) from error
    return sockets


def _taken(address: tuple[object, ...], error: OSError) -> ConfigError:
    return ConfigError(f"can't listen on {address[0]}:{address[1]}: {error.strerror}. Choose another address or port")


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Listening:
    """Serves an application. Call `start` or `accept_from`, and `close` at the end.

    At `max_connections` (0: half of this process's file descriptors, at most 1024) a new connection closes the one that
    has had no request for the longest time.
    """

    def __init__(self, app: web.Application, *, max_connections: int = 0) -> None:
        self._busy = dict[object, int]()  # connection -> number of its requests in progress
        # Connection -> time on the loop's clock since when it is idle, longest first.
        self._idle = dict[web.RequestHandler, float]()
        app.middlewares.append(self._note_busy)
        # handler_cancellation cancels the turn of an agent that disconnects.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self._max_connections = max_connections or _default_connections()
        self._tasks = list[asyncio.Task[None]]()
        self._sockets = list[socket.socket]()
        self.url = ""

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets from `bound`. ConfigError: another process listens on this address now."""
        loop = asyncio.get_running_loop()
        self._sockets += sockets
        for listener in sockets:
            try:
                listener.listen(_BACKLOG)
            except OSError as error:
                raise _taken(listener.getsockname(), error) from error
            await self.accept_from(partial(_accepted, loop, listener), f"accept {listener.getsockname()}")
        host, port = sockets[0].getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def accept_from(self, accept: Accept, name: str) -> None:
        if self._runner.server is None:
            await self._runner.setup()
            self._tasks.append(asyncio.create_task(self._close_silent(), name="close silent connections"))
        self._tasks.append(asyncio.create_task(self._accept(accept), name=name))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._sockets:
            listener.close()
        await self._runner.cleanup()

    async def _accept(self, accept: Accept) -> None:
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None
        while True:
            connection = await accept()
            while len(server.connections) >= self._max_connections:
                self._look(server)
                if self._idle:
                    self._close_longest()
                await asyncio.sleep(0 if self._idle else _WAIT_S)
            try:
                await loop.connect_accepted_socket(server, connection)
            except OSError:  # the client has disconnected
                connection.close()

    @web.middleware
    async def _note_busy(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._busy[request.protocol] = self._busy.get(request.protocol, 0) + 1
        try:
            return await handler(request)
        finally:
            self._busy[request.protocol] -= 1
            if not self._busy[request.protocol]:
                del self._busy[request.protocol]

    async def _close_silent(self) -> None:
        server, loop = self._runner.server, asyncio.get_running_loop()
        assert server is not None
        while True:
            await asyncio.sleep(IDLE_TIMEOUT_S / 4)
            self._look(server)
            while self._idle and next(iter(self._idle.values())) < loop.time() - IDLE_TIMEOUT_S:
                self._close_longest()

    def _look(self, server: web.Server) -> None:
        now_s = asyncio.get_running_loop().time()
        idle = [each for each in server.connections if each not in self._busy]
        since = {each: self._idle.get(each, now_s) for each in idle}
        self._idle = dict(sorted(since.items(), key=lambda item: item[1]))

    def _close_longest(self) -> None:
        connection = next(iter(self._idle))
        del self._idle[connection]
        if connection.transport is not None:
            connection.transport.abort()  # close() would wait for a client that does not read its answer
        connection.force_close()


def _default_connections() -> int:
    # Raises a low limit of file descriptors; half of it is left for other uses.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * _MOST_CONNECTIONS:
        soft = 2 * _MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * _MOST_CONNECTIONS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(_MOST_CONNECTIONS, soft // 2))


async def _accepted(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> socket.socket:
    """Accept a connection. Without a free descriptor wait, and log this at most once in `_QUIET_S`."""
    said_at_s = -_QUIET_S
    while True:
        try:
            return (await loop.sock_accept(listener))[0]
        except OSError as error:
            if loop.time() > said_at_s + _QUIET_S:
                said_at_s = loop.time()
                log.warning("connections can't be accepted: %s", error.strerror)
            await asyncio.sleep(1.0)


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Send a part of a streamed response. Disconnect a client that does not read it."""
    if not data:
        return
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has read nothing for {SEND_TIMEOUT_S:g} s") from None
