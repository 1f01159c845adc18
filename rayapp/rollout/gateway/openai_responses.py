"""Requests and replies of OpenAI's Responses API. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rayapp.rollout.gateway.conversation import Ask, Begun, Choice, RefusedError, Reply, Said, ToolCall
from rayapp.rollout.gateway.fields import ignored_sampling, names, other_fields
from rayapp.rollout.gateway.openai_chat import OpenAIChat, chosen_calls
from rayapp.rollout.gateway.reading import (
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

_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "reasoning": {"summary": []},
    "function_call": {"arguments": ""},
}
_FIELDS = names("""
    chat_template_kwargs input instructions max_output_tokens model parallel_tool_calls previous_response_id
    reasoning stop store stream structured_outputs text tool_choice tools
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
    """`Dialect` of OpenAI's Responses API: reads its requests and writes its replies."""

    def read(self, body: Mapping[str, Any]) -> Ask:
        others = other_fields(body, _FIELDS)
        shape = body.get("text") or {}
        if not isinstance(shape, dict):
            raise refuse(f"the field text must be an object with the field format, not {shape!r:.40}")
        if body.get("previous_response_id"):
            raise refuse("previous_response_id is not supported: send the whole conversation as `input`")
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
        instructions = text(body.get("instructions"), "instructions")
        head = (Said(role="system", text=instructions),) if instructions else ()
        brought = tools(body.get("tools"), _tool)
        several = flag(body.get("parallel_tool_calls"), "parallel_tool_calls", default=True)
        form = json_form(shape.get("format"), "text.format")
        return Ask(
            messages=(*head, *_joined([each for i, item in enumerate(items) if (each := _said(item, i)) is not None])),
            tools=brought,
            model=text(body.get("model"), "model") or "policy",
            max_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
            stop=stops(body.get("stop"), "stop"),
            ignored_sampling=ignored_sampling(body),
            variables=template_variables(body.get("chat_template_kwargs"), _effort(body.get("reasoning"))),
            form=chosen_calls(body.get("tool_choice"), brought, several=several)
            or form
            or structured_form(body.get("structured_outputs")),
            reads_calls=body.get("tool_choice") != "none",
            several_calls=several,
            is_stream=bool(body.get("stream")),
            not_followed=(*others, *(["text.verbosity"] if shape.get("verbosity") else [])),
            echoed={name: body[name] for name in _ECHOED if body.get(name) is not None},
        )

    def write(self, reply: Reply, ask: Ask) -> dict[str, Any]:
        return _response(reply, ask, _items(reply), reply)

    def stream(self, begun: Begun, ask: Ask) -> StreamWriter:
        return _Stream(begun, ask)

    def refusal(self, refused: RefusedError) -> dict[str, Any]:
        return OpenAIChat().refusal(refused)

    def refusal_event(self, refused: RefusedError) -> bytes:
        error = self.refusal(refused)["error"]
        fields = {"code": error["code"] or error["type"], "message": error["message"], "param": None}
        return event({"type": "error", "sequence_number": 0, **fields}, "error")


