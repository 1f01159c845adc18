"""Passes calls that name another model on to an endpoint whose model is not trained, and the answers back to the agent.

These calls are not part of the trajectory. The agent may be hostile: it gets neither the endpoint's key nor its
address, and chooses only the body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from rayapp.config.agent import EndpointSection
from rayapp.core.http import read_key, server_named
from rayapp.rollout.gateway.conversation import RefusedError
from rayapp.rollout.gateway.listening import send

_MAX_ERROR_BYTES, _PIECE_BYTES = 64 << 10, 64 << 10
_MAX_CONNECTIONS, _CONNECT_TIMEOUT_S = 256, 10.0
_TIMEOUT_S = 300.0  # of one call, with the whole answer of a reasoning model
_SENT_ON = ("accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta")
_SENT_BACK = ("content-type", "retry-after")


class Forwarder:
    """Client of the endpoint (`agent.external.endpoint`), one for each external agent of a rollout worker. ConfigError:
    its key is not set."""

    def __init__(self, section: EndpointSection) -> None:
        self._section = section
        self._key = section.key or read_key(section.api_key_env, "agent.external.endpoint")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def answer(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Send a call's body to the endpoint, and relay its answer piece by piece. RefusedError: no answer in time."""
        if server_named(self._section.base_url):
            raise _failed(
                f"agent.external.endpoint.base_url is {self._section.base_url}: this model is served only in a "
                "training run. Here, set base_url to an http(s) URL"
            )
        if self._section.model:
            body = {**body, "model": self._section.model}
        resource = request.match_info.route.resource
        assert resource is not None, "a call has a route"
        # Take the path from the route: nothing else of the agent's URL goes to another host.
        path = resource.canonical.partition("/v1")[2]
        try:
            answer = await self._client().post(
                self._section.base_url + path,
                data=json.dumps(body).encode(),
                headers=self._headers(request, path),
                # Never follow a redirect: it would send the key to another host.
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _failed(f"the endpoint of agent.external.endpoint gave no answer: {type(error).__name__}") from error
        async with answer:
            return await self._relayed(request, answer)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
            connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self._session

    def _headers(self, request: web.Request, path: str) -> dict[str, str]:
        headers = {name: value for name in _SENT_ON if (value := request.headers.get(name)) is not None}
        if not self._key:
            return headers
        return headers | (
            {"x-api-key": self._key} if path.startswith("/messages") else {"authorization": f"Bearer {self._key}"}
        )

    async def _relayed(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {name: value for name in _SENT_BACK if (value := answer.headers.get(name)) is not None}
        if answer.status != 200:
            return await self._error(answer, headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        try:
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                await send(request, response, piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            # Break the agent's connection, because status 200 was already sent.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(f"the endpoint's answer broke off: {type(error).__name__}") from error
        await response.write_eof()
        return response

    async def _error(self, answer: aiohttp.ClientResponse, headers: Mapping[str, str]) -> web.Response:
        if answer.status < 400:
            raise _failed(
                f"the endpoint of agent.external.endpoint answered with status {answer.status}, not 200. Correct its "
                "base_url: redirects are not followed"
            )
        try:
            body = await answer.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError):
            body = b""
        if self._key:
            body = body.replace(self._key.encode(), b"[key]")
        return web.Response(status=answer.status, body=body, headers=headers)


def _failed(message: str) -> RefusedError:
    return RefusedError(
        "endpoint", f"{message}. This endpoint answers the calls that name another model than the policy"
    )
