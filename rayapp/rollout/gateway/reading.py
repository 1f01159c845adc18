"""Functions that the dialects (one for each API) share: they read fields of a JSON body or refuse them. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rayapp.core.errors import InputError
from rayapp.rollout.gateway.conversation import Ask, Begun, Form, RefusedError, Reply, Said, Shown, without_surrogates
from rayapp.rollout.gateway.streams import StreamWriter
from rayapp.storage.base import hash_bytes
from rayapp.storage.media import from_data_uri
from rayapp.tools.base import ToolSchema

MAX_STOPS, MAX_STOP_CHARS = 16, 200  # the engine checks each stop text at every token
MAX_TOOL_CHARS = 256 << 10  # all tools of a request together, as JSON
# Field of vLLM's StructuredOutputsParams that a request may set -> type of its value.
_FORMS: dict[str, Any] = {
    "json": (str, dict),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
    "structural_tag": (str,),
}
_MAX_VARIABLES = 16
_PICTURES = ("image_url", "input_image", "image")
# Arguments of `apply_chat_template`, and special tokens.
_NO_VARIABLES = frozenset({
    "add_generation_prompt", "bos_token", "chat_template", "continue_final_message", "conversation", "documents",
    "eos_token", "max_length", "messages", "padding", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


class Dialect(Protocol):
    """The code for one API, which reads request bodies and writes reply bodies. No state, no I/O."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        """Read a request's body. Raises RefusedError: a field is wrong or not supported."""
        ...

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]: ...

    def stream(self, begun: Begun, ask: Ask) -> StreamWriter:
        """Return an object that writes one reply as a stream of events."""
        ...

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of an error response in the API's form."""
        ...

    def refusal_event(self, refused: RefusedError) -> bytes:
        """Return the refusal as an event, for a stream that has begun."""
        ...


def refuse(message: str) -> RefusedError:
    return RefusedError("invalid", message)


def parsed(data: bytes) -> Mapping[str, Any]:
    """Return a request's body as data. Lone halves of surrogate pairs are escaped, for tokenizers."""
    try:
        written = data.decode(json.detect_encoding(data), "surrogatepass")
        body = json.loads(written)
        if "\\u" in written or not written.isascii():  # other texts have no surrogates
            body = without_surrogates(body)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise refuse("the body must be a JSON object")
    return body


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a field's list of objects; empty for null."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refuse(f"{name} must be a list of objects")
    return value


def text(value: Any, name: str) -> str:
    """Return a field's string; empty for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise refuse(f"{name} must be a string, not {type(value).__name__}")
    return value


def stops(value: Any, name: str) -> tuple[str, ...]:
    """Return the stop texts in a field's value, which is one string or a list of strings."""
    many = [value] if isinstance(value, str) else value or []
    if not isinstance(many, list) or not all(isinstance(each, str) and each for each in many):
        raise refuse(f"{name} must be a non-empty string, or a list of non-empty strings")
    if len(many) > MAX_STOPS:
        raise refuse(f"{name} has {len(many)} strings: at most {MAX_STOPS} are allowed")
    if any(len(each) > MAX_STOP_CHARS for each in many):
        raise refuse(f"{name}: each string must have at most {MAX_STOP_CHARS} characters")
    return tuple(many)


