"""API-independent types for calls and replies, and the tree of a session's recorded messages. Pure functions.

A dialect (the code for one API) reads a request's body into an `Ask`, and writes a `Reply` into a response's. If the
messages of a call begin with those of a recorded turn and its reply, the call continues from that turn's token ids.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal

from rayapp.core.types import FinishReason
from rayapp.storage.media import IMAGE_PART
from rayapp.tools.base import ToolSchema

Key = tuple[object, ...]  # messages with equal keys count as the same
Shown = tuple[str, bytes]  # SHA-256 and encoded bytes of a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call as an API represents it."""

    id: str
    name: str
    arguments: str  # JSON text

    @property
    def key(self) -> Key:
        return (self.name, canonical(self.arguments))

    @property
    def parsed(self) -> Any:
        """The arguments as data, or as text if they are not JSON. Some clients write a blank text or null for none."""
        try:
            found = json.loads(self.arguments.strip() or "{}")
            return {} if found is None else found
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a conversation, in the form that all dialects share."""

    role: str  # system, user, assistant or tool
    text: str
    parts: tuple[str | Shown, ...] = ()  # in order; empty without pictures
    calls: tuple[ToolCall, ...] = ()  # of the assistant
    call_id: str = ""  # of the call whose result this is
    # Key without call ids and blanks around the assistant's text, which clients change when they send a message back.
    key: Key = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Compute the key now, in the thread that reads messages. On demand it would be computed on the event loop.
        words = (self.text.strip(), *(call.key for call in self.calls)) if self.role == "assistant" else (self.text,)
        parts = tuple(part if isinstance(part, str) else part[:1] for part in self.parts)
        object.__setattr__(self, "key", (self.role, *words, *parts))

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The text or, with pictures, the parts as chat templates read them."""
        texts = ({"type": "text", "text": part} if isinstance(part, str) else IMAGE_PART for part in self.parts)
        return list(texts) or self.text


