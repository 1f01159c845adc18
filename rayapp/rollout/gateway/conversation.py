"""A call in no API's form, and where in its session's recorded conversations it goes on. Pure.

Every dialect reads its body into an `Ask` and writes a `Reply`. `Conversations` is the tree of messages beside the tree
of tokens: a call whose messages begin with those of a recorded turn, its reply included, goes on from that turn's ids.

Refusals of the gateway are one kind of error, which each API writes in its own form.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from rayapp.core.types import FinishReason
from rayapp.tools.base import ToolSchema

Key = tuple[object, ...]
"""Value that is equal for equal messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as an API shows it."""

    id: str
    name: str
    arguments: str
    """JSON text."""

    @property
    def key(self) -> Key:
        return (self.name, canonical(self.arguments))

    @property
    def parsed(self) -> Any:
        """The arguments as data; as text where they are no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message."""

    role: str
    """system, user, assistant or tool."""
    text: str
    calls: tuple[ToolCall, ...] = ()
    """Tool calls of the assistant."""
    call_id: str = ""
    """Id of the call whose result a tool's message is."""
    key: Key = field(init=False, repr=False)
    """Blanks around the assistant's text and ids of calls don't count: clients change them on the way back."""

    def __post_init__(self) -> None:
        # Here and not when it is asked for: messages are read beside the event loop, and found on it.
        words = (self.text.strip(), *(call.key for call in self.calls)) if self.role == "assistant" else (self.text,)
        object.__setattr__(self, "key", (self.role, *words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """JSON that the answer must be, for sessions that nobody trains on."""

    field: str
    """Field of the request that asks for it."""
    schema: Mapping[str, Any]
    is_calls: bool = False
    """It is a list of calls, each with name and arguments."""
    problem: str = ""
    """Why no answer can have it; empty if one can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of an API."""

    messages: tuple[Said, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = "policy"
    """Echoed: there is one policy."""
    num_choices: int = 1
    max_tokens: int | None = None
    """Limit of each choice; None: as many as the session has left."""
    stop: tuple[str, ...] = ()
    distribution: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings by the names of `SamplingParams`, for sessions that are not trained on."""
    form: Form | None = None
    reads_calls: bool = True
    """False: what looks like a call is text."""
    several_calls: bool = True
    """False: the reply has the first call of the turn alone."""
    not_followed: tuple[str, ...] = ()
    """Names of fields that have no effect."""
    unknown: tuple[str, ...] = ()
    """Names of fields that no dialect knows."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the API's reply repeats (Responses)."""
    is_stream: bool = False
    wants_usage: bool = True
    """In a stream."""
    wants_thoughts: bool = False
    """As blocks of their own (Anthropic)."""
    previous: str = ""
    """Id of the reply that this goes on from (Responses)."""
    may_be_named: bool = False
    """A later call may go on from its reply by id (Responses)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion as an API shows it."""

    text: str
    """Without thoughts and calls."""
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    is_stopped_by: str = ""
    """The stop text that ended it."""
    num_tokens: int = 0

    @property
    def said(self) -> Said:
        return Said(role="assistant", text=self.text, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to an `Ask`."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Tokens of the prompt that the session had before."""
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_tokens(self) -> int:
        """Sampled."""
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(slots=True)
class _TreePlace:
    """Place in a conversation."""

    children: dict[Key, _TreePlace] = field(default_factory=dict)
    prompt_end: int | None = None
    """Index of the last token of the prompt that ended here, where one did."""
    turn: int | None = None
    """Number of the turn whose reply is the message that leads here."""
    turn_end: int = -1
    """Index of that turn's last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Recorded part of a conversation."""

    after: int = -1
    """Index of the token that it goes on from; -1: it begins anew."""
    turn: int | None = None
    """The turn that it goes on from. None with an `after`: the very same prompt was asked before."""
    num_messages: int = 0
    """Messages up to there."""


class Conversations:
    """The messages of a session's turns, by the tools that they were said with."""

    def __init__(self) -> None:
        self._roots: dict[Key, _TreePlace] = {}

    def find(self, tools: Key, messages: Sequence[Said]) -> Found:
        """Where these messages go on from: the same prompt, or the last reply in them with none but others' words after
        it. Where the assistant says what it never said, the history was edited, and it begins anew."""
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

    def record(
        self, tools: Key, messages: Sequence[Said], *, prompt_end: int, reply: Said, turn: int, end: int
    ) -> None:
        """A turn: the messages of its prompt, and its reply. Of several that say the same the last one counts."""
        place = self._roots.setdefault(tools, _TreePlace())
        for said in messages:
            place = place.children.setdefault(said.key, _TreePlace())
        if place.prompt_end is None:
            place.prompt_end = prompt_end
        place = place.children.setdefault(reply.key, _TreePlace())
        place.turn, place.turn_end = turn, end


def in_order(messages: Sequence[Said]) -> tuple[Said, ...]:
    """The messages with the results of each turn's calls in the order of the calls, which is all that many templates
    tell them apart by."""
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
    """Return JSON data with each half of a surrogate pair spelled out: a text that holds one has no UTF-8.

    Raises:
        ValueError, RecursionError: it can't be written as JSON.
    """
    written = json.dumps(data, ensure_ascii=False)
    if not _SURROGATE.search(written):
        return data
    return json.loads(_SURROGATE.sub(lambda half: f"\\\\u{ord(half[0]):04x}", written))


def canonical(arguments: str) -> str:
    """Return one text for all JSON texts that clients make of the same arguments.

    Numbers are compared as doubles: JavaScript writes 10.0 as 10, and 1e400 as null.
    """
    try:
        data = json.loads(arguments, parse_int=_double, parse_float=_double, parse_constant=_double)
        return json.dumps(without_surrogates(data), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _double(number: str) -> float | None:
    value = float(number) + 0.0  # -0.0 + 0.0 is 0.0
    return value if math.isfinite(value) else None


Kind = Literal[
    "invalid", "key", "unknown", "no_path", "no_model", "over", "too_large", "turns", "tokens", "busy", "engine"
]
STATUS: dict[Kind, int] = {
    "invalid": 400,
    "key": 401,
    "unknown": 404,
    "no_path": 404,
    "no_model": 404,
    # Clients try 408, 409, 429 and all from 500 again; what is over stays over.
    "over": 410,
    "too_large": 413,
    "turns": 400,
    "tokens": 400,
    "busy": 429,
    "engine": 503,
}


class RefusedError(Exception):
    """A call that is not served. Its message is for the agent's author."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind

    @property
    def status(self) -> int:
        """HTTP status code."""
        return STATUS[self.kind]


def not_offered(wish: str) -> str:
    """Return the message for a wish that is granted nowhere."""
    return (
        f"{wish} is not offered: the policy is sampled as it is trained, with the chat template as it is. Leave it out"
    )


def not_in_training(wish: str) -> str:
    """Return the message for a wish that only a policy that nobody trains on can grant."""
    return (
        f"{wish} is not offered: the policy is sampled as it is trained. Leave it out and say in the prompt what the "
        "answer must look like; `rayapp serve`, whose answers nothing is trained on, follows it"
    )
