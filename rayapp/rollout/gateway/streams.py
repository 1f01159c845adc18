"""Streams a turn while it is sampled: new tokens become pieces of thoughts and text, which become events of the API.

A splitter holds back text that later tokens may change: unfinished characters, the end of the turn, the start of a stop
text, blanks at the end, and everything from the first tool call on. At the turn's end the writer sends the rest.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rayapp.rollout.agent.text import readable
from rayapp.rollout.gateway.conversation import Ask, Begun, Choice, RefusedError, Reply
from rayapp.rollout.gateway.formats import Format

PartKind = Literal["thoughts", "text"]
_OPEN, _CLOSE = "<think>", "</think>"
_PIECE_CHARS = 256
_WINDOW = 8  # tokens decoded again with new ones: some tokenizers write a leading blank only after another token


class Piece(NamedTuple):
    """A part of a choice's thoughts or text."""

    choice: int
    kind: PartKind
    text: str


class Splitter:
    """Splits the tokens of one turn, while they are sampled, into pieces of thoughts and text.

    With `is_thinking` (the prompt ends with `<think>`) no piece is sent before `</think>`.
    """

    def __init__(self, chat_format: Format, ask: Ask, *, is_thinking: bool) -> None:
        self._format, self._stop = chat_format, ask.stop
        self._ids = list[int]()
        self._num_read = 0  # ids whose text is in `_text`
        self._text = ""
        self._num_sent: dict[PartKind, int] = {"thoughts": 0, "text": 0}
        self._is_thinking = is_thinking
        has_calls = bool(ask.tools) and ask.reads_calls and ask.form is None
        is_called = ask.form is not None and ask.form.is_calls
        self._marks = (*ask.stop, *([chat_format.parser.start] if has_calls and chat_format.parser.start else []))
        self._is_held = is_called or (has_calls and not chat_format.parser.start)
        self.text_start: int | None = None  # first character after the turn's thoughts, once known

    def add(self, new_ids: Sequence[int]) -> Iterator[tuple[PartKind, str]]:
        """Yield the pieces that these tokens complete."""
        self._ids += new_ids
        if not self._is_held and self._read_text():
            yield from self._pieces()

    def _read_text(self) -> bool:
        # False if the tokens end within a character, or may belong to the end of the turn
        end = self._format.chat.num_said(self._ids)
        start, decode = max(0, self._num_read - _WINDOW), self._format.chat.tokenizer.decode
        if end <= self._num_read:
            return False
        known = decode(self._ids[start : self._num_read], skip_special_tokens=False)
        text = decode(self._ids[start:end], skip_special_tokens=False)
        if text.endswith("\ufffd") or len(text) <= len(known):
            return False
        self._text += readable(text[len(known) :])
        self._num_read = end
        if stops := [place for each in self._stop if (place := self._text.find(each)) >= 0]:
            self._text, self._is_held = self._text[: min(stops)], True
        return True

    def _pieces(self) -> Iterator[tuple[PartKind, str]]:
        if self.text_start is None:
            yield from self._thoughts()
        if self.text_start is not None:
            yield from self._until("text", self.text_start, self._settled(self.text_start))

    def _thoughts(self) -> Iterator[tuple[PartKind, str]]:
        begun = self._text.lstrip()
        closed = self._text.find(_CLOSE)
        if not (self._is_thinking or _OPEN.startswith(begun[: len(_OPEN)])):
            self.text_start = 0
            return
        start = len(self._text) - len(begun[len(_OPEN) :].lstrip()) if begun.startswith(_OPEN) else None
        if closed >= 0:
            inner = self._text[:closed]
            start = len(inner) - len(inner.lstrip()) if start is None else min(start, closed)
            yield from self._until("thoughts", start, len(inner.rstrip()))
            self.text_start = closed + len(_CLOSE)
        elif start is not None:
            yield from self._until("thoughts", start, self._settled(start, (_CLOSE, *self._stop)))

    def _settled(self, start: int, marks: Sequence[str] | None = None) -> int:
        """Return the end of the text before trailing blanks, and before a mark or the beginning of one."""
        text, marks = self._text[start:], self._marks if marks is None else marks
        found = [place for mark in marks if (place := text.find(mark)) >= 0]
        if found:
            return start + len(text[: min(found)].rstrip())
        kept = max((_num_begun(text, mark) for mark in marks), default=0)
        return start + len(text[: len(text) - kept].rstrip())

    def _until(self, kind: PartKind, start: int, end: int) -> Iterator[tuple[PartKind, str]]:
        sent = start + self._num_sent[kind]
        if end > sent:
            self._num_sent[kind] = end - start
            yield kind, self._text[sent:end]


def _num_begun(text: str, mark: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


@dataclass(slots=True)
class Live:
    """Queue of the pieces that a stream has to send while its call is answered."""

    begun: Begun | None = None  # None until the prompt is read
    _pieces: list[Piece] = field(default_factory=list)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def listener(self, index: int, splitter: Splitter) -> Callable[[Sequence[int]], None]:
        """Return a function that takes new token ids of a choice and queues their pieces."""

        def add(new_ids: Sequence[int]) -> None:
            new = [Piece(index, kind, text) for kind, text in splitter.add(new_ids)]
            if new:
                self._pieces += new
                self._has_news.set()

        return add

    def wake(self) -> None:
        """Make `pieces` return at once, because the call has been answered."""
        self._has_news.set()

    async def pieces(self, timeout_s: float) -> list[Piece]:
        """Return the pieces since the last call; wait for one, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        except TimeoutError:
            return []
        self._has_news.clear()
        new, self._pieces = self._pieces, []
        return new


class StreamWriter(ABC):
    """Writes one stream, in the events of one API."""

    def __init__(self, begun: Begun, ask: Ask) -> None:
        self.begun, self.ask = begun, ask
        self._sent: dict[tuple[int, PartKind], list[str]] = defaultdict(list)

    def begin(self) -> bytes:
        """Return the events that come before the first piece."""
        return b""

    def piece(self, index: int, kind: PartKind, text: str) -> bytes:
        """Return the events for a piece of a choice, and remember that it was sent."""
        self._sent[index, kind].append(text)
        parts = (text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS))
        return b"".join(self.delta(index, kind, part) for part in parts)

    def rest(self, index: int, choice: Choice) -> bytes:
        """Return the events for what was not sent of a finished choice. RefusedError: it begins otherwise."""
        events, parts = b"", {"thoughts": choice.thoughts, "text": choice.text}
        for kind, whole in parts.items():
            sent = "".join(self._sent[index, kind])  # type: ignore[index]
            if not whole.startswith(sent):
                raise RefusedError(
                    "engine",
                    f"the turn's final {kind} does not begin with what was already streamed: {sent[-60:]!r}",
                )
            events += self.piece(index, kind, whole[len(sent) :])  # type: ignore[arg-type]
        return events

    @abstractmethod
    def delta(self, index: int, kind: PartKind, text: str) -> bytes:
        """Return the events for a piece of at most `_PIECE_CHARS` characters."""

    @abstractmethod
    def end(self, reply: Reply) -> bytes:
        """Return the events for all parts that were not sent yet, and the events that end the stream."""
