"""An OpenEnv server on loopback, protocol 0.2: a walk to the place that the seed chooses, or a tool in MCP's form."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from support.stubs.server import StubServer

MOVE = {
    "title": "Move",
    "description": "A move.",
    "type": "object",
    "additionalProperties": False,
    "properties": {"to": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["to"],
}
"""Schema of the walk's action. A move to 911 ends the session; places below 0 don't exist."""
SAYING = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
"""Schema of an action that is a text: the place as digits."""
_ECHO = {"name": "echo", "description": "Echoes.", "input_schema": {"type": "object", "properties": {"text": {}}}}


class OpenEnvStub(StubServer):
    """See the module.

    Args:
        schema: answer of GET /schema.
        max_sessions: sessions that it serves at once.
    """

    def __init__(self, schema: Any, *, max_sessions: int = 99) -> None:
        super().__init__()
        self.num_sessions = 0
        self._free = max_sessions
        self._schema = schema
        self.app.router.add_get("/schema", self._tell_schema)
        self.app.router.add_get("/ws", self._session)

    async def _tell_schema(self, request: web.Request) -> web.Response:
        return web.json_response(self._schema)

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if not self._free:
            await socket.send_json({"type": "error", "data": {"message": "1/1", "code": "CAPACITY_REACHED"}})
            return socket
        self.num_sessions += 1
        self._free -= 1
        goal = 0
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                goal = asked["data"]["seed"]
            if asked["data"].get("to") == 911:
                break
            await socket.send_json(_answer(asked["type"], asked["data"], goal))
        self._free += 1
        return socket


def _answer(kind: str, data: dict[str, Any], goal: int) -> dict[str, Any]:
    if kind == "reset":
        return _observed({"text": f"Go to {goal}."})
    if data.get("type") == "list_tools":
        return _observed({"tools": [_ECHO]})
    if data.get("type") == "call_tool":
        said = {"data": data["arguments"]["text"], "content": []}
        return _observed({"tool_name": "echo", "result": said, "error": None}, reward=0.5)
    data = {"to": int(data["message"])} if "message" in data else data
    if data["to"] < 0:
        return {"type": "error", "data": {"message": "no way", "code": "EXECUTION_ERROR"}}
    is_there = data["to"] == goal
    return _observed({"text": "", "at": data["to"]}, reward=float(is_there), done=is_there)


def _observed(observation: object, *, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}