def positive(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refuse(f"{name} must be an integer of at least 1, not {value!r:.40}")
    return value


def content(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a string, or parts of these kinds, joined with line breaks."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = list[str]()
    for part in objects(value, f"{where}.content"):
        if part.get("type") not in kinds:
            raise refuse(f"{where}: the policy reads no parts of type {part.get('type')!r:.40} here")
        parts.append(text(part.get("text", part.get("refusal")), f"{where}.content.text"))
    return "\n".join(parts)


def said(role: str, value: Any, where: str, kinds: Sequence[str] = ("text",), *, call_id: str = "") -> Said:
    """Return a user's message or a tool's result, whose content may have pictures between the parts of `content`."""
    if not isinstance(value, list):
        return Said(role=role, text=content(value, where), call_id=call_id)
    parts = tuple(
        _picture(part, where) if part.get("type") in _PICTURES else content([part], where, kinds)
        for part in objects(value, f"{where}.content")
    )
    texts = [part for part in parts if isinstance(part, str)]
    return Said(role=role, text="\n".join(texts), parts=parts if len(texts) < len(parts) else (), call_id=call_id)


def _picture(part: Mapping[str, Any], where: str) -> Shown:
    """Return a picture in the form of OpenAI's Chat Completions or Responses API, or Anthropic's."""
    match part.get("image_url", part.get("source")):
        case str(uri) | {"url": str(uri)}:
            pass
        case {"type": "base64", "data": str(data)} as source:
            uri = f"data:{source.get('media_type')};base64,{data}"
        case other:
            raise refuse(f"{where}: a picture must have its bytes in base64, not {other!r:.60}")
    try:
        encoded = from_data_uri(uri)
    except InputError as error:
        raise refuse(f"{where}: {error}") from None
    return hash_bytes(encoded), encoded


def tools(value: Any, read: Callable[[Mapping[str, Any], int], ToolSchema]) -> tuple[ToolSchema, ...]:
    """Return the tools that an agent brings; `read` makes one from an entry and its index."""
    given = objects(value, "tools")
    size = len(json.dumps(given, ensure_ascii=False)) if given else 0
    if size > MAX_TOOL_CHARS:
        raise refuse(f"tools have {size:,} characters as JSON: at most {MAX_TOOL_CHARS:,} are allowed")
    return tuple(read(each, i) for i, each in enumerate(given))


def json_form(value: Any, field: str, schema: str = "schema") -> Form | None:
    """Return the form that `field` demands of the answer: OpenAI's `response_format` or `text.format`, or Anthropic's
    `output_config.format`. `schema` is the key of the JSON schema in it."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Form(field=field, structured={"json": {"type": "object"}})
    if kind == "structural_tag":
        return Form(field=field, structured={"structural_tag": json.dumps(value)})
    told = value.get(schema) if isinstance(value, dict) else None
    if schema == "json_schema" and isinstance(told, dict):
        told = told.get("schema")
    if kind != "json_schema":
        raise refuse(f"{field}.type must be text, json_object, json_schema or structural_tag, not {kind!r:.40}")
    if not isinstance(told, dict):
        raise refuse(f"{field} of type json_schema: its `schema` must be a JSON object")
    return Form(field=field, structured={"json": told})


def structured_form(value: Any) -> Form | None:
    """Return the form that vLLM's field `structured_outputs` demands; None for null."""
    if value is None:
        return None
    given = {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or (name := next(iter(given))) not in _FORMS:
        raise refuse(f"structured_outputs must be an object with exactly one of these fields: {', '.join(_FORMS)}")
    if not isinstance(given[name], _FORMS[name]):
        wanted = " or ".join(each.__name__ for each in _FORMS[name])
        raise refuse(f"structured_outputs.{name} must be a {wanted}, not {given[name]!r:.40}")
    if len(json.dumps(given)) > MAX_TOOL_CHARS:
        raise refuse(f"structured_outputs.{name} must have at most {MAX_TOOL_CHARS:,} characters as JSON")
    if name == "choice" and not (given[name] and all(isinstance(each, str) and each for each in given[name])):
        raise refuse("structured_outputs.choice must be a non-empty list of non-empty strings")
    return Form(field="structured_outputs", structured=given)


_DEFS = ("$defs", "definitions")  # today's key of a JSON schema, and that of older drafts
_WHOLE = ""  # name of a tool's whole schema among the definitions


def call_form(tools: Sequence[ToolSchema], name: str | None, *, several: bool) -> Form:
    """Return the form of an answer that must call the tool `name` (None: any tool), or `several`."""
    chosen = [tool for tool in tools if name in (None, tool.name)]
    if not chosen:
        wanted = f"the tool {name!r:.60}, which is not in tools" if name else "a call, but tools is empty"
        problem = f"tool_choice demands {wanted}"
        return Form(field="tool_choice", structured={}, problem=problem)
    parts = [_apart(tool.parameters, number) for number, tool in enumerate(chosen)]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [tool.name]}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, (parameters, _) in zip(chosen, parts, strict=True)
    ]
    most = {} if several and name is None else {"maxItems": 1}
    definitions = {key: value for _, own in parts for key, value in own.items()}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls} if len(calls) > 1 else calls[0]}
    schema |= {"$defs": definitions} if definitions else {}
    return Form(field="tool_choice", structured={"json": schema}, is_calls=True)


