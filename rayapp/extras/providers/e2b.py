"""E2B: its cloud, a self-hosted E2B, or an OpenKruise/ACK sandbox-manager.

    E2BProvider -> ServiceProvider (deadlines) -> SdkService    (dialect e2b: the SDK's control plane)
                                               '-> KruiseService (dialect kruise: see below)

Both services reach the inside of a sandbox through the SDK; docs/sandbox-providers.md lists its versions.

OpenKruise's sandbox-manager (also on Alibaba ACK) has `POST /sandboxes`, but not the `/v2` routes of SDKs since 2.51,
and names ports by path (`…/kruise/<sandbox>/<port>/…`), not by host name. So `KruiseService` makes the few control
calls itself and gives the SDK the URLs of the ports. It always sends the time limits of a creation and of a sandbox's
life: the server's default wait for a sandbox is a hundred years.
"""

from __future__ import annotations

import math
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import e2b
import httpx
from e2b import SandboxQuery, SandboxState
from e2b.connection_config import ConnectionConfig
from e2b_code_interpreter import AsyncSandbox
from packaging.version import Version

from rayapp.config.sandbox import E2BConfig
from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxUnavailableError,
)
from rayapp.core.http import retry_after_s
from rayapp.core.types import ExecResult, SandboxSpec
from rayapp.extras.providers.remote import Sink, run_session
from rayapp.extras.providers.service import (
    E2B,
    Control,
    SdkChannel,
    ServiceProvider,
    error_of,
    error_of_status,
    raised_as,
)
from rayapp.sandbox.leases import ANSWER_WITHIN_S, Connection
from rayapp.sandbox.verdict.program import command_of

MakeConfig = Callable[[dict[str, str]], ConnectionConfig]  # Function of the HTTP headers for one sandbox.


