"""Requests and replies of Anthropic's Messages API. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayapp.rollout.gateway.conversation import Ask, Begun, Choice, Form, Kind, RefusedError, Reply, Said, ToolCall
from rayapp.rollout.gateway.fields import ignored_sampling, names, other_fields
from rayapp.rollout.gateway.reading import (
    call_form,
    content,
    event,
    flag,
    json_form,
    objects,
    positive,
    refuse,
    said,
    stops,
    structured_form,
    template_variables,
    text,
    tool,
    tools,
)
from rayapp.rollout.gateway.streams import PartKind, StreamWriter
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
    chat_template_kwargs max_tokens messages model output_config output_format stop_sequences stream
    structured_outputs system thinking tool_choice tools
    """)


class AnthropicMessages:
    """`Dialect` of Anthropic's Messages API: reads its requests and writes its replies."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others = other_fields(body, _FIELDS)
        chosen, output = _object(body, "tool_choice"), _object(body, "output_config")
        several = not flag(chosen.get("disable_parallel_tool_use"), "disable_parallel_tool_use", default=False)
        brought = tools(body.get("tools"), lambda each, i: tool(_own(each, i), f"tools[{i}]", _SCHEMA))
        thinking = _object(body, "thinking").get("type", "disabled") != "disabled"
        system = content(body.get("system"), "system")
        head = (Said(role="system", text=system),) if system else ()
        told = (each for i, one in enumerate(objects(body.get("messages"), "messages")) for each in _said(one, i))
        form = json_form(output.get("format") or body.get("output_format"), "output_config.format")
        return Ask(
            messages=(*head, *told),
            tools=brought,
            model=text(body.get("model"), "model") or "policy",
            max_tokens=positive(body.get("max_tokens"), "max_tokens"),
            stop=stops(body.get("stop_sequences"), "stop_sequences"),
            ignored_sampling=ignored_sampling(body),
            variables=template_variables(body.get("chat_template_kwargs"), output.get("effort")),
            form=_chosen_calls(chosen, brought, several=several)
            or form
            or structured_form(body.get("structured_outputs")),
            reads_calls=chosen.get("type") != "none",
            several_calls=several,
            is_stream=bool(body.get("stream")),
            wants_thoughts=thinking,
            not_followed=(
                *others,
                *(["thinking"] if thinking else []),
                *(f"output_config.{name}" for name in output if name not in ("effort", "format")),
            ),
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        choice = reply.choices[0]
        return _head(reply) | {
            "content": _blocks(choice, ask),
            "stop_reason": _reason(choice),
            "stop_sequence": choice.is_stopped_by or None,
            "usage": _usage(reply, reply.num_tokens),
        }

    def stream(self, begun: Begun, ask: Ask) -> StreamWriter:
        return _Stream(begun, ask)

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        # Write these words in the error: agents compact their history when they read them.
        message = f"prompt is too long: {refused}" if refused.kind == "tokens" else str(refused)
        kind = _TYPES.get(refused.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def refusal_event(self, refused: RefusedError) -> bytes:
        return event(self.refusal(refused), "error")


class _Stream(StreamWriter):
    def __init__(self, begun: Begun, ask: Ask) -> None:
        super().__init__(begun, ask)
        self._open: PartKind | None = None  # kind of the open content block
        self._num_blocks = 0

    def begin(self) -> bytes:
        start: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.begun, 0),
        }
        return _event("message_start", message=_head(self.begun) | start)

    def delta(self, index: int, kind: PartKind, text: str) -> bytes:
        if kind == "thoughts" and not self.ask.wants_thoughts:
            return b""
        is_text = kind == "text"
        delta = {"type": "text_delta", "text": text} if is_text else {"type": "thinking_delta", "thinking": text}
        return self._begun(kind) + _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _begun(self, kind: PartKind) -> bytes:
        """Close the open block and open one of this kind, unless it is open."""
        if self._open == kind:
            return b""
        ended, self._open = self._ended(), kind
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        return ended + self._start({"type": "text", "text": ""} if kind == "text" else thinking)

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _ended(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._stop()

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._num_blocks - 1)

    def end(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = [self.rest(0, choice)]
        if not choice.text and not choice.calls:
            events.append(self._begun("text"))
        events.append(self._ended())
        for block in (_tool_use(call) for call in choice.calls):
            events.append(self._start(block | {"input": {}}))
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append(_event("content_block_delta", index=self._num_blocks - 1, delta=arguments))
            events.append(self._stop())
        delta = {"stop_reason": _reason(choice), "stop_sequence": choice.is_stopped_by or None}
        events.append(_event("message_delta", delta=delta, usage={"output_tokens": reply.num_tokens}))
        return b"".join([*events, _event("message_stop")])


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refuse(f"{name} must be an object, not {value!r:.40}")
    return value or {}


def _chosen_calls(choice: Mapping[str, Any], brought: Sequence[ToolSchema], *, several: bool) -> Form | None:
    match choice.get("type", "auto"):
        case "auto" | "none":
            return None
        case "any":
            return call_form(brought, None, several=several)
        case "tool":
            return call_form(brought, text(choice.get("name"), "tool_choice.name"), several=several)
    raise refuse(f"tool_choice must have the type auto, none, any or tool, not {choice!r:.60}")


def _own(given: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    # Tools that Anthropic's servers run are refused.
    if given.get("type") not in (None, "custom"):
        raise refuse(
            f"tools[{index}]: type {given.get('type')!r:.40} is not supported, because Anthropic's servers would run "
            "this tool. Define a tool of type custom, which the agent runs"
        )
    return given


def _said(message: Mapping[str, Any], index: int) -> Iterator[Said]:
    where, role, given = f"messages[{index}]", message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}: role must be system, user or assistant, not {role!r:.40}")
    if role == "assistant":
        yield _assistant(given, where)
        return
    if given is None or isinstance(given, str):
        yield Said(role=str(role), text=given or "")
        return
    words = list[dict[str, Any]]()
    for block in objects(given, f"{where}.content"):
        if block.get("type") == "tool_result":
            call_id = text(block.get("tool_use_id"), f"{where}.tool_use_id")
            yield said("tool", block.get("content"), f"{where}: tool_result", call_id=call_id)
        else:
            words.append(block)
    if words:
        yield said("user", words, where) if role == "user" else Said(role="system", text=content(words, where))


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


def _head(reply: Begun) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(choice: Choice, ask: Ask) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if choice.thoughts and ask.wants_thoughts:
        blocks.append({"type": "thinking", "thinking": choice.thoughts, "signature": ""})
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    return [*blocks, *map(_tool_use, choice.calls)]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    given = call.parsed if isinstance(call.parsed, dict) else {}
    return {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": given}


def _reason(choice: Choice) -> str:
    if choice.calls:
        return "tool_use"
    if choice.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if choice.is_stopped_by else "end_turn"


def _usage(reply: Begun, num_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached_tokens,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
