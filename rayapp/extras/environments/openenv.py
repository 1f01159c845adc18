"""Client of an OpenEnv server, version 0.2 or newer, with one WebSocket session for each trajectory. The protocol:

    GET /schema -> {"action": JSON schema, …}
    /ws   {"type": "reset", "data": {"seed": 7}}  ->  {"type": "observation", "data": {"observation", "reward", "done"}}
          {"type": "step", "data": action}        ->  the same, or {"type": "error", "data": {"message", "code"}}

The policy's only tool `step` has the fields of an action as arguments. With `text_field`, the text of each turn is an
action instead. If actions are calls of MCP tools, each of these is a tool of the policy.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, ClientWebSocketResponse, WSMsgType

from rayapp.core.errors import ConfigError, InputError, ToolUnavailableError
from rayapp.core.trajectories import storable
from rayapp.core.types import Trajectory
from rayapp.extras.environments.files import Columns, EnvironmentTask, OpenEnvEnvironment
from rayapp.rollout.problem import VERDICT
from rayapp.storage.media import from_data_uri
from rayapp.tools.base import ToolFailedError, ToolOutput, ToolSchema

_MAX_MESSAGE_BYTES = 16 << 20
_FULL_PAUSE_S = 1.0
# Codes with which a server refuses an invalid action; any other code is a failure of the server.
_POLICYS_FAULT = frozenset({"VALIDATION_ERROR", "EXECUTION_ERROR"})


@dataclass(slots=True)
class OpenEnvEpisodes:
    """`Episodes` of an OpenEnv environment. Each episode is a session of the environment's server."""

    environment: OpenEnvEnvironment
    _takes_calls: bool = field(default=False, init=False)

    async def open(self) -> Sequence[ToolSchema]:
        action = await self._action_schema()
        if field := self.environment.text_field:
            self._check_is_text(field, _step(action).parameters)
        try:
            async with asyncio.timeout(self.environment.timeout_s), self.episode() as episode:
                await episode.reset(self._first)
                self._takes_calls = {"tool_name", "arguments"} <= action.get("properties", {}).keys()
                return await episode.tools() if self._takes_calls else [_step(action)]
        except ToolUnavailableError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        except TimeoutError as error:
            raise ConfigError(
                f"{self._where} did not start an episode within {self.environment.timeout_s:g} s. If all sessions of "
                "the server are in use, raise max_concurrent_envs in the server's create_app"
            ) from error

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[OpenEnvEpisode]:
        timeout_s = self.environment.timeout_s
        async with ClientSession(timeout=ClientTimeout(total=None, sock_connect=timeout_s)) as session:
            episode = OpenEnvEpisode(session, self.environment, self._takes_calls)
            await episode.connect()
            try:
                yield episode
            finally:
                await episode.close()

    @property
    def _first(self) -> Columns:
        return {"seed": self.environment.seed, **self.environment.reset}

    def _check_is_text(self, field: str, parameters: Mapping[str, Any]) -> None:
        texts = [name for name, schema in parameters["properties"].items() if schema.get("type") == "string"]
        if field not in texts:
            raise ConfigError(
                f"{self._where}: text_field is {field!r}, but an action's text fields are "
                f"{', '.join(texts) or 'none'}. Name one of them, or leave text_field out: then the policy calls the "
                "tool `step`"
            )
        if others := sorted(set(parameters["required"]) - {field}):
            raise ConfigError(
                f"{self._where}: text_field {field!r} can't be a whole action, because an action also requires "
                f"{', '.join(others)}. Leave text_field out: then the policy calls the tool `step`"
            )

    @property
    def _where(self) -> str:
        return f"task {self.environment.name}: OpenEnv server {self.environment.url}"

    async def _action_schema(self) -> Mapping[str, Any]:
        url = f"{self.environment.url}/schema"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=self.environment.timeout_s)) as session,
                session.get(url) as answer,
            ):
                status, said = answer.status, await answer.text()
        except (OSError, ClientError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"{self._where} can't be reached: {why}. Start it, or correct `url`") from error
        try:
            action = json.loads(said)["action"]
            return dict(action)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{self._where} has no schema of actions at GET /schema (status {status}). Correct `url`; or, if the "
                "server is older than OpenEnv 0.2, update openenv-core (pip install -U) and rebuild the "
                "environment's image"
            ) from None


class _ServerFullError(ToolUnavailableError):
    pass


