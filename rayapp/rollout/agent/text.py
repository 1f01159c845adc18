"""Cuts tool output to length, and makes it harmless for the chat template. Pure functions.

The text that a template writes around the contents of messages is their frame. If the template doesn't inspect
contents, the frame is rendered once: rendering takes longer than all other work of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import add
from typing import Any, Literal, NoReturn

CutSide = Literal["left", "middle", "right"]


def cut(text: str, max_chars: int, side: CutSide) -> str:
    """Return a text, cut to about `max_chars`. verl's `left` keeps the beginning, `right` the end, `middle` both."""
    if len(text) <= max_chars:
        return text
    if side == "left":
        return text[:max_chars] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - max_chars :]
    head = max_chars - max_chars // 2
    return text[:head] + "...(truncated)..." + text[len(text) - max_chars // 2 :]


def readable(text: str) -> str:
    """Return the text with lone halves of surrogate pairs escaped: JSON can hold them, UTF-8 can't."""
    return text.encode("utf-8", "backslashreplace").decode()


_MARK = re.compile(r"<[^\s<>]+>|\[/?[A-Z][A-Z_]*\]|^[^\w\n]*\w[\w ]{0,30}:[ \t]*$", re.MULTILINE)


def marks(parts: Iterable[str]) -> set[str]:
    """Return the control texts that a chat template writes between messages, to mark a role or to end a turn.

    Example: ["</s>[INST] ", "\\n### Response:\\n"] -> {"</s>", "[INST]", "### Response:"}.
    """
    return {mark.strip() for part in parts for mark in _MARK.findall(part)}


class Neutralizer:
    """Breaks up the model's control tokens, so that a tool that prints `<|im_end|>` can't end a turn. A call takes
    linear time; a regex of all tokens would not, as some tokenizers have thousands with the same beginning."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        self._lengths = sorted({len(token) for token in self._tokens})
        begins = sorted({re.escape(token[:2]) for token in self._tokens})
        self._begin = re.compile("(?=" + "|".join(begins) + ")") if begins else None

    def __call__(self, text: str) -> str:
        # Repeat while something changes: breaking up one token may complete another.
        while (broken := self._broken(text)) != text:
            text = broken
        return text

    def _broken(self, text: str) -> str:
        if self._begin is None:
            return text
        cuts = [
            start + 1
            for start in (match.start() for match in self._begin.finditer(text))
            if any(text[start : start + length] in self._tokens for length in self._lengths)
        ]
        return " ".join(text[start:end] for start, end in pairwise([0, *cuts, len(text)]))


# Contents that test whether a template trims, escapes or parses them; a unique text replaces @.
_PROBES = ("", "@", " \n@ \n ", '{"@": ["\\"", null]}', "[@]", "<b>&amp;'@'\u00e9\\n</b>", "<tool_response>@", "None")


class LookedIntoError(Exception):
    """A template compared, measured, searched or changed a `Sealed` text."""


def _refuse(*args: object, **options: object) -> NoReturn:
    raise LookedIntoError


class Sealed(str):
    """String that a template may write but not inspect: its methods raise LookedIntoError."""

    __slots__ = ()
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = __mod__ = _refuse
    __hash__ = str.__hash__

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else _refuse()


def frame(write: Callable[[Sequence[str]], str], number: int) -> tuple[str, ...] | None:
    """Return the `number + 1` texts before, between and after the contents of messages that `write` renders; None if it
    inspects or changes the contents."""
    marks = [f"text-number-{i}-" for i in range(number)]
    try:
        around = tuple(re.split("|".join(marks), write(marks))) if marks else ()
        write([Sealed(mark) for mark in marks])
        for probe in _PROBES:
            texts = [probe.replace("@", mark) for mark in marks]
            if write(texts) != join(around, texts):
                return None
    except Exception:  # boundary: a template is a program. It may refuse one of these texts and accept others later
        return None
    return around if len(around) == number + 1 else None


def join(around: Sequence[str], texts: Sequence[str]) -> str:
    """Return the texts of the frame `around`, with `texts` between them."""
    return "".join([*around[:1], *map(add, texts, around[1:])])
