"""What the dialects share: fields of a JSON body with clear refusals, content in parts, events of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rayapp.rollout.gateway.conversation import Ask, Reply
from rayapp.rollout.gateway.refusals import RefusedError
from rayapp.rollout.order import MAX_SEED
from rayapp.tools.base import ToolSchema

_PIECE_CHARS = 256
_DISTRIBUTION: tuple[tuple[str, Any, float, float], ...] = (
    ("temperature", int | float, 0.0, 2.0),
    ("top_p", int | float, 1e-6, 1.0),
    ("top_k", int, -1, 1 << 31),
    ("seed", int, -(1 << 63), 1 << 64),
)


class Dialect(Protocol):
    """One API: its bodies in and out. No state, no I/O."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Raises RefusedError: what is wrong, or not offered."""
        ...

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]: ...

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        """The reply as an event stream, to the end."""
        ...

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        """The API's form of an error."""
        ...

    def refusal_event(self, refused: RefusedError) -> bytes:
        """The same in a stream that has begun."""
        ...


def refuse(message: str) -> RefusedError:
    return RefusedError("invalid", message)


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects; none for null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(f"{name} must be a list of objects")
    return value


def text(value: Any, name: str) -> str:
    """A string; the empty one for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refuse(f"{name} must be a string, not {type(value).__name__}")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    """A string or a list of them, none of them empty."""
    many = [value] if isinstance(value, str) else value or []
    if not isinstance(many, list) or not all(isinstance(each, str) and each for each in many):
        raise refuse(f"{name} must be a text that isn't empty, or a list of such")
    return tuple(many)


def positive(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(f"{name} must be an integer of at least 1, not {value!r:.40}")
    return value


def content(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text, or parts of these kinds that hold some, each on a line of its own."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = list[str]()
    for part in objects(value, f"{where}.content"):
        if part.get("type") not in kinds:
            raise refuse(f"{where}: the policy reads text alone, not parts of type {part.get('type')!r:.40}")
        parts.append(text(part.get("text", part.get("refusal")), f"{where}.content.text"))
    return "\n".join(parts)


def tool(function: Mapping[str, Any], where: str, parameters: str = "parameters") -> ToolSchema:
    """A tool that an agent brings.

    Args:
        parameters: name of the key with the JSON schema.
    """
    name = text(function.get("name"), f"{where}.name")
    schema = function.get(parameters) or {"type": "object", "properties": {}}
    if not name or not isinstance(schema, dict):
        raise refuse(f"{where}: a tool has a name, and {parameters} that are a JSON schema")
    return ToolSchema(
        name=name, description=text(function.get("description"), f"{where}.description"), parameters=schema
    )


def distribution(body: Mapping[str, Any]) -> dict[str, float]:
    """What a request says of how to sample, by the names of `SamplingParams`.

    Raises:
        RefusedError: that can't be done.
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


def neutral(body: Mapping[str, Any], name: str, *values: Any) -> None:
    """Refuse what would change the distribution that the policy is trained at, or what is not there to be given."""
    if (value := body.get(name)) is not None and value not in values:
        raise refuse(f"{name} {value!r:.60} is not offered: the policy is sampled as it is trained")


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Server-sent."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def pieces(whole: str) -> Iterator[str]:
    for start in range(0, len(whole), _PIECE_CHARS):
        yield whole[start : start + _PIECE_CHARS]
