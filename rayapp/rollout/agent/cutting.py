"""Tool output cut to a length, and made harmless for the chat template. Pure; called by the agent loop."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

CutSide = Literal["left", "middle", "right"]


def cut(text: str, max_chars: int, side: CutSide) -> str:
    """At most `max_chars` characters of a text, and a mark where the rest was.

    Args:
        side: which part stays, in verl's sense: `left` keeps the beginning, `right` the end, `middle` both.
    """
    if len(text) <= max_chars:
        return text
    if side == "left":
        return text[:max_chars] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - max_chars :]
    head = max_chars - max_chars // 2
    return text[:head] + "...(truncated)..." + text[len(text) - max_chars // 2 :]


def readable(text: str) -> str:
    """A text that UTF-8 and tokenizers can hold: half of a surrogate pair, which JSON can name, is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


_MARK = re.compile(r"<[^\s<>]+>|\[/?[A-Z][A-Z_]*\]|^[^\w\n]*\w[\w ]{0,30}:[ \t]*$", re.MULTILINE)


def marks(parts: Iterable[str]) -> set[str]:
    """What a chat template writes to tell who speaks, in the texts that it puts between messages.

    Example: ["</s>[INST] ", "\\n### Response:\\n"] -> {"</s>", "[INST]", "### Response:"}.
    """
    return {mark.strip() for part in parts for mark in _MARK.findall(part)}


class Neutralizer:
    """Breaks up the model's control tokens: a tool that prints `<|im_end|>` must not end a turn or begin another's.

    Linear in the text: a regex of all tokens is not, and some tokenizers have thousands that begin alike.

    Args:
        tokens: the control tokens as text.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self._begins = frozenset(token[0] for token in self._tokens)
        self._lengths = sorted({len(token) for token in self._tokens})

    def __call__(self, text: str) -> str:
        # Again while it helps: a token may hold a blank that was just put in.
        while (broken := self._broken(text)) != text:
            text = broken
        return text

    def _broken(self, text: str) -> str:
        cuts = [
            start + 1
            for start, letter in enumerate(text)
            if letter in self._begins and any(text[start : start + length] in self._tokens for length in self._lengths)
        ]
        return " ".join(text[start:end] for start, end in pairwise([0, *cuts, len(text)]))
