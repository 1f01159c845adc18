"""Dialect of Anthropic's Messages API. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayapp.rollout.gateway.conversation import Ask, Choice, Form, Kind, RefusedError, Reply, Said, ToolCall
from rayapp.rollout.gateway.fields import names, other_fields
from rayapp.rollout.gateway.reading import (
    call_form,
    content,
    distribution,
    event,
    flag,
    json_form,
    objects,
    pieces,
    positive,
    refuse,
    stops,
    text,
    tool,
    tools,
)
from rayapp.tools.base import ToolSchema

_TYPES: dict[Kind, str] = {
    "key": "authentication_error",
    "unknown": "not_found_error",
    "no_path": "not_found_error",
    "no_model": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "engine": "api_error",
}
_SCHEMA = "input_schema"
_FIELDS = names("""
    max_tokens messages model output_config output_format seed stop_sequences stream system temperature thinking
    tool_choice tools top_k top_p
    """)


class AnthropicMessages:
    """Anthropic's Messages API; see `reading.Dialect`."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others = other_fields(body, _FIELDS)
        chosen, output = _object(body, "tool_choice"), _object(body, "output_config")
        several = not flag(chosen.get("disable_parallel_tool_use"), "disable_parallel_tool_use", default=False)
        brought = tools(body.get("tools"), lambda each, i: tool(_own(each, i), f"tools[{i}]", _SCHEMA))
        thinking = _object(body, "thinking").get("type", "disabled") != "disabled"
        system = content(body.get("system"), "system")
        head = (Said(role="system", text=system),) if system else ()
        said = (each for i, one in enumerate(objects(body.get("messages"), "messages")) for each in _said(one, i))
        form = json_form(output.get("format") or body.get("output_format"), "output_config.format")
        return Ask(
            messages=(*head, *said),
            tools=brought,
            model=text(body.get("model"), "model") or "policy",
            max_tokens=positive(body.get("max_tokens"), "max_tokens"),
            stop=stops(body.get("stop_sequences"), "stop_sequences"),
            distribution=distribution(body),
            form=_chosen_calls(chosen, brought, several=several) or form,
            reads_calls=chosen.get("type") != "none",
            several_calls=several,
            is_stream=bool(body.get("stream")),
            wants_thoughts=thinking,
            not_followed=(
                *others.not_followed,
                *(["thinking"] if thinking else []),
                *(f"output_config.{name}" for name in output if name != "format"),
            ),
            unknown=others.unknown,
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        choice = reply.choices[0]
        return _head(reply) | {
            "content": _blocks(choice, ask),
            "stop_reason": _reason(choice),
            "stop_sequence": choice.is_stopped_by or None,
            "usage": _usage(reply, reply.num_tokens),
        }

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        choice = reply.choices[0]
        start = _head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply, 0)}
        yield _event("message_start", message=start)
        for index, block in enumerate(_blocks(choice, ask)):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        delta = {"stop_reason": _reason(choice), "stop_sequence": choice.is_stopped_by or None}
        yield _event("message_delta", delta=delta, usage={"output_tokens": reply.num_tokens})
        yield _event("message_stop")

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        # Agents compact their history when an error contains these words.
        message = f"prompt is too long: {refused}" if refused.kind == "tokens" else str(refused)
        kind = _TYPES.get(refused.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def refusal_event(self, refused: RefusedError) -> bytes:
        return event(self.refusal(refused), "error")


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field's value; an empty object for null."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refuse(f"{name} must be an object, not {value!r:.40}")
    return value or {}


def _chosen_calls(choice: Mapping[str, Any], brought: Sequence[ToolSchema], *, several: bool) -> Form | None:
    """Return the form of the calls that `tool_choice` demands; None if it leaves the choice to the policy."""
    match choice.get("type", "auto"):
        case "auto" | "none":
            return None
        case "any":
            return call_form(brought, None, several=several)
        case "tool":
            return call_form(brought, text(choice.get("name"), "tool_choice.name"), several=several)
    raise refuse(f"tool_choice must have the type auto, none, any or tool, not {choice!r:.60}")


def _own(given: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return a tool that the agent runs itself."""
    if given.get("type") not in (None, "custom"):
        raise refuse(f"tools[{index}]: Anthropic's own tools ({given.get('type')!r:.40}) are not offered")
    return given


def _said(message: Mapping[str, Any], index: int) -> Iterator[Said]:
    where, role, given = f"messages[{index}]", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}: role must be user or assistant, not {role!r:.40}")
    if role == "assistant":
        yield _assistant(given, where)
        return
    if given is None or isinstance(given, str):
        yield Said(role=str(role), text=given or "")
        return
    words = list[dict[str, Any]]()
    for block in objects(given, f"{where}.content"):
        if block.get("type") == "tool_result":
            result = content(block.get("content"), f"{where}: tool_result")
            yield Said(role="tool", text=result, call_id=text(block.get("tool_use_id"), f"{where}.tool_use_id"))
        else:
            words.append(block)
    if words:
        yield Said(role=str(role), text=content(words, where))


def _assistant(given: Any, where: str) -> Said:
    if given is None or isinstance(given, str):
        return Said(role="assistant", text=given or "")
    blocks = objects(given, f"{where}.content")
    words = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    return Said(
        role="assistant",
        text=content(words, where),
        calls=tuple(_made(block, where) for block in blocks if block.get("type") == "tool_use"),
    )


def _made(block: Mapping[str, Any], where: str) -> ToolCall:
    return ToolCall(
        id=text(block.get("id"), f"{where}.tool_use.id"),
        name=text(block.get("name"), f"{where}.tool_use.name"),
        arguments=json.dumps(block.get("input") or {}, ensure_ascii=False),
    )


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(choice: Choice, ask: Ask) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if choice.thoughts and ask.wants_thoughts:
        blocks.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        given = call.parsed if isinstance(call.parsed, dict) else {}
        blocks.append({"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": given})
    return blocks


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without its content, and the content as deltas."""
    match block["type"]:
        case "thinking":
            return block | {"thinking": ""}, [
                {"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])
            ]
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        case _:
            whole = json.dumps(block["input"])
            return block | {"input": {}}, [
                {"type": "input_json_delta", "partial_json": piece} for piece in pieces(whole)
            ]


def _reason(choice: Choice) -> str:
    if choice.calls:
        return "tool_use"
    if choice.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if choice.is_stopped_by else "end_turn"


def _usage(reply: Reply, num_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached_tokens,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
