"""Tool calls in what the policy wrote. The loop asks a `ToolCallParser`: vLLM's, behind
`rayapp.engine.vllm_tool_parser`. Tests without vLLM read the hermes form with `rayapp.testing.hermes`.

A parser never raises for what the policy wrote: a call that can't be read is a `RawCall` with its `problem`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCall:
    """A call as the policy wrote it, not checked against any schema."""

    name: str = ""
    arguments: str = "{}"
    """JSON text."""
    problem: str = ""
    """Why it can't be read as a call; empty if it can."""


class ToolCallParser(Protocol):
    """Finds tool calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        """Every call in one turn's text, in order; special tokens of the model are part of the text."""
        ...

    def words(self, text: str) -> str:
        """What is said beside the calls, in a text that has some."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCall:
    """One call as a model's chat template writes it: what a parser must find."""

    texts: tuple[str, ...]
    """Texts of an assistant that makes the call, in the forms that templates take: one of them is right."""
    name: str
    arguments: dict[str, object]

    def is_found_by(self, parser: ToolCallParser) -> bool:
        return any(self._is_read(parser.parse(after_thoughts(text))) for text in self.texts)

    def _is_read(self, calls: tuple[RawCall, ...]) -> bool:
        if len(calls) != 1 or calls[0].problem or calls[0].name != self.name:
            return False
        try:
            return bool(json.loads(calls[0].arguments) == self.arguments)
        except ValueError:
            return False


MAX_CALLS = 64
"""Most calls of one turn that are read. A token or two begin a call, and each costs a parse, a record and a result."""


def thoughts_of(text: str) -> str:
    """The rest of the turn: what it thought, without the marks."""
    thoughts, end, _ = text.rpartition("</think>")
    if not end:
        return "" if after_thoughts(text) else text.strip().removeprefix("<think>").strip()
    return thoughts.strip().removeprefix("<think>").strip()


def after_thoughts(text: str) -> str:
    """The part of a turn where calls count: after the last `</think>`. One quoted while thinking is not meant."""
    _, end, rest = text.rpartition("</think>")
    return "" if not end and text.lstrip().startswith("<think>") else rest
