"""A call in no API's form, and where in its session's recorded conversations it goes on. Pure.

Every dialect reads its body into an `Ask` and writes a `Reply`. `Conversations` is the tree of messages beside the tree
of tokens: a call whose messages begin with those of a recorded turn, its reply included, goes on from that turn's ids.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from rayapp.core.types import FinishReason
from rayapp.tools.base import ToolSchema

Key = tuple[object, ...]
"""What makes two messages the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as an API shows it."""

    id: str
    name: str
    arguments: str
    """JSON text."""

    @property
    def key(self) -> Key:
        return (self.name, _canonical(self.arguments))

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
    """Of the assistant."""
    call_id: str = ""
    """Whose result it is, of a tool."""

    @property
    def key(self) -> Key:
        """Blanks around the assistant's text and ids of calls don't count: clients change them on the way back."""
        if self.role == "assistant":
            return (self.role, self.text.strip(), *(call.key for call in self.calls))
        return (self.role, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call of an API."""

    messages: tuple[Said, ...]
    tools: tuple[ToolSchema, ...] = ()
    model: str = "policy"
    """Echoed: there is one policy."""
    num_choices: int = 1
    max_tokens: int | None = None
    """Of each choice; None is as many as the session has left."""
    stop: tuple[str, ...] = ()
    distribution: Mapping[str, Any] = field(default_factory=dict)
    """How to sample, by the names of `SamplingParams`: for sessions that nobody trains on."""
    reads_calls: bool = True
    """False: what looks like a call is text."""
    is_stream: bool = False
    wants_usage: bool = True
    """In a stream."""
    wants_thoughts: bool = False
    """As blocks of their own (Anthropic)."""
    previous: str = ""
    """Id of the reply that this goes on from (Responses)."""


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
    """What an `Ask` gets."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt: those that the session had before."""
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_tokens(self) -> int:
        """Sampled."""
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(slots=True)
class _Place:
    """Where a conversation has come to."""

    children: dict[Key, _Place] = field(default_factory=dict)
    prompt_end: int | None = None
    """Index of the last token of the prompt that ended here, where one did."""
    turn: int | None = None
    """Number of the turn whose reply is the message that leads here."""
    turn_end: int = -1
    """Index of that turn's last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a conversation is recorded."""

    after: int = -1
    """Index of the token that it goes on from; -1: it begins anew."""
    turn: int | None = None
    """The turn that it goes on from. None with an `after`: the very same prompt was asked before."""
    num_messages: int = 0
    """Messages up to there."""


class Conversations:
    """The messages of a session's turns, by the tools that they were said with."""

    def __init__(self) -> None:
        self._roots: dict[Key, _Place] = {}

    def find(self, tools: Key, messages: Sequence[Said]) -> Found:
        """Where these messages go on from: the same prompt, or the last reply in them with none but others' words after
        it. Where the assistant says what it never said, the history was edited, and it begins anew."""
        place, found, number = self._roots.get(tools, _Place()), Found(), 0
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
        place = self._roots.setdefault(tools, _Place())
        for said in messages:
            place = place.children.setdefault(said.key, _Place())
        if place.prompt_end is None:
            place.prompt_end = prompt_end
        place = place.children.setdefault(reply.key, _Place())
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


@lru_cache(maxsize=4096)
def _canonical(arguments: str) -> str:
    # Agents send their whole history with every call.
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
