"""Requests and replies of OpenAI's Chat Completions API. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
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

_CODES: dict[Kind, tuple[str, str | None]] = {
    "key": ("authentication_error", "invalid_api_key"),
    "unknown": ("invalid_request_error", "session_not_found"),
    "no_path": ("invalid_request_error", "unknown_url"),
    "no_model": ("invalid_request_error", "model_not_found"),
    "over": ("invalid_request_error", "session_over"),
    "turns": ("invalid_request_error", "turn_limit_reached"),
    "tokens": ("invalid_request_error", "context_length_exceeded"),
    "busy": ("rate_limit_error", "too_many_calls"),
    "engine": ("server_error", "policy_unavailable"),
}
_FIELDS = names("""
    chat_template_kwargs max_completion_tokens max_tokens messages model n parallel_tool_calls
    reasoning_effort response_format stop stream stream_options structured_outputs tool_choice tools
    """)


class OpenAIChat:
    """`Dialect` of OpenAI's Chat Completions API: reads its requests and writes its replies."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others = other_fields(body, _FIELDS)
        stream = body.get("stream_options") or {}
        brought = tools(body.get("tools"), _tool)
        several = flag(body.get("parallel_tool_calls"), "parallel_tool_calls", default=True)
        form = json_form(body.get("response_format"), "response_format", "json_schema")
        return Ask(
            messages=tuple(_said(message, i) for i, message in enumerate(objects(body.get("messages"), "messages"))),
            tools=brought,
            model=text(body.get("model"), "model") or "policy",
            num_choices=positive(body.get("n"), "n") or 1,
            max_tokens=positive(body.get("max_completion_tokens"), "max_completion_tokens")
            or positive(body.get("max_tokens"), "max_tokens"),
            stop=stops(body.get("stop"), "stop"),
            ignored_sampling=ignored_sampling(body),
            variables=template_variables(body.get("chat_template_kwargs"), body.get("reasoning_effort")),
            form=chosen_calls(body.get("tool_choice"), brought, several=several)
            or form
            or structured_form(body.get("structured_outputs")),
            reads_calls=body.get("tool_choice") != "none",
            several_calls=several,
            is_stream=bool(body.get("stream")),
            wants_usage=isinstance(stream, dict) and bool(stream.get("include_usage")),
            not_followed=others,
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        choices = [
            {"index": i, "message": _message(choice), "logprobs": None, "finish_reason": _reason(choice)}
            for i, choice in enumerate(reply.choices)
        ]
        return _head(reply, "chat.completion") | {"choices": choices, "usage": usage(reply)}

    def stream(self, begun: Begun, ask: Ask) -> StreamWriter:
        return _Stream(begun, ask)

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        kind, code = _CODES.get(refused.kind, ("invalid_request_error", None))
        return {"error": {"message": str(refused), "type": kind, "param": None, "code": code}}

    def refusal_event(self, refused: RefusedError) -> bytes:
        return event(self.refusal(refused))


class _Stream(StreamWriter):
    @cached_property
    def _head(self) -> dict[str, Any]:
        return _head(self.begun, "chat.completion.chunk") | ({"usage": None} if self.ask.wants_usage else {})

    def _chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event(self._head | {"choices": [choice]})

    def begin(self) -> bytes:
        roles = ({"role": "assistant", "content": ""} for _ in range(self.ask.num_choices))
        return b"".join(self._chunk(index, delta) for index, delta in enumerate(roles))

    def delta(self, index: int, kind: PartKind, text: str) -> bytes:
        return self._chunk(index, {"content" if kind == "text" else "reasoning_content": text})

    def end(self, reply: Reply) -> bytes:
        events = list[bytes]()
        for index, choice in enumerate(reply.choices):
            events.append(self.rest(index, choice))
            calls = ({"index": number} | _call(call) for number, call in enumerate(choice.calls))
            events += [self._chunk(index, {"tool_calls": [call]}) for call in calls]
            events.append(self._chunk(index, {}, _reason(choice)))
        if self.ask.wants_usage:
            events.append(event(self._head | {"choices": [], "usage": usage(reply)}))
        return b"".join([*events, b"data: [DONE]\n\n"])


def chosen_calls(choice: Any, brought: Sequence[ToolSchema], *, several: bool) -> Form | None:
    """Return the form of the tool calls that `tool_choice` demands; None if it leaves the policy the choice."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return call_form(brought, None, several=several)
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise refuse(f"tool_choice must be auto, none, required or an object of type function, not {choice!r:.60}")
    return call_form(brought, text(function.get("name"), "tool_choice.name"), several=several)


def _said(message: Mapping[str, Any], index: int) -> Said:
    where, role = f"messages[{index}]", message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise refuse(f"{where}: role must be system, developer, user, assistant or tool, not {role!r:.40}")
    given, kinds = message.get("content"), ("text", "refusal")
    if role == "tool":
        return said("tool", given, where, kinds, call_id=text(message.get("tool_call_id"), f"{where}.tool_call_id"))
    if role == "user":
        return said("user", given, where, kinds)
    words = content(given, where, kinds)
    if role == "assistant":
        made = objects(message.get("tool_calls"), f"{where}.tool_calls")
        return Said(role="assistant", text=words, calls=tuple(_made(call, where) for call in made))
    return Said(role="system", text=words)


def _made(call: Mapping[str, Any], where: str) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.tool_calls: each call must have an object `function` with name and arguments")
    return ToolCall(
        id=text(call.get("id"), f"{where}.tool_calls.id"),
        name=text(function.get("name"), f"{where}.tool_calls.function.name"),
        arguments=text(function.get("arguments"), f"{where}.tool_calls.function.arguments"),
    )


def _tool(given: Mapping[str, Any], index: int) -> ToolSchema:
    function = given.get("function")
    if given.get("type") == "function" and not isinstance(function, dict):
        raise refuse(f"tools[{index}]: function must be an object with a name and parameters")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise refuse(f"tools[{index}]: only tools of type function are supported, not {given.get('type')!r:.40}")
    return tool(function, f"tools[{index}].function")


def _head(reply: Begun, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created_s, "model": reply.model}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thoughts:
        message["reasoning_content"] = choice.thoughts
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{call.id}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reason(choice: Choice) -> str:
    return "tool_calls" if choice.calls else choice.finish_reason


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
    }
