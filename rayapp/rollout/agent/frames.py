"""What a chat template writes around texts that it does not look into: rendered once, and joined from then on.

Called by the chat format, once for messages of the same roles and tools: it takes longer than the rest of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import add
from typing import Any, NoReturn

_PROBES = ("", "@", " \n@ \n ", '{"@": ["\\"", null]}', "[@]", "<b>&amp;'@'\u00e9\\n</b>", "<tool_response>@", "None")
"""Texts that a template could write otherwise than as they are: trimmed, escaped, or as JSON. @ stands for a text of
its own."""


class LookedIntoError(Exception):
    """A template compared, measured, searched or changed a text."""


def _refuse(*args: object, **options: object) -> NoReturn:
    raise LookedIntoError


class Sealed(str):
    """A text that may be written, and not looked into: all its methods raise LookedIntoError."""

    __slots__ = ()
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = __mod__ = _refuse
    __hash__ = str.__hash__

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else _refuse()


def frame(write: Callable[[Sequence[str]], str], number: int) -> tuple[str, ...] | None:
    """The texts before, between and after `number` texts, as `write` writes them.

    Returns:
        `number + 1` texts; None where it looks into the texts, or does not write them as they are.
    """
    marks = [f"text-number-{i}-" for i in range(number)]
    try:
        around = tuple(re.split("|".join(marks), write(marks))) if marks else ()
        write([Sealed(mark) for mark in marks])
        for probe in _PROBES:
            texts = [probe.replace("@", mark) for mark in marks]
            if write(texts) != join(around, texts):
                return None
    except Exception:  # boundary: a template is a program; it may refuse one of these texts, and not those to come
        return None
    return around if len(around) == number + 1 else None


def join(around: Sequence[str], texts: Sequence[str]) -> str:
    """The texts within their frame."""
    return "".join([*around[:1], *map(add, texts, around[1:])])
