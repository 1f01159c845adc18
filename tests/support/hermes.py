"""Tool calls in the hermes form, read without vLLM. The agent loop's tests use it in place of vLLM's parser, and
`tests/contracts/test_tool_parsers.py` compares the two.
"""

from __future__ import annotations

import json
import re
from itertools import islice

from rayapp.tools.base import MAX_CALLS, RawCall, with_whole_strings

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write calls."""

    start = "<tool_call>"

    def parse(self, text: str) -> tuple[RawCall, ...]:
        blocks = _BLOCK.finditer(with_whole_strings(text, self.start))
        return tuple(_read_block(match.group(1)) for match in islice(blocks, MAX_CALLS + 1))

    def words(self, text: str) -> str:
        return text.partition("<tool_call>")[0].rstrip()


def _read_block(block: str) -> RawCall:
    try:
        call = json.loads(block)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return RawCall(problem='a call must be a JSON object with "name" and "arguments"')
        return RawCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        return RawCall(problem=f"not valid JSON: {error}")


def call(name: str, **arguments: object) -> str:
    """Return a call of a tool as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
