"""OpenKruise's sandbox-manager (also on Alibaba ACK): E2B's protocol of an earlier day. Called by `e2b.py`.

It knows `POST /sandboxes` but not the `/v2` routes that SDKs since 2.51 use for creating, and reaches ports by path
(`…/kruise/<sandbox>/<port>/…`) instead of by host name. So the few control calls are made here, and the SDK, told where
the ports are, does the rest; nothing of the SDK is patched. Without its two time limits the server waits a hundred
years for a sandbox: they are always sent.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from e2b.connection_config import ConnectionConfig

from rayapp.config.sandbox import E2BConfig
from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError, SandboxProtocolError, SandboxUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.providers.e2b_channel import E2BChannel, Lifecycle
from rayapp.sandbox.providers.errors import E2B, error_of_status, retry_after_s

_PAGE = 100
_CALL_TIMEOUT_S = 15.0
_LATE_ANSWER_S = 30.0
_MIN_TTL_S = 30
_EXTENSION = "e2b.agents.kruise.io"
_DEFAULT_ENVD = "0.1.0"


class KruiseConfig(ConnectionConfig):  # type: ignore[misc]
    """The SDK's configuration, with ports reached by path."""

    def __init__(self, ports_url: str, **options: Any) -> None:
        super().__init__(**options)
        self._ports_url = ports_url.rstrip("/")

    def get_sandbox_url(self, sandbox_id: str, sandbox_domain: str, port: int | None = None) -> str:
        return f"{self._ports_url}/{sandbox_id}/{self.envd_port if port is None else port}"

    def get_sandbox_direct_url(self, sandbox_id: str, sandbox_domain: str, port: int | None = None) -> str:
        return self.get_sandbox_url(sandbox_id, sandbox_domain, port)


class KruiseService:
    """See `rayapp.sandbox.providers.service.Service`."""

    name = "e2b"

    def __init__(self, config: E2BConfig, api_key: str) -> None:
        self._config = config
        self._api_key = api_key
        self._ports_url = config.sandbox_url or config.api_url.removesuffix("/").removesuffix("/api")
        self._client = httpx.AsyncClient(base_url=config.api_url, headers={"X-API-Key": api_key}, timeout=None)

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection:
        config = self._config
        body = {
            "templateID": config.template_of(spec.template) or config.template,
            "timeout": max(_MIN_TTL_S, math.ceil(ttl_s)),
            "envVars": dict(spec.env),
            "allow_internet_access": config.allow_internet,
            "metadata": {
                **labels,
                f"{_EXTENSION}/claim-timeout-seconds": str(config.claim_timeout_s),
                f"{_EXTENSION}/wait-ready-timeout-seconds": str(config.ready_timeout_s),
            },
        }
        answer = await self._call("POST", "/sandboxes", json=body, timeout_s=timeout_s + _LATE_ANSWER_S)
        made = _object(answer)
        sandbox_id = made.get("sandboxID")
        if not isinstance(sandbox_id, str) or not sandbox_id:
            raise SandboxProtocolError(f"sandbox-manager create: there is no sandboxID in {str(made)[:200]}")
        return Connection(
            sandbox_id=sandbox_id,
            token=str(made.get("envdAccessToken") or ""),
            version=str(made.get("envdVersion") or _DEFAULT_ENVD),
        )

    async def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]:
        quoted = {urllib.parse.quote(key): urllib.parse.quote(value) for key, value in labels.items()}
        query = {"metadata": urllib.parse.urlencode(quoted), "limit": str(_PAGE)}
        while True:
            answer = await self._call("GET", "/v2/sandboxes", params=query, timeout_s=timeout_s)
            for item in _ids(answer):
                yield item
            token = answer.headers.get("x-next-token")
            if not token:
                return
            query["nextToken"] = token

    async def kill(self, sandbox_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        await self._call("DELETE", f"/sandboxes/{sandbox_id}", timeout_s=timeout_s, gone_is_fine=True)

    async def is_running(self, sandbox_id: str) -> bool:
        """Whether the manager knows it as running."""
        answer = await self._call("GET", f"/sandboxes/{sandbox_id}", timeout_s=_CALL_TIMEOUT_S, gone_is_fine=True)
        return answer.status_code != 404 and _object(answer).get("state", "running") == "running"

    async def extend(self, sandbox_id: str, ttl_s: float) -> None:
        """The sandbox ends ttl_s from now."""
        body = {"timeout": max(_MIN_TTL_S, math.ceil(ttl_s))}
        answer = await self._call(
            "POST", f"/sandboxes/{sandbox_id}/timeout", json=body, timeout_s=_CALL_TIMEOUT_S, gone_is_fine=True
        )
        if answer.status_code == 404:
            raise SandboxGoneError(f"sandbox {sandbox_id} is gone")

    def channel(self, connection: Connection) -> E2BChannel:
        lifecycle = Lifecycle(is_running=self.is_running, extend=self.extend, kill=self.kill)
        return E2BChannel(connection, self._sdk_config, lifecycle)

    def _sdk_config(self, headers: dict[str, str]) -> KruiseConfig:
        return KruiseConfig(
            self._ports_url,
            api_key=self._api_key,
            api_url=self._config.api_url,
            extra_sandbox_headers=headers,
            debug=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, *, timeout_s: float, gone_is_fine: bool = False, **parts: Any
    ) -> httpx.Response:
        what = f"sandbox-manager {method} {path}"
        try:
            answer = await self._client.request(method, path, timeout=timeout_s, **parts)
        except httpx.TimeoutException as error:
            raise SandboxDeadlineError(f"{what}: no answer within {timeout_s:g} s ({type(error).__name__})") from None
        except httpx.HTTPError as error:
            raise SandboxUnavailableError(f"{what}: {type(error).__name__}: {error}") from None
        if answer.status_code < 300 and answer.content and _json(answer) is None:
            raise SandboxProtocolError(f"{what}: {answer.status_code}: no JSON but {answer.text[:200]!r}")
        if answer.status_code < 300 or (gone_is_fine and answer.status_code == 404):
            return answer
        text = f"{what}: {answer.status_code}: {answer.text[:300]}"
        if answer.status_code == 403:
            text += " (quota)"  # the manager's answer when a quota is met
        wait_s = retry_after_s(answer.headers.get("retry-after"))
        raise error_of_status(answer.status_code, text, E2B, wait_s=wait_s)


def _ids(answer: httpx.Response) -> list[str]:
    found = _json(answer)
    if not isinstance(found, list) or not all(isinstance(item, dict) and "sandboxID" in item for item in found):
        raise SandboxProtocolError(f"sandbox-manager answered no list of sandboxes: {answer.text[:200]!r}")
    return [str(item["sandboxID"]) for item in found]


def _json(answer: httpx.Response) -> object:
    try:
        return answer.json()
    except ValueError:
        return None


def _object(answer: httpx.Response) -> dict[str, object]:
    found = _json(answer)
    if not isinstance(found, dict):
        raise SandboxProtocolError(f"sandbox-manager answered no JSON object: {answer.text[:200]!r}")
    return found