class _Counted:
    """Counter of a command's output, which ends a command that writes too much: the SDK keeps all that it reads."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = self.room = max_chars

    def take(self, text: str) -> None:
        self.room -= len(text)
        if self.room < 0:
            raise SandboxProtocolError(
                f"a command printed more than {self.max_chars} characters, the limit of its output"
            )


class E2BChannel(SdkChannel):
    """Data plane of one sandbox, in the worker's process."""

    passed = (e2b.CommandExitException, e2b.NotEnoughSpaceException, e2b.InvalidArgumentException)

    def __init__(self, connection: Connection, make_config: MakeConfig, control: Control) -> None:
        super().__init__(connection.sandbox_id, control)
        headers = {"E2b-Sandbox-Id": self._id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if connection.token:
            headers["X-Access-Token"] = connection.token
        # The SDK's `connect` is not used: for each lease it would ask the control plane for data that the connection
        # has.
        self._sandbox = AsyncSandbox(
            sandbox_id=self._id,
            sandbox_domain=connection.endpoint or None,
            envd_version=Version(connection.version),
            envd_access_token=connection.token or None,
            traffic_access_token=connection.traffic_token or None,
            connection_config=make_config(headers),
        )

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        async def write(path: str) -> None:
            await self.guard(self._sandbox.files.write(path, program, request_timeout=timeout_s), "write a program")

        command, output = await command_of(program, write), _Counted(max_chars)
        try:
            run = self._sandbox.commands.run(
                command, timeout=timeout_s, request_timeout=timeout_s, on_stdout=output.take, on_stderr=output.take
            )
            result = await self.guard(run, "run")
        except e2b.CommandExitException as error:
            return str(error.stdout)
        except SandboxError:
            if output.room < 0:
                return ""  # the code bypassed its watcher and printed too much, so there is no report
            raise
        return str(result.stdout)

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        async def run(text: str, out: Sink, err: Sink) -> str:
            call = self._sandbox.run_code(
                text,
                on_stdout=lambda message: out(message.line),
                on_stderr=lambda message: err(message.line),
                # The SDK's time limit is longer than the call's deadline, because the SDK's error would not show
                # whether the code or the network was slow.
                timeout=timeout_s + 60.0,
            )
            failed = (await self.guard(call, "run_code")).error
            return f"{failed.name}: {failed.value}" if failed is not None else ""

        return await run_session("e2b", code, run, self.alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None:
        try:
            await self.guard(self._sandbox.files.write(path, data, request_timeout=timeout_s), "write a file")
        except (e2b.NotEnoughSpaceException, e2b.InvalidArgumentException) as error:
            raise OSError(f"sandbox {self._id}: {path!r} can't be written: {error}") from None

    async def alive(self, *, timeout_s: float) -> bool:
        try:
            return await self.guard(self._sandbox.is_running(request_timeout=timeout_s), "health")
        except SandboxError:
            return False

    def converted(self, error: Exception, what: str) -> SandboxError:
        return control_error(error, what)

    def says_gone(self, error: Exception) -> bool:
        kinds = e2b.SandboxNotRunningException | e2b.SandboxNotFoundException
        return isinstance(error, kinds) or "sandbox was not found" in str(error).lower()


_PAGE = 100
_CALL_TIMEOUT_S = 15.0
# Longest waits of OpenKruise's server, always sent because it would else wait forever.
_CLAIM_TIMEOUT_S, _READY_TIMEOUT_S = 30, 60
_MIN_TTL_S = 30
_EXTENSION = "e2b.agents.kruise.io"
_DEFAULT_ENVD = "0.1.0"


class KruiseConfig(ConnectionConfig):  # type: ignore[misc]
    """Configuration of the SDK whose URLs name a sandbox's ports by path."""

    def __init__(self, ports_url: str, **options: Any) -> None:
        super().__init__(**options)
        self._ports_url = ports_url.rstrip("/")

    def get_sandbox_url(self, sandbox_id: str, sandbox_domain: str, port: int | None = None) -> str:
        return f"{self._ports_url}/{sandbox_id}/{self.envd_port if port is None else port}"

    def get_sandbox_direct_url(self, sandbox_id: str, sandbox_domain: str, port: int | None = None) -> str:
        return self.get_sandbox_url(sandbox_id, sandbox_domain, port)


class KruiseService:
    """Control plane of OpenKruise's sandbox-manager."""

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
            "allow_internet_access": False,  # completions could look up their answers
            "metadata": {
                **labels,
                f"{_EXTENSION}/claim-timeout-seconds": str(_CLAIM_TIMEOUT_S),
                f"{_EXTENSION}/wait-ready-timeout-seconds": str(_READY_TIMEOUT_S),
            },
        }
        answer = await self._call("POST", "/sandboxes", json=body, timeout_s=timeout_s)
        made = _object(answer)
        sandbox_id = made.get("sandboxID")
        if not isinstance(sandbox_id, str) or not sandbox_id:
            raise SandboxProtocolError(f"sandbox-manager create: no sandboxID in the answer {str(made)[:200]}")
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
        answer = await self._call("GET", f"/sandboxes/{sandbox_id}", timeout_s=_CALL_TIMEOUT_S, gone_is_fine=True)
        return answer.status_code != 404 and _object(answer).get("state", "running") == "running"

    async def extend(self, sandbox_id: str, ttl_s: float) -> None:
        body = {"timeout": max(_MIN_TTL_S, math.ceil(ttl_s))}
        answer = await self._call(
            "POST", f"/sandboxes/{sandbox_id}/timeout", json=body, timeout_s=_CALL_TIMEOUT_S, gone_is_fine=True
        )
        if answer.status_code == 404:
            raise SandboxGoneError(f"sandbox {sandbox_id} is gone")

    def channel(self, connection: Connection) -> E2BChannel:
        return E2BChannel(connection, self._sdk_config, self)

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
            raise SandboxProtocolError(
                f"{what}: status {answer.status_code}: the answer is not JSON: {answer.text[:200]!r}"
            )
        if answer.status_code < 300 or (gone_is_fine and answer.status_code == 404):
            return answer
        text = f"{what}: status {answer.status_code}: {answer.text[:300]}"
        if answer.status_code == 403:
            text += " (quota)"  # the manager answers so when a quota is reached
        wait_s = retry_after_s(answer.headers.get("retry-after"))
        raise error_of_status(answer.status_code, text, E2B, wait_s=wait_s)


def _ids(answer: httpx.Response) -> list[str]:
    found = _json(answer)
    if not isinstance(found, list) or not all(isinstance(item, dict) and "sandboxID" in item for item in found):
        raise SandboxProtocolError(f"sandbox-manager's answer is not a list of sandboxes: {answer.text[:200]!r}")
    return [str(item["sandboxID"]) for item in found]


def _json(answer: httpx.Response) -> object:
    try:
        return answer.json()
    except ValueError:
        return None


def _object(answer: httpx.Response) -> dict[str, object]:
    found = _json(answer)
    if not isinstance(found, dict):
        raise SandboxProtocolError(f"sandbox-manager's answer is not a JSON object: {answer.text[:200]!r}")
    return found


class E2BProvider(ServiceProvider):
    def __init__(self, config: E2BConfig, *, api_key: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        service = (KruiseService if config.is_kruise else SdkService)(config, api_key)
        super().__init__(service, answer_within_s=answer_within_s)


class SdkService:
    """E2B's control plane through the SDK."""

    name = "e2b"

    def __init__(self, config: E2BConfig, api_key: str) -> None:
        self._config = config
        self._options: dict[str, Any] = {"api_key": api_key, "debug": False}
        named = {"api_url": config.api_url, "sandbox_url": config.sandbox_url}
        self._options |= {name: value for name, value in named.items() if value}

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection:
        with raised_as(control_error, "create"):
            made = await AsyncSandbox.create(
                template=self._config.template_of(spec.template) or self._config.template,
                timeout=math.ceil(ttl_s),
                metadata=dict(labels),
                envs=dict(spec.env),
                allow_internet_access=False,  # completions could look up their answers
                lifecycle={"on_timeout": "kill"},
                # With this key, a creation that the SDK repeats returns the same sandbox.
                idempotency_key=str(uuid.uuid4()),
                request_timeout=timeout_s,
                **self._options,
            )
        return Connection(
            sandbox_id=made.sandbox_id,
            endpoint=made.sandbox_domain or "",
            # A worker needs all of these fields to connect to the sandbox. The SDK has two of them only as private
            # fields.
            token=made._envd_access_token or "",  # noqa: SLF001
            traffic_token=made.traffic_access_token or "",
            version=str(made._envd_version),  # noqa: SLF001
        )

    async def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]:
        query = SandboxQuery(metadata=dict(labels), state=[SandboxState.RUNNING, SandboxState.PAUSED])
        pages = AsyncSandbox.list(query=query, limit=_PAGE, request_timeout=timeout_s, **self._options)
        while pages.has_next:
            with raised_as(control_error, "list"):
                found = await pages.next_items()
            for info in found:
                yield info.sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        with raised_as(control_error, "kill"):
            await AsyncSandbox.kill(sandbox_id, request_timeout=timeout_s, **self._options)

    async def is_running(self, sandbox_id: str) -> bool:
        with raised_as(control_error, "get_info"):
            try:
                info = await AsyncSandbox.get_info(sandbox_id, request_timeout=_CALL_TIMEOUT_S, **self._options)
            except e2b.NotFoundException:
                return False
        return bool(info.state == SandboxState.RUNNING)

    async def extend(self, sandbox_id: str, ttl_s: float) -> None:
        with raised_as(control_error, "set_timeout"):
            try:
                await AsyncSandbox.set_timeout(
                    sandbox_id, math.ceil(ttl_s), request_timeout=_CALL_TIMEOUT_S, **self._options
                )
            except e2b.NotFoundException as error:
                raise SandboxGoneError(f"sandbox {sandbox_id} is gone: {error}") from None

    def channel(self, connection: Connection) -> E2BChannel:
        return E2BChannel(connection, self._sdk_config, self)

    def _sdk_config(self, headers: dict[str, str]) -> ConnectionConfig:
        return ConnectionConfig(extra_sandbox_headers=headers, **self._options)

    async def close(self) -> None:
        """Do nothing: the SDK's connections belong to the process and stay open."""


def control_error(error: Exception, what: str) -> SandboxError:
    """Convert an exception of the SDK's call `what`. The SDK's errors have several base classes."""
    text = f"e2b {what}: {type(error).__name__}: {error}"[:600]
    if isinstance(error, e2b.AuthenticationException):
        return SandboxConfigError(f"{text}. Check the key in the variable that sandbox.providers[].api_key_env names")
    if isinstance(error, e2b.SandboxNotFoundException):
        return SandboxGoneError(text)
    status = 429 if isinstance(error, e2b.RateLimitException) else getattr(error, "status_code", None)
    is_late = isinstance(error, e2b.TimeoutException | TimeoutError)
    return error_of(error, text, E2B, status=status, is_late=is_late)