def pictures_of(messages: Sequence[Said]) -> list[Shown]:
    return [part for said in messages for part in said.parts if not isinstance(part, str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form that an answer must have, such as a JSON schema."""

    field: str  # of the request, that demands the form
    structured: Mapping[str, Any]  # of `SamplingParams`
    is_calls: bool = False  # a list of tool calls, each with name and arguments
    problem: str = ""  # why no answer can have this form


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of an API: everything that its request asks for."""

    messages: tuple[Said, ...] = ()
    tools: tuple[ToolSchema, ...] = ()
    model: str = "policy"  # in the request; the reply repeats it
    num_choices: int = 1
    max_tokens: int | None = None  # of each choice; None: as many as the session has left
    stop: tuple[str, ...] = ()
    ignored_sampling: tuple[str, ...] = ()  # fields of the request; the policy samples as the run's config says
    # Variables of the chat template; those that it doesn't read have no effect.
    variables: Mapping[str, Any] = field(default_factory=dict)
    form: Form | None = None
    reads_calls: bool = True  # False if text that looks like a tool call must stay text
    several_calls: bool = True  # False if the reply may have only the first tool call of the turn
    not_followed: tuple[str, ...] = ()  # fields that are ignored
    is_freed: bool = False  # the request demanded a form, and the demand was dropped
    echoed: Mapping[str, Any] = field(default_factory=dict)  # fields that the reply repeats (Responses API)
    is_stream: bool = False
    wants_usage: bool = True  # a stream has to end with token counts
    wants_thoughts: bool = False  # as separate blocks (Anthropic's API)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion as an API represents it."""

    text: str  # without thoughts and calls
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    is_stopped_by: str = ""  # stop text that ended the completion
    num_tokens: int = 0

    @property
    def said(self) -> Said:
        return Said(role="assistant", text=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The part of a reply that is known before sampling."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, recorded by an earlier call of the session
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Begun):
    """Answer to an `Ask`."""

    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, begun: Begun, choices: tuple[Choice, ...]) -> Reply:
        return cls(choices=choices, **{each.name: getattr(begun, each.name) for each in fields(begun)})

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(slots=True)
class _TreePlace:
    """Node of the tree of messages: a message that follows the messages of its parents."""

    children: dict[Key, _TreePlace] = field(default_factory=dict)
    prompt_end: int | None = None  # last token of the prompt that ends with this message
    turn: int | None = None  # that sampled this message
    turn_end: int = -1  # index of the turn's last token; -1 without a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The part of a call's messages that earlier calls have recorded."""

    after: int = -1  # token that the call continues from; -1 for a new conversation
    turn: int | None = None  # that the call continues from; None with an `after`: the same prompt was sent before
    num_messages: int = 0  # of the call, in this part


class Conversations:
    """Trees of the messages of a session's turns, one tree for each set of tools."""

    def __init__(self) -> None:
        self._roots: dict[Key, _TreePlace] = {}
        self._num_messages: dict[Key, int] = {}  # of the longest recorded prompt, for each set of tools

    def find(self, tools: Key, messages: Sequence[Said]) -> Found:
        """Return the recorded part that these messages continue from: the same prompt, or up to the last recorded
        reply.

        If an assistant message after this reply was never sampled, the agent has edited the history: then a new
        conversation begins.
        """
        place, found, number = self._roots.get(tools, _TreePlace()), Found(), 0
        for number, said in enumerate(messages, start=1):
            if (following := place.children.get(said.key)) is None:
                break
            place = following
            if place.turn is not None:
                found = Found(after=place.turn_end, turn=place.turn, num_messages=number)
        else:
            if place.prompt_end is not None:
                return Found(after=place.prompt_end, num_messages=number)
        is_edited = any(said.role == "assistant" for said in messages[found.num_messages :])
        return Found() if is_edited else found

    def drift(self, tools: Key, messages: Sequence[Said]) -> Drift | None:
        """Return why these messages don't continue a recorded conversation; None if none is recorded."""
        if not self._roots:
            return None
        if tools not in self._roots:
            return Drift("tools_changed")
        place = self._roots[tools]
        for number, said in enumerate(messages):
            if (following := place.children.get(said.key)) is None:
                drift = _drift(place, said, is_first=number == 0)
                is_shorter = len(messages) < self._num_messages[tools]
                return replace(drift, reason="history_compacted") if drift.is_edit and is_shorter else drift
            place = following
        return Drift("history_cut")

    def record(
        self, tools: Key, messages: Sequence[Said], *, prompt_end: int, reply: Said, turn: int, end: int
    ) -> None:
        """Record a turn: the messages of its prompt, and its reply; an equal one is replaced."""
        place = self._roots.setdefault(tools, _TreePlace())
        self._num_messages[tools] = max(len(messages), self._num_messages.get(tools, 0))
        for said in messages:
            place = place.children.setdefault(said.key, _TreePlace())
        if place.prompt_end is None:
            place.prompt_end = prompt_end
        place = place.children.setdefault(reply.key, _TreePlace())
        place.turn, place.turn_end = turn, end


@dataclass(frozen=True, slots=True)
class Drift:
    """Why a call begins a new conversation, with the recorded and the sent text around their first difference."""

    reason: str
    recorded: str = ""
    sent: str = ""

    @property
    def is_edit(self) -> bool:
        """True if the agent replaced messages after the first."""
        return self.reason in ("history_rewritten", "reply_never_sampled")

    def __str__(self) -> str:
        shown = f": {self.sent!r} was sent, {self.recorded!r} is recorded" if self.recorded or self.sent else ""
        return self.reason.replace("_", " ") + shown


_REASONS = {"system": "system_prompt_changed", "tool": "result_changed", "user": "history_rewritten"}
_SHOWN_CHARS = 40
_DIGITS = re.compile(r"\d+")


def _drift(place: _TreePlace, said: Said, *, is_first: bool) -> Drift:
    """Return the difference to the most similar message that is recorded in its place."""
    known = [key for key in place.children if key[0] == said.role]
    if not known:
        other = "other_conversation" if is_first else "history_rewritten"
        return Drift("reply_never_sampled" if said.role == "assistant" else other, "", said.text[:_SHOWN_CHARS])
    closest = max(known, key=lambda key: _num_equal(_flat(key), _flat(said.key)))
    if said.role != "assistant":
        reason = "other_conversation" if is_first and said.role == "user" else _REASONS[said.role]
    elif len(closest) == len(said.key) and closest[1] == said.key[1]:
        reason = "arguments_rewritten"
    else:
        reason = "reply_rewritten"
    recorded, sent = _flat(closest), _flat(said.key)
    if said.role in ("system", "user") and _DIGITS.sub("0", recorded) == _DIGITS.sub("0", sent):
        reason = "clock_in_prompt"
    start = max(0, _num_equal(recorded, sent) - _SHOWN_CHARS // 4)
    return Drift(reason, recorded[start : start + _SHOWN_CHARS], sent[start : start + _SHOWN_CHARS])


def _flat(key: Key) -> str:
    return "\n".join(part if isinstance(part, str) else " ".join(map(str, part)) for part in key[1:])  # type: ignore[call-overload]


def _num_equal(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def in_order(messages: Sequence[Said]) -> tuple[Said, ...]:
    """Return the messages with each turn's results in the order of its calls: many templates match them only so."""
    ordered = list[Said]()
    for is_result, members in groupby(messages, key=lambda said: said.role == "tool"):
        if not is_result:
            ordered += members
            continue
        calls = ordered[-1].calls if ordered else ()
        place = {call.id: index for index, call in enumerate(calls)}
        ordered += sorted(members, key=lambda said: place.get(said.call_id, len(place)))
    return tuple(ordered)


_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(data: Any) -> Any:
    """Return JSON data with lone halves of surrogate pairs escaped, because UTF-8 can't encode them."""
    written = json.dumps(data, ensure_ascii=False)
    if not _SURROGATE.search(written):
        return data
    return json.loads(_SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", written))


def canonical(arguments: str) -> str:
    """Return a JSON text in a form that is equal for equal arguments, however a client wrote them. Numbers are compared
    as doubles: JavaScript writes 10.0 as 10, and 1e400 as null."""
    try:
        return _sorted_json(_with_doubles(arguments))
    except (ValueError, RecursionError):
        return arguments


def _double(number: str) -> float | None:
    value = float(number) + 0.0  # -0.0 + 0.0 is 0.0
    return value if math.isfinite(value) else None


_with_doubles = json.JSONDecoder(parse_int=_double, parse_float=_double, parse_constant=_double).decode
_sorted_json = json.JSONEncoder(sort_keys=True).encode


Kind = Literal[
    "invalid", "key", "unknown", "no_path", "no_model", "over", "too_large", "turns", "tokens", "busy", "engine",
    "endpoint",
]  # fmt: skip
STATUS: dict[Kind, int] = {
    "invalid": 400,
    "key": 401,
    "unknown": 404,
    "no_path": 404,
    "no_model": 404,
    # Clients must not retry, because a session never opens again. They retry 408, 409, 429 and 5xx.
    "over": 410,
    "too_large": 413,
    "turns": 400,
    "tokens": 400,
    "busy": 429,
    "engine": 503,
    "endpoint": 502,
}


class RefusedError(Exception):
    """The gateway refuses a call. The message is for the agent's author."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind

    @property
    def status(self) -> int:
        return STATUS[self.kind]


def not_offered(wish: str) -> str:
    """Return the error message for a request that no server of these APIs supports."""
    return (
        f"{wish} is not supported: the policy keeps the sampling settings and chat template of its training. "
        "Leave it out"
    )


def not_in_training(wish: str, instead: str = "") -> str:
    """Return the error message for a request that is supported only if the policy is not trained on the answer."""
    return (
        f"{wish} is not supported while the policy is trained on its answers; `vllm serve RUN/final` supports it. "
        f"Leave it out{instead}"
    )