class _Stream(StreamWriter):
    def __init__(self, begun: Begun, ask: Ask) -> None:
        super().__init__(begun, ask)
        self._numbers = count()
        self._open: PartKind | None = None  # kind of the open output item
        self._num_items = 0
        self._thoughts = list[str]()  # already sent

    def _told(self, kind: str, **fields: Any) -> bytes:
        fields = {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}
        return event(fields, fields["type"])

    def _of_item(self, kind: str, item: Mapping[str, Any], **fields: Any) -> bytes:
        return self._told(kind, output_index=self._num_items - 1, item_id=item["id"], **fields)

    def begin(self) -> bytes:
        begun = _response(self.begun, self.ask, [])
        return self._told("created", response=begun) + self._told("in_progress", response=begun)

    def delta(self, index: int, kind: PartKind, text: str) -> bytes:
        events = self._begun(kind)
        if kind == "thoughts":
            self._thoughts.append(text)
            thoughts = _thoughts(self.begun, "")
            return events + self._of_item("reasoning_summary_text.delta", thoughts, summary_index=0, delta=text)
        said = _message(self.begun, Choice(text=""))
        return events + self._of_item("output_text.delta", said, content_index=0, delta=text, logprobs=[])

    def _begun(self, kind: PartKind) -> bytes:
        if self._open == kind:
            return b""
        closed, self._open = self._thoughts_done(), kind
        if kind == "thoughts":
            item = _thoughts(self.begun, "")
            added, part = self._added(item), {"summary_index": 0, "part": item["summary"][0]}
            return closed + added + self._of_item("reasoning_summary_part.added", item, **part)
        item = _message(self.begun, Choice(text=""))
        added, part = self._added(item), {"content_index": 0, "part": item["content"][0]}
        return closed + added + self._of_item("content_part.added", item, **part)

    def _added(self, item: Mapping[str, Any]) -> bytes:
        self._num_items += 1
        empty = {key: value for key, value in item.items() if key not in ("content", "summary", "arguments")}
        started = empty | _EMPTY[item["type"]] | {"status": "in_progress"}
        return self._told("output_item.added", output_index=self._num_items - 1, item=started)

    def _done(self, item: Mapping[str, Any]) -> bytes:
        return self._told("output_item.done", output_index=self._num_items - 1, item=item)

    def _thoughts_done(self) -> bytes:
        if self._open != "thoughts":
            return b""
        item = _thoughts(self.begun, "".join(self._thoughts))
        part = item["summary"][0]
        events = self._of_item("reasoning_summary_text.done", item, summary_index=0, text=part["text"])
        events += self._of_item("reasoning_summary_part.done", item, summary_index=0, part=part)
        return events + self._done(item)

    def end(self, reply: Reply) -> bytes:
        choice = reply.choices[0]
        events = [self.rest(0, choice)]
        if choice.text or not choice.calls:
            events += [self._begun("text"), self._text_done(choice)]
        events.append(self._thoughts_done())
        for call in choice.calls:
            item = _function_call(call)
            events += [self._added(item), self._of_item("function_call_arguments.delta", item, delta=call.arguments)]
            done = {"arguments": call.arguments, "name": call.name}
            events += [self._of_item("function_call_arguments.done", item, **done), self._done(item)]
        ended = "incomplete" if choice.finish_reason == "length" else "completed"
        events.append(self._told(ended, response=_response(reply, self.ask, _items(reply), reply)))
        return b"".join(events)

    def _text_done(self, choice: Choice) -> bytes:
        item = _message(self.begun, choice)
        part = item["content"][0]
        fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        events = self._of_item("output_text.done", item, **fields)
        return events + self._of_item("content_part.done", item, content_index=0, part=part) + self._done(item)


def _effort(reasoning: Any) -> Any:
    if reasoning is not None and not isinstance(reasoning, dict):
        raise refuse(f"reasoning must be an object, not {reasoning!r:.40}")
    return (reasoning or {}).get("effort")


def _said(item: Mapping[str, Any], index: int) -> Said | None:
    """Return an item as a message; None for thoughts, which the policy does not read again."""
    where, kind = f"input[{index}]", item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        name, arguments = text(item.get("name"), f"{where}.name"), text(item.get("arguments"), f"{where}.arguments")
        call = ToolCall(id=text(item.get("call_id"), f"{where}.call_id"), name=name, arguments=arguments)
        return Said(role="assistant", text="", calls=(call,))
    if kind == "function_call_output":
        return said("tool", item.get("output"), where, _TEXTS, call_id=text(item.get("call_id"), f"{where}.call_id"))
    role = item.get("role")
    if kind != "message":
        raise refuse(
            f"{where}: items of type {kind!r:.40} are not supported, only message, function_call and "
            "function_call_output"
        )
    if role not in ("system", "developer", "user", "assistant"):
        raise refuse(f"{where}: role must be system, developer, user or assistant, not {role!r:.40}")
    if role == "user":
        return said("user", item.get("content"), where, _TEXTS)
    return Said(role="system" if role == "developer" else str(role), text=content(item.get("content"), where, _TEXTS))


def _joined(messages: list[Said]) -> Iterator[Said]:
    """Yield the messages, with the items of each turn of the assistant as one."""
    waiting: Said | None = None
    for each in messages:
        if each.role == "assistant" and waiting is not None:
            whole = waiting.text + each.text
            waiting = Said(role="assistant", text=whole, calls=(*waiting.calls, *each.calls))
            continue
        if waiting is not None:
            yield waiting
        waiting = each if each.role == "assistant" else None
        if waiting is None:
            yield each
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
        items.append(_thoughts(reply, choice.thoughts))
    if choice.text or not choice.calls:
        items.append(_message(reply, choice))
    return [*items, *map(_function_call, choice.calls)]


def _thoughts(begun: Begun, thoughts: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{begun.id}", "summary": [{"type": "summary_text", "text": thoughts}]}


def _message(begun: Begun, choice: Choice) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{begun.id}", "role": "assistant", "status": "completed", "content": [part]}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _response(begun: Begun, ask: Ask, items: list[dict[str, Any]], reply: Reply | None = None) -> dict[str, Any]:
    is_cut = reply is not None and reply.choices[0].finish_reason == "length"
    return {
        "id": f"resp_{begun.id}",
        "object": "response",
        "created_at": begun.created_s,
        "model": begun.model,
        "status": "in_progress" if reply is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None if reply is None else _usage(reply),
    } | dict(ask.echoed)


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
