"""Tool calls in what the policy wrote. The loop asks a `ToolCallParser`: vLLM's, behind
`rayapp.engines.vllm_tool_parser`, or `HermesParser`, which reads the hermes form where vLLM is not at hand (tests,
benchmarks).

A parser never raises for what the policy wrote: a call that can't be read is a `RawCall` with its `problem`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCall:
    """A call as the policy wrote it, not checked against any schema."""

    name: str = ""
    arguments: str = "{}"
    """JSON text."""
    problem: str = ""
    """Why this is no call; empty if it is one."""


class ToolCallParser(Protocol):
    """Finds tool calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        """Every call in one turn's text, in order; special tokens of the model are part of the text."""
        ...


_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return tuple(_read_block(match.group(1)) for match in _BLOCK.finditer(text))


def _read_block(block: str) -> RawCall:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError) as error:
        return RawCall(problem=f"not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        return RawCall(problem='a call must be a JSON object with "name" and "arguments"')
    return RawCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
