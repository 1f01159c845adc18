"""Tool output cut to a length, and made harmless for the chat template. Pure; called by the agent loop."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


class Neutralizer:
    """Breaks up the model's control tokens: a tool that prints `<|im_end|>` must not end a turn or begin another's.

    Args:
        tokens: the control tokens as text.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Longest first: a token that begins like another must be found whole.
        found = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", text)
        return text
