"""Functions that the dialects share: read fields of a JSON body or refuse them, and write stream events. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rayapp.rollout.gateway.conversation import Ask, Form, RefusedError, Reply, without_surrogates
from rayapp.rollout.order import MAX_SEED
from rayapp.tools.base import ToolSchema

MAX_STOPS, MAX_STOP_CHARS = 16, 200
"""Maximum number and length of a request's stop texts: the engine checks each of them at every token."""
MAX_TOOL_CHARS = 256 << 10
"""Maximum characters of a request's tools together, as JSON."""
_PIECE_CHARS = 256
_DISTRIBUTION: tuple[tuple[str, Any, float, float], ...] = (
    ("temperature", int | float, 0.0, 2.0),
    ("top_p", int | float, 1e-6, 1.0),
    ("top_k", int, -1, 1 << 31),
    ("seed", int, -(1 << 63), 1 << 64),
)


class Dialect(Protocol):
    """One API: reads request bodies and writes reply bodies. No state, no I/O."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Read a request's body. Raises RefusedError: a field is wrong or not supported."""
        ...

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]: ...

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        """Yield the whole reply as the events of a stream."""
        ...

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error response in the API's form."""
        ...

    def refusal_event(self, refused: RefusedError) -> bytes:
        """Return the refusal as one event, for a stream that has begun."""
        ...


def refuse(message: str) -> RefusedError:
    return RefusedError("invalid", message)


def parsed(data: bytes) -> Mapping[str, Any]:
    """Return a request's body as data, with halves of surrogate pairs escaped: no tokenizer reads them.

    Raises:
        RefusedError: the body is not a JSON object.
    """
    try:
        body = without_surrogates(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise refuse(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refuse("the body must be a JSON object")
    return body


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(f"{name} must be a list of objects")
    return value


def text(value: Any, name: str) -> str:
    """Return a string; empty for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refuse(f"{name} must be a string, not {type(value).__name__}")
    return value


def stops(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts that end a turn: one string, or a list of them."""
    many = [value] if isinstance(value, str) else value or []
    if not isinstance(many, list) or not all(isinstance(each, str) and each for each in many):
        raise refuse(f"{name} must be a non-empty string, or a list of non-empty strings")
    if len(many) > MAX_STOPS or any(len(each) > MAX_STOP_CHARS for each in many):
        raise refuse(f"{name} must be at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")
    return tuple(many)


def positive(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(f"{name} must be an integer of at least 1, not {value!r:.40}")
    return value


def content(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a string, or its parts joined with line breaks.

    Args:
        kinds: types of parts that are allowed.
    """
    if value is None or isinstance(value, str):
        return value or ""
    parts = list[str]()
    for part in objects(value, f"{where}.content"):
        if part.get("type") not in kinds:
            raise refuse(f"{where}: the policy reads only text, not parts of type {part.get('type')!r:.40}")
        parts.append(text(part.get("text", part.get("refusal")), f"{where}.content.text"))
    return "\n".join(parts)


def tools(value: Any, read: Callable[[Mapping[str, Any], int], ToolSchema]) -> tuple[ToolSchema, ...]:
    """Return the tools that an agent brings.

    Args:
        read: reads one tool, given its entry and its index in the list.
    Raises:
        RefusedError: an entry is not a tool, or the tools together are too long.
    """
    given = objects(value, "tools")
    size = len(json.dumps(given, ensure_ascii=False)) if given else 0
    if size > MAX_TOOL_CHARS:
        raise refuse(f"tools have {size:,} characters as JSON: at most {MAX_TOOL_CHARS:,} are allowed")
    return tuple(read(each, i) for i, each in enumerate(given))


def json_form(value: Any, field: str, schema: str = "schema") -> Form | None:
    """Return the form that a request demands of its answer; None if any text will do.

    Args:
        value: OpenAI's `response_format` or `text.format`, or Anthropic's `output_config.format`.
        field: name of the field, for messages.
        schema: name of the key with the JSON schema.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Form(field=field, schema={"type": "object"})
    told = value.get(schema) if isinstance(value, dict) else None
    if schema == "json_schema" and isinstance(told, dict):
        told = told.get("schema")
    if kind != "json_schema" or not isinstance(told, dict):
        raise refuse(f"{field} must have the type text, json_object or json_schema, and a schema with the last one")
    return Form(field=field, schema=told)


def call_form(tools: Sequence[ToolSchema], name: str | None, *, several: bool) -> Form:
    """Return the form of an answer that must call tools.

    Args:
        name: name of the tool; None for any tool.
        several: True if the answer may have more than one call.
    """
    chosen = [tool for tool in tools if name in (None, tool.name)]
    if not chosen:
        wanted = f"the tool {name!r:.60}, which is not in tools" if name else "a call, but tools is empty"
        problem = f"tool_choice demands {wanted}"
        return Form(field="tool_choice", schema={}, problem=problem)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [tool.name]}, "arguments": _without_defs(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in chosen
    ]
    most = {} if several and name is None else {"maxItems": 1}
    definitions = {key: value for tool in chosen for key, value in (tool.parameters.get("$defs") or {}).items()}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls} if len(calls) > 1 else calls[0]}
    return Form(field="tool_choice", schema=schema | ({"$defs": definitions} if definitions else {}), is_calls=True)


def _without_defs(tool: ToolSchema) -> dict[str, Any]:
    return {key: value for key, value in tool.parameters.items() if key != "$defs"}


def tool(function: Mapping[str, Any], where: str, parameters: str = "parameters") -> ToolSchema:
    """Return a tool that an agent brings.

    Args:
        parameters: name of the key with the JSON schema.
    """
    name = text(function.get("name"), f"{where}.name")
    schema = function.get(parameters) or {"type": "object", "properties": {}}
    if not name or not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
        raise refuse(f"{where}: a tool needs a name, and a JSON schema as {parameters}")
    return ToolSchema(
        name=name, description=text(function.get("description"), f"{where}.description"), parameters=schema
    )


def distribution(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the request's sampling settings, by the names of `SamplingParams`.

    Raises:
        RefusedError: a setting is not supported.
    """
    found = dict[str, float]()
    for name, kind, least, most in _DISTRIBUTION:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise refuse(f"{name} must be from {least:g} to {most:g}, not {value!r:.40}")
        found[name] = value
    if "seed" in found:
        found["seed"] = int(found["seed"]) % MAX_SEED
    return found


def flag(value: Any, name: str, *, default: bool) -> bool:
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise refuse(f"{name} must be true or false, not {value!r:.40}")


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    # json.dumps writes ASCII only: a policy can write half a surrogate pair, which UTF-8 can't encode.
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def pieces(whole: str) -> Iterator[str]:
    for start in range(0, len(whole), _PIECE_CHARS):
        yield whole[start : start + _PIECE_CHARS]