def _apart(parameters: Mapping[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a tool's schema, and its definitions under names that no other tool has."""
    own = _renamed(dict(parameters), number)
    found = {f"{key}_{number}{part}": each for part in _DEFS for key, each in (own.pop(part, None) or {}).items()}
    is_named = f"#/$defs/{_WHOLE}_{number}" in json.dumps(own) + json.dumps(found)
    return own, found | ({f"{_WHOLE}_{number}": own} if is_named else {})


def _renamed(value: Any, number: int) -> Any:
    """Return a schema in which references name the definitions of tool `number`."""
    if isinstance(value, list):
        return [_renamed(each, number) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _renamed(each, number) for key, each in value.items()}
    match str(found.get("$ref")).split("/"):
        case ["#", part, name, *below] if part in _DEFS:
            found["$ref"] = "/".join(["#", "$defs", f"{name}_{number}{part}", *below])
        case ["#", *below]:  # the tool's whole schema, or another part of it
            found["$ref"] = "/".join(["#", "$defs", f"{_WHOLE}_{number}", *below])
    return found


def tool(function: Mapping[str, Any], where: str, parameters: str = "parameters") -> ToolSchema:
    """Return the tool of an agent's definition; `parameters` is the key of its JSON schema."""
    name = text(function.get("name"), f"{where}.name")
    schema = function.get(parameters) or {"type": "object", "properties": {}}
    if not name:
        raise refuse(f"{where}: the tool has no name")
    if not isinstance(schema, dict):
        raise refuse(f"{where}.{parameters} must be a JSON schema, which is an object, not {schema!r:.40}")
    if not isinstance(schema.get("properties") or {}, dict):
        raise refuse(f"{where}.{parameters}.properties must be an object, not {schema['properties']!r:.40}")
    return ToolSchema(
        name=name, description=text(function.get("description"), f"{where}.description"), parameters=schema
    )


def template_variables(given: Any, effort: Any = None) -> dict[str, Any]:
    """Return the chat template's variables from `chat_template_kwargs` and `reasoning_effort`, which, as in vLLM, also
    sets `enable_thinking`: False for `none`, else True."""
    variables = {} if given is None else given
    if not isinstance(variables, dict) or len(variables) > _MAX_VARIABLES:
        raise refuse(f"chat_template_kwargs must be an object with at most {_MAX_VARIABLES} fields")
    for name, value in variables.items():
        if not name.isidentifier() or len(name) > 60 or name in _NO_VARIABLES:
            raise refuse(f"chat_template_kwargs: {name!r:.60} is not a variable that a request may set")
        if not isinstance(value, bool | int | float | str) or len(str(value)) > 1000:
            raise refuse(
                f"chat_template_kwargs.{name} must be true, false, a number, or a string of at most 1000 characters"
            )
    if effort is None:
        return variables
    return {"reasoning_effort": text(effort, "reasoning_effort")[:60], "enable_thinking": effort != "none"} | variables


def flag(value: Any, name: str, *, default: bool) -> bool:
    if value is None or isinstance(value, bool):
        return default if value is None else value
    raise refuse(f"{name} must be true or false, not {value!r:.40}")


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return the bytes of a server-sent event."""
    head = f"event: {name}\n" if name else ""
    # json.dumps writes only ASCII. Without that, half a surrogate pair of the policy could not be encoded as UTF-8.
    return f"{head}data: {json.dumps(data)}\n\n".encode()