@dataclass(slots=True)
class OpenEnvEpisode:
    """`Episode` in a session of an OpenEnv server, which `connect` opens."""

    session: ClientSession
    environment: OpenEnvEnvironment
    takes_calls: bool
    rewards: list[float] = field(default_factory=list)
    is_done: bool = False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _socket: ClientWebSocketResponse = field(init=False)

    async def connect(self) -> None:
        """Open the session. Raises ToolUnavailableError."""
        url, timeout_s = self.environment.url, self.environment.timeout_s
        try:
            self._socket = await self.session.ws_connect(
                f"{url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=timeout_s
            )
        except (OSError, ClientError) as error:
            raise ToolUnavailableError(f"{url}/ws can't be opened: {error}") from error

    async def close(self) -> None:
        await self._socket.close()

    async def reset(self, columns: Columns) -> ToolOutput:
        """Begin the episode, waiting for a free session of the server as long as the group's deadline allows."""
        while True:
            try:
                return _output((await self.ask("reset", columns))["observation"])
            except _ServerFullError:
                await self.close()
                await asyncio.sleep(_FULL_PAUSE_S * random.uniform(0.5, 1.0))
                await self.connect()
            except ToolFailedError as error:
                raise ToolUnavailableError(f"{self.environment.url}: reset failed: {error}") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        async with self._one_at_a_time:
            if self.is_done:
                raise ToolFailedError("the episode is over")
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments} if self.takes_calls else arguments
            stepped = await self.ask("step", action)
        reward = _number(stepped.get("reward"), self.environment.url)
        self.rewards += [] if reward is None else [reward]
        self.is_done = bool(stepped.get("done"))
        error, shown = stepped["observation"].get("error"), _output(stepped["observation"])
        if error and self.takes_calls:
            raise ToolFailedError(str(error.get("message", error) if isinstance(error, dict) else error))
        return replace(shown, reward=reward, answer=shown.text if self.is_done else None)

    async def reward(self, task: EnvironmentTask, played: Trajectory) -> Mapping[str, float]:
        return {VERDICT: float(sum(self.rewards if self.environment.reward == "sum" else self.rewards[-1:]))}

    async def tools(self) -> Sequence[ToolSchema]:
        """Return the tools of an environment whose actions are calls of MCP tools."""
        observation = (await self.ask("step", {"type": "list_tools"}))["observation"]
        try:
            return [
                ToolSchema(name=tool["name"], description=tool["description"], parameters=tool["input_schema"])
                for tool in observation["tools"]
            ]
        except (KeyError, TypeError) as error:
            raise ToolUnavailableError(f"{self.environment.url}: the server did not list its tools") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message, and return the observation, with `reward` and `done`.

        Raises:
            ToolFailedError: the server refuses the action as invalid.
            ToolUnavailableError: the server is gone, answers too late, or breaks the protocol.
        """
        url = self.environment.url
        try:
            async with asyncio.timeout(self.environment.timeout_s):
                # Read the answer even if sending fails: a server that closed the session may have sent the reason.
                with suppress(ConnectionError):
                    await self._socket.send_json({"type": kind, "data": data})
                message = await self._socket.receive()
        except TimeoutError as error:
            raise ToolUnavailableError(
                f"{url}: the server did not answer the message {kind!r} within {self.environment.timeout_s:g} s"
            ) from error
        except (OSError, ClientError) as error:
            raise ToolUnavailableError(f"{url}: the session is lost: {error}") from error
        if message.type is not WSMsgType.TEXT:
            kind_got = message.type.name.lower()
            raise ToolUnavailableError(f"{url}: the session is lost: the WebSocket message is {kind_got}, not text")
        return self._read(message.data)

    def _read(self, text: str) -> Mapping[str, Any]:
        url = self.environment.url
        try:
            said = json.loads(text)
            data, kind = said["data"], said["type"]
            if kind == "error":
                code, why = data.get("code"), str(data.get("message"))
                if code in _POLICYS_FAULT:
                    raise ToolFailedError(f"{why} {json.dumps(data['errors'])}" if "errors" in data else why)
                kind_of_error = _ServerFullError if code == "CAPACITY_REACHED" else ToolUnavailableError
                raise kind_of_error(f"{url}: {code}: {why}")
            return {**data, "observation": dict(data["observation"])}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ToolUnavailableError(
                f"{url}: the server answered {text[:200]!r}, which is not an observation of OpenEnv 0.2 or newer. "
                "Update the server's openenv-core"
            ) from error


def _number(value: Any, url: str) -> float | None:
    try:
        return None if value is None else storable(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolUnavailableError(f"{url}: the server's reward {value!r:.80} is not a finite number") from error


def _step(action: Mapping[str, Any]) -> ToolSchema:
    """Make the tool `step` from the JSON schema of an action."""
    properties = {name: schema for name, schema in action.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action.get("required", ()) if name in properties]
    kept = {name: action[name] for name in ("$defs", "additionalProperties") if name in action}
    return ToolSchema(
        name="step",
        description=str(action.get("description", "")) or "Acts in the environment.",
        parameters={"type": "object", "properties": properties, "required": required, **kept},
    )


def _output(observation: Mapping[str, Any]) -> ToolOutput:
    """Return an observation for the policy. Fields that are data URIs of pictures are read after the text."""
    uris = {
        name: value for name, value in observation.items() if isinstance(value, str) and value.startswith("data:image/")
    }
    text = _shown({name: value for name, value in observation.items() if name not in uris})
    try:
        return ToolOutput(text=text, pictures=tuple(map(from_data_uri, uris.values())))
    except InputError as error:
        raise ToolUnavailableError(f"an observation's {', '.join(uris)}: {error}") from error


def _shown(observation: Mapping[str, Any]) -> str:
    """Return an observation as text for the policy: its only value if that is a string, or else JSON."""
    result = observation.get("result")
    if result is not None:  # the result of an MCP tool
        data = result.get("data", result) if isinstance(result, dict) else result
        return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    said = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    [*only] = said.values()
    if len(only) == 1 and isinstance(only[0], str):
        return only[0]
    return json.dumps(said, ensure_ascii=False) if said else ""
