"""The parts of a call of a session: its prompt, its sampled turn, and the turn as an API represents it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayapp.core.syntax import spoken
from rayapp.core.types import CallRecord, Completion, RequestId
from rayapp.rollout.agent.calls import read_turn
from rayapp.rollout.agent.text import readable
from rayapp.rollout.gateway.conversation import Ask, Choice, Found, Said, ToolCall
from rayapp.rollout.gateway.formats import Format, continued, rendered
from rayapp.rollout.recorder import Recorder
from rayapp.tools.base import RawCall, after_thoughts, thoughts_of

MAX_RECORDED_CHARS = 16_384
"""Maximum characters that the record of a call keeps of the tool's result. The policy reads the whole result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Prompt of a call, and the recorded token from which it continues."""

    format: Format
    after: int
    """Index of the recorded token that comes before the new part of the prompt; -1 if the whole prompt is new."""
    read_ids: list[int]
    """Token ids of the new part."""
    prompt_ids: list[int]
    """Token ids of the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A recorded turn."""

    number: int
    """Index of the turn in `Recorder.turns`."""
    prompt_end: int
    end: int
    """Index of the turn's last token."""
    completion: Completion
    text: str
    """Sampled text, without the `<think>` of the prompt that the text in `Recorder.turns` may begin with."""


async def choice_of(
    ask: Ask,
    chat_format: Format,
    tree: Recorder,
    turn: SampledTurn,
    request_id: RequestId,
    prompt_end: str,
    text_start: int | None,
) -> Choice:
    """Return a turn as an API represents it.

    Args:
        prompt_end: end of the prompt's text.
        text_start: index after the thoughts, as the stream's splitter found it. With None, the thoughts end at the
            last `</think>`.
    """
    record = tree.turns[turn.number]
    text, stopped_by = _before_stop(turn.text, ask.stop)
    if text_start is None or text_start > len(text):
        text = spoken(text, prompt_end)
        said, thoughts = after_thoughts(text), thoughts_of(text)
    else:
        said, thoughts = text[text_start:], thoughts_of(text[:text_start])
    name = str(request_id._replace(turn=turn.number))
    calls, said, raw = await _calls(ask, chat_format, readable(said), name)
    _note_calls(tree, turn.number, raw, 1 if raw and not ask.several_calls else len(raw))
    return Choice(
        text=said,
        thoughts=readable(thoughts),
        calls=calls,
        finish_reason=record.finish_reason,
        is_stopped_by=stopped_by,
        num_tokens=record.end - record.start,
    )


async def _calls(
    ask: Ask, chat_format: Format, said: str, name: str
) -> tuple[tuple[ToolCall, ...], str, Sequence[RawCall]]:
    """Return the tool calls of a turn, the text outside them, and all calls as the parser read them.

    If one call can't be parsed, return the whole turn as text, because the agent could not answer this call.
    """
    if ask.form is not None and ask.form.is_calls:
        return *_formed_calls(said), ()
    if not ask.tools or not ask.reads_calls or ask.form is not None:
        return (), said, ()
    raw, words = await read_turn(chat_format.parser, said, name)
    shown = raw if ask.several_calls else raw[:1]
    if any(call.problem for call in shown):
        return (), said, raw
    return tuple(_shown_call(call.name, call.arguments) for call in shown), words, raw


def _note_calls(tree: Recorder, number: int, raw: Sequence[RawCall], num_shown: int) -> None:
    if not raw:
        return
    records = tuple(
        CallRecord(
            name=call.name,
            arguments=call.arguments,
            output="",
            failure="malformed" if call.problem else "too_many_calls" if i >= num_shown else "",
        )
        for i, call in enumerate(raw)
    )
    tree.turns[number] = replace(tree.turns[number], calls=records)


def _shown_call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=uuid.uuid4().hex[:24], name=name, arguments=arguments)


def _formed_calls(said: str) -> tuple[tuple[ToolCall, ...], str]:
    """Return the calls of an answer whose form is a list of calls, and an empty text. If the answer was cut off, return
    no calls, and its text.
    """
    try:
        # xgrammar lets a string with maxLength hold control characters as they are; json refuses them if strict.
        made: list[dict[str, Any]] = json.loads(said, strict=False)
        return tuple(_shown_call(str(call["name"]), json.dumps(call["arguments"])) for call in made), ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return (), said


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first stop text in it, and this stop text. Without a stop text, return the text and an
    empty string.
    """
    places = [(text.find(each), each) for each in stop if each in text]
    if not places:
        return text, ""
    place, stopped_by = min(places)
    return text[:place], stopped_by


def note_results(tree: Recorder, found: Found, messages: Sequence[Said]) -> None:
    """Add the results of the agent's tools to the record of the turn that called these tools."""
    if found.turn is None:
        return
    turn = tree.turns[found.turn]
    told = messages[found.num_messages :]
    outputs = [readable(said.text[:MAX_RECORDED_CHARS]) for said in told if said.role == "tool"]
    calls = [replace(call, output=output) for call, output in zip(turn.calls, outputs, strict=False)]
    tree.turns[found.turn] = replace(turn, calls=(*calls, *turn.calls[len(calls) :]))


def new_prompt_ids(
    chat_format: Format, found: Found, messages: Sequence[Said], sampled_ids: Sequence[int]
) -> list[int]:
    """Return the token ids of the part of the prompt that follows the recorded token `found.after`."""
    if found.after < 0:
        return rendered(chat_format.chat, messages)
    if found.turn is None:
        return []
    reply, rest = messages[found.num_messages - 1], messages[found.num_messages :]
    return continued(chat_format.chat, sampled_ids, reply, rest)
