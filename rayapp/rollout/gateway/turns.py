"""The parts of a call of a session: its prompt, its sampled turn, and the turn as an API represents it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.syntax import parted, spoken
from rayapp.core.types import CallRecord, Completion, Media, RequestId
from rayapp.rollout.agent.calls import read_turn
from rayapp.rollout.agent.text import readable
from rayapp.rollout.gateway.conversation import Ask, Choice, Found, RefusedError, Said, ToolCall, pictures_of
from rayapp.rollout.gateway.formats import Format, continued, rendered
from rayapp.rollout.gateway.limits import MOST_SESSION_BYTES
from rayapp.rollout.recorder import Keys, Recorder
from rayapp.storage.media import MOST_PICTURES
from rayapp.storage.models.pictures import PictureProcessor
from rayapp.tasks.data.pictures import placed
from rayapp.tools.base import RawCall

MAX_RECORDED_CHARS = 16_384  # of a tool's result, in the record of a call; the policy reads all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    format: Format
    after: int  # recorded token before the new part of the prompt; -1 if all is new
    read_keys: Keys  # the new part, with its pictures
    prompt_ids: list[int]  # the whole prompt
    media: Media  # pictures of the whole prompt
    pictures: Mapping[str, bytes]  # SHA-256 -> encoded bytes of these pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    number: int  # in `Recorder.turns`
    prompt_end: int
    end: int  # index of the turn's last token
    completion: Completion
    text: str  # as sampled; the text in `Recorder.turns` may begin with the prompt's `<think>`


async def choice_of(
    ask: Ask,
    chat_format: Format,
    tree: Recorder,
    turn: SampledTurn,
    request_id: RequestId,
    prompt_end: str,
    text_start: int | None,
) -> Choice:
    """Return a turn as an API represents it. `text_start` is the index after the thoughts, as the stream's splitter
    found it; None: after the last `</think>`."""
    record = tree.turns[turn.number]
    text, stopped_by = _before_stop(turn.text, ask.stop)
    if text_start is None or text_start > len(text):
        thoughts, said = parted(spoken(text, prompt_end))
    else:
        said, thoughts = text[text_start:], parted(text[:text_start])[0]
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
    # The calls, the text outside them, and the calls as the parser read them. If one can't be parsed, the whole turn is
    # text, because the agent could not answer it.
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
    """Return the calls of an answer whose form is a list of calls; none if it was cut off."""
    try:
        # xgrammar lets a string with maxLength hold control characters as they are; json refuses them if strict.
        made: list[dict[str, Any]] = json.loads(said, strict=False)
        return tuple(_shown_call(str(call["name"]), json.dumps(call["arguments"])) for call in made), ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return (), said


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
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
    """Return the token ids of the prompt after the recorded token `found.after`, with a placeholder for a picture."""
    if found.after < 0:
        return rendered(chat_format.chat, messages)
    if found.turn is None:
        return []
    reply, rest = messages[found.num_messages - 1], messages[found.num_messages :]
    return continued(chat_format.chat, sampled_ids, reply, rest)


def checked_pictures(messages: Sequence[Said], known: dict[str, int]) -> dict[str, bytes]:
    """Return the bytes of a call's pictures by SHA-256, and add their sizes to the session's `known` ones.
    RefusedError: they are too many, or too large together."""
    shown = pictures_of(messages)
    known |= {sha256: len(encoded) for sha256, encoded in shown}
    if len(shown) > MOST_PICTURES or sum(known.values()) > MOST_SESSION_BYTES:
        limits = f"{MOST_PICTURES} pictures in a call, and {MOST_SESSION_BYTES:,} bytes of pictures in a session"
        raise RefusedError("invalid", f"the call has {len(shown)} pictures: at most {limits} are allowed")
    return dict(shown)


async def placed_pictures(
    processor: PictureProcessor | None, ids: list[int], found: Found, messages: Sequence[Said], lock: asyncio.Semaphore
) -> tuple[list[int], Media]:
    """Return what `new_prompt_ids` returned with the tokens of the pictures, and their places."""
    if not (new := pictures_of(messages[found.num_messages :])):
        return ids, ()
    try:
        async with lock:
            return await placed(processor, ids, [sha256 for sha256, _ in new], dict(new))
    except InputError as error:
        raise RefusedError("invalid", str(error)) from None
