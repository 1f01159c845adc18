"""Dialect of OpenAI's Responses API. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rayapp.rollout.gateway.conversation import Ask, Choice, RefusedError, Reply, Said, ToolCall
from rayapp.rollout.gateway.fields import names, other_fields
from rayapp.rollout.gateway.openai_chat import OpenAIChat, chosen_calls
from rayapp.rollout.gateway.reading import (
    content,
    distribution,
    event,
    flag,
    json_form,
    objects,
    pieces,
    positive,
    refuse,
    text,
    tool,
    tools,
)
from rayapp.tools.base import ToolSchema

_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "reasoning": {"summary": []},
    "function_call": {"arguments": ""},
}
_FIELDS = names("""
    input instructions max_output_tokens model parallel_tool_calls previous_response_id seed stream temperature text
    tool_choice tools top_k top_p
    """)
_ECHOED = (
    "instructions",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
)
_TEXTS = ("input_text", "output_text", "text", "refusal")


class OpenAIResponses:
    """OpenAI's Responses API; see `reading.Dialect`."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others = other_fields(body, _FIELDS)
        shape = body.get("text") or {}
        if not isinstance(shape, dict):
            raise refuse(f"text must be an object, not {shape!r:.40}")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
        instructions = text(body.get("instructions"), "instructions")
        head = (Said(role="system", text=instructions),) if instructions else ()
        brought = tools(body.get("tools"), _tool)
        several = flag(body.get("parallel_tool_calls"), "parallel_tool_calls", default=True)
        form = json_form(shape.get("format"), "text.format")
        return Ask(
            messages=(*head, *_joined([said for i, item in enumerate(items) if (said := _said(item, i)) is not None])),
            tools=brought,
            model=text(body.get("model"), "model") or "policy",
            max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
            distribution=distribution(body),
            form=chosen_calls(body.get("tool_choice"), brought, several=several) or form,
            reads_calls=body.get("tool_choice") != "none",
            several_calls=several,
            is_stream=bool(body.get("stream")),
            previous=text(body.get("previous_response_id"), "previous_response_id").removeprefix("resp_"),
            may_be_named=True,
            not_followed=(*others.not_followed, *(["text.verbosity"] if shape.get("verbosity") else [])),
            unknown=others.unknown,
            echoed={name: body[name] for name in _ECHOED if body.get(name) is not None},
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        return _response(reply, ask, _items(reply), is_done=True)

    def events(self, reply: Reply, ask: Ask) -> Iterator[bytes]:
        numbers = count()

        def told(kind: str, **fields: Any) -> bytes:
            return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, f"response.{kind}")

        begun = _response(reply, ask, [], is_done=False)
        yield told("created", response=begun)
        yield told("in_progress", response=begun)
        items = _items(reply)
        for index, item in enumerate(items):
            empty = {key: value for key, value in item.items() if key not in ("content", "summary", "arguments")}
            started = empty | _EMPTY[item["type"]] | {"status": "in_progress"}
            yield told("output_item.added", output_index=index, item=started)
            for kind, fields in _parts(item):
                yield told(kind, output_index=index, item_id=item["id"], **fields)
            yield told("output_item.done", output_index=index, item=item)
        ended = "incomplete" if reply.choices[0].finish_reason == "length" else "completed"
        yield told(ended, response=_response(reply, ask, items, is_done=True))

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        return OpenAIChat().refusal(refused)

    def refusal_event(self, refused: RefusedError) -> bytes:
        error = self.refusal(refused)["error"]
        fields = {"code": error["code"] or error["type"], "message": error["message"], "param": None}
        return event({"type": "error", "sequence_number": 0, **fields}, "error")


def _said(item: Mapping[str, Any], index: int) -> Said | None:
    """Return one item of the input as a message; None for thoughts, which are not sent to the policy again."""
    where, kind = f"input[{index}]", item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        name, arguments = text(item.get("name"), f"{where}.name"), text(item.get("arguments"), f"{where}.arguments")
        call = ToolCall(id=text(item.get("call_id"), f"{where}.call_id"), name=name, arguments=arguments)
        return Said(role="assistant", text="", calls=(call,))
    if kind == "function_call_output":
        result = content(item.get("output"), where, _TEXTS)
        return Said(role="tool", text=result, call_id=text(item.get("call_id"), f"{where}.call_id"))
    role = item.get("role")
    if kind != "message" or role not in ("system", "developer", "user", "assistant"):
        raise refuse(f"{where}: items of type {kind!r:.40} and role {role!r:.40} are not supported")
    return Said(role="system" if role == "developer" else str(role), text=content(item.get("content"), where, _TEXTS))


def _joined(messages: list[Said]) -> Iterator[Said]:
    """Yield one message for each turn: its items joined."""
    waiting: Said | None = None
    for said in messages:
        if said.role == "assistant" and waiting is not None:
            whole = waiting.text + said.text
            waiting = Said(role="assistant", text=whole, calls=(*waiting.calls, *said.calls))
            continue
        if waiting is not None:
            yield waiting
        waiting = said if said.role == "assistant" else None
        if waiting is None:
            yield said
    if waiting is not None:
        yield waiting


def _tool(given: Mapping[str, Any], index: int) -> ToolSchema:
    if given.get("type") != "function":
        raise refuse(f"tools[{index}]: only tools of type function are supported, not {given.get('type')!r:.40}")
    return tool(given, f"tools[{index}]")


def _items(reply: Reply) -> list[dict[str, Any]]:
    choice: Choice = reply.choices[0]
    items = list[dict[str, Any]]()
    if choice.thoughts:
        summary = [{"type": "summary_text", "text": choice.thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary})
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed", "content": [part]}
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in choice.calls
    ]
    return items


def _parts(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an item's content in the pieces that a stream sends."""
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "function_call_arguments.delta", {"delta": piece}
        yield "function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    if item["type"] == "reasoning":
        return
    part = item["content"][0]
    yield "content_part.added", {"content_index": 0, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield "output_text.delta", {"content_index": 0, "delta": piece, "logprobs": []}
    yield "output_text.done", {"content_index": 0, "text": part["text"], "logprobs": []}
    yield "content_part.done", {"content_index": 0, "part": part}


def _response(reply: Reply, ask: Ask, items: list[dict[str, Any]], *, is_done: bool) -> dict[str, Any]:
    is_cut = reply.choices[0].finish_reason == "length"
    status = ("incomplete" if is_cut else "completed") if is_done else "in_progress"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created_s,
        "model": reply.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_done and is_cut else None,
        "instructions": None,
        "metadata": {},
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{ask.previous}" if ask.previous else None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": _usage(reply) if is_done else None,
    } | dict(ask.echoed)


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
